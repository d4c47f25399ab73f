"""Row of an index -> the unit of the run that it came from, and the key of its sample there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from embq.core.errors import EmbqError
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.storage.paths import Place
from embq.core.units import Unit
from embq.retrieval.serving.http_errors import HttpError

if TYPE_CHECKING:
    from embq.index.collection.collection import Collection

MANIFESTS = 8
"""Runs whose manifest is open; each holds the ids and descriptions of up to 50,000 units."""

UNITS = 4_096
"""Units that are kept: a search finds rows of a few units again and again."""

LOOK_S = 10.0
"""A manifest that lacks a unit is opened anew after so long: units are added to a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a row came from.

    Attributes:
        run: output folder of its run.
        unit: the unit that was read for it.
        key: of its sample, as rows have it: what UTF-8 cannot hold is escaped.
        ordinal: position of the sample in the unit; reads the rows of the run.
    """

    run: Place
    unit: Unit
    key: str
    ordinal: Callable[[], int]


class Finder:
    """Finds the origins of rows. Thread-safe."""

    def __init__(self) -> None:
        self._units_of = lru_cache(MANIFESTS)(_Units)

    def origin(self, collection: Collection, id_: int, key: str, unit_id: str | None) -> Origin:
        """The origin of a row, by its identity in the index.

        Raises HttpError `no_thumbnail` if the index is not of a run, or its run is not here or lacks the unit.
        """
        run = collection.run_of(id_) if id_ < collection.n else None
        if run is None or unit_id is None:
            raise no_thumbnail(
                "its index is of a folder of embeddings, which does not say where its images are",
                "index the output of an embq run",
            )
        try:
            unit = self._units_of(run).find(unit_id)
        except LookupError:
            raise no_thumbnail(f"the run in {run} has no unit {unit_id}", "index the run again") from None
        except (EmbqError, OSError) as error:
            raise no_thumbnail(f"the manifest of its run cannot be read: {error}", "bring it back") from error
        return Origin(run=run, unit=unit, key=key, ordinal=partial(collection.ordinal_of, id_))


class _Units:
    """The units of one run by their ids."""

    def __init__(self, run: Place) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._manifest: Manifest | None = None
        self._opened_at = 0.0
        self._unit = lru_cache(UNITS)(self._read)

    def find(self, unit_id: str) -> Unit:
        """The unit with this id. Raises LookupError if there is none, which is not kept."""
        with self._lock:
            return self._unit(unit_id)

    def _read(self, unit_id: str) -> Unit:
        unit = None if self._manifest is None else self._manifest.find(unit_id)
        if unit is None and (self._manifest is None or time.monotonic() > self._opened_at + LOOK_S):
            self._manifest, self._opened_at = Manifest(Layout(self._run)), time.monotonic()
            unit = self._manifest.find(unit_id)
        # The column of ids is beside the description that they are hashes of.
        if unit is None or unit.unit_id != unit_id:
            raise LookupError(unit_id)
        return unit


def no_thumbnail(why: str, next_step: str, *, code: str = "no_thumbnail", status: int = 404) -> HttpError:
    """The error for a row without a thumbnail."""
    return HttpError(f"the row has no thumbnail: {why}", code=code, next_step=next_step, status=status)
