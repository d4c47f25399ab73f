"""The rows of a unit as they stand in the output, and what the samples of its source say of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from core.models import ModelConfig, ModelSpec
from core.rows.results import embedding_columns
from embq.verification.metadata import StoredMetadata
from embq.verification.rereading import Found
from worker.embedders.stub import stub_digest

SHOWN = 3
"""Samples named in one violation."""


@dataclass(frozen=True, slots=True)
class Stub:
    """A column of vectors that can be recomputed from the bytes of the samples' `modality`."""

    column: str
    modality: str
    dim: int


def stubs_of(model: ModelConfig) -> tuple[Stub, ...]:
    """Those of a run's columns that stub models made."""
    columns = zip(embedding_columns(model.output_names), model.outputs, strict=True)
    specs = [(column, output.modality, ModelSpec.parse(output.spec)) for column, output in columns]
    return tuple(Stub(column, modality, int(spec.name)) for column, modality, spec in specs if spec.family == "stub")


class Rows:
    """A unit's rows, found by ordinal; of a text that was cut, there are several."""

    def __init__(self, rows: pa.Table, stored: dict[str, np.ndarray], metadata: StoredMetadata) -> None:
        self.names = pairs(rows)
        self.position = {ordinal: i for i, (ordinal, _) in enumerate(self.names)}
        self.positions: dict[int, list[int]] = {}
        for i, (ordinal, _) in enumerate(self.names):
            self.positions.setdefault(ordinal, []).append(i)
        self.metadata = metadata
        self.vectors = stored
        self.captions = rows["caption"].to_pylist() if "caption" in rows.column_names else None


class Content:
    """Collects what the bytes of a unit's samples say about its rows; keeps digests, never the bytes."""

    def __init__(self, rows: Rows, stubs: tuple[Stub, ...]) -> None:
        self.captions: list[tuple[int, str]] = []
        self.metadata: list[str] = []
        self.absent: list[tuple[int, str]] = []
        self.positions: list[int] = []
        self.digests: list[list[bytes]] = [[] for _ in stubs]
        self._rows = rows
        self._stubs = stubs

    def take(self, ordinal: int, found: Found) -> None:
        """One sample that has a row."""
        position = self._rows.position[ordinal]
        captions = self._rows.captions
        text = None if found.text is None else found.text.encode("utf-8", "backslashreplace")
        if captions is not None and captions[position] != (None if text is None else text.decode()):
            self.captions.append(self._rows.names[position])
        self.take_metadata(position, found)
        self._digest(position, found.image, text)

    def take_metadata(self, position: int, found: Found) -> None:
        """The metadata of one row."""
        if why := self._rows.metadata.differs(position, found.metadata):
            self.metadata.append(f"{self._rows.names[position][1]!r}: {why}")

    def take_row(self, position: int, text: str | None) -> None:
        """One chunk, whose text has been compared with its source."""
        self._digest(position, None, None if text is None else text.encode())

    def _digest(self, position: int, image: bytes | None, text: bytes | None) -> None:
        if not self._stubs:
            return
        contents = [image if stub.modality == "image" else text for stub in self._stubs]
        if any(content is None for content in contents):
            self.absent.append(self._rows.names[position])
            return
        self.positions.append(position)
        for stub, digests, content in zip(self._stubs, self.digests, contents, strict=True):
            digests.append(stub_digest(content or b"", stub.dim))


def pairs(table: pa.Table) -> list[tuple[int, str]]:
    """(ordinal, key) of each row or failure."""
    if not table.num_rows:
        return []
    return list(zip(table["ordinal"].to_pylist(), table["key"].to_pylist(), strict=True))


def listed(what: list[str]) -> str:
    """The first few, and how many there are more."""
    return "; ".join(what[:SHOWN]) + (f" (and {len(what) - SHOWN} more)" if len(what) > SHOWN else "")


def some(samples: Iterable[tuple[int, str]]) -> str:
    """The first few of (ordinal, key), and how many there are more."""
    listed = list(samples)
    shown = ", ".join(f"{key!r} (sample {ordinal})" for ordinal, key in listed[:SHOWN])
    return shown + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")
