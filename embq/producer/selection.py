"""Selection of inputs by --include, --exclude, --sample and --limit; deterministic."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, groupby

from embq.core.errors import UsageError
from embq.core.units import Unit
from embq.sources.formats.image_folder import cut
from embq.sources.kinds import source_for

SELECTED = ("exclude", "include", "limit", "sample")
"""Names of a selection's fields among the recorded options of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of the inputs that is taken; the fields apply in this order.

    Attributes:
        include: patterns, one of which a file's path must match; () takes every file.
        exclude: patterns, none of which it may match.
        sample: the fraction that is taken, above 0 and at most 1: of images in folders, else of units. A hash of where
            it stands decides, so a file that comes later changes nothing for the others.
        limit: number of samples that are taken; 0 for all. Shards are read to count theirs. A file that fails as a
            whole counts as one, and a unit of a plug-in that cannot divide it is taken whole.

    A pattern is one of a shell, matched against the whole path or against its end behind a slash; `*` matches "/" too.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    sample: float = 1.0
    limit: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.sample <= 1:
            raise UsageError(f"--sample {self.sample:g} is no fraction", next_step="for example --sample 0.01")
        if self.limit < 0:
            raise UsageError(f"--limit {self.limit} is less than nothing", next_step="for example --limit 1000")

    def recorded(self) -> tuple[tuple[str, str], ...]:
        """The fields that leave anything out, as the run records them."""
        fields = []
        if self.exclude:
            fields.append(("exclude", json.dumps(self.exclude)))
        if self.include:
            fields.append(("include", json.dumps(self.include)))
        if self.limit:
            fields.append(("limit", str(self.limit)))
        if self.sample < 1:
            fields.append(("sample", repr(self.sample)))
        return tuple(fields)

    @property
    def all(self) -> bool:
        """True if nothing is left out."""
        return not self.recorded()

    def takes(self, path: str) -> bool:
        """True if a file of this path is taken, by its name alone."""
        if self.include and not any(_matches(path, pattern) for pattern in self.include):
            return False
        return not any(_matches(path, pattern) for pattern in self.exclude)

    def narrow(self, units: Iterator[Unit], unit_samples: int) -> Iterator[Unit]:
        """The units that are taken, of sources that `takes` takes; folders are narrowed here."""
        narrowed = self._part(units, unit_samples)
        return self._first(narrowed) if self.limit else narrowed

    def _part(self, units: Iterator[Unit], unit_samples: int) -> Iterator[Unit]:
        by_name = bool(self.include or self.exclude)
        for (kind, source), group in groupby(units, key=lambda unit: (unit.kind, unit.source)):
            if kind != "files":
                yield from (unit for unit in group if self._hit(source, str(unit.start)))
            elif by_name or self.sample < 1:
                first = next(group)
                items = (
                    item
                    for unit in chain([first], group)
                    for item in unit.items
                    if self.takes(f"{source}/{item[0]}") and self._hit(source, item[0])
                )
                yield from cut(first, items, unit_samples)
            else:
                yield from group

    def _first(self, units: Iterator[Unit]) -> Iterator[Unit]:
        remaining = self.limit
        for unit in units:
            source = source_for(unit.kind)
            samples = source.count_samples(unit, remaining + 1)
            if samples > remaining:
                yield source.part(unit, 0, remaining)
                return
            yield unit
            remaining -= samples
            if not remaining:
                return

    def _hit(self, source: str, place: str) -> bool:
        if self.sample >= 1:
            return True
        digest = hashlib.sha256(f"{source}\0{place}".encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") < self.sample * 2**64


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, "*/" + pattern)
