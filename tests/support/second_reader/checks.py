"""`embq verify` by a second reader of inputs, which recomputes vectors of stub models: the oracle of tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa

from embq.app.verify.chunks import ChunkRow, Documents
from embq.app.verify.findings import Findings
from embq.app.verify.units import Content, Rows, Units, first_few
from embq.app.verify.vectors import STEP_OFF
from embq.app.verify.verification import Verification, VerificationReport
from embq.app.verify.verification import verify as verify_once
from embq.core.errors import SourceError
from embq.core.models import Chunking, ModelConfig, ModelSpec
from embq.core.rows.results import embedding_columns
from embq.core.rows.spec import RowSpec
from embq.core.run.run_info import RunInfo
from embq.core.storage.paths import Place
from embq.core.units import Sample, Unit
from embq.worker.embedders.stub import stub_digest, stub_vectors
from tests.support.second_reader.metadata import SecondMetadata
from tests.support.second_reader.samples import (
    READERS,
    SourceChangedError,
    SourceUnreadableError,
    reread,
)

RECOMPUTED = {"chunks", "vectors"}
"""Invariants of which the product sees less: it does not know what a stub model gives."""

BIT_VALUES = np.array([128, 64, 32, 16, 8, 4, 2, 1])
LAST_PLACE = {"float16": (2.0**-10, 2.0**-24), "float32": (2.0**-23, 2.0**-149)}
"""The unit in the last place of 1, and the smallest positive number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondReport(VerificationReport):
    """A report, with the number of rows whose vectors were recomputed bit for bit (models `stub:` only)."""

    vectors_recomputed: int


@dataclass(frozen=True, slots=True)
class Stub:
    """A column of vectors that can be recomputed from the bytes of the samples' `modality`."""

    column: str
    modality: str
    dim: int


def stubs_of(model: ModelConfig) -> tuple[Stub, ...]:
    """The columns of a run that stub models made."""
    columns = zip(embedding_columns(model.output_names), model.outputs, strict=True)
    specs = [(column, output.modality, output.spec) for column, output in columns]
    return tuple(
        Stub(column, modality, int(ModelSpec.parse(spec).name))
        for column, modality, spec in specs
        if spec.startswith("stub:")
    )


class Recomputed(Content):
    """Keeps digests of what stub models embed, never the bytes."""

    def __init__(self, rows: Rows, stubs: tuple[Stub, ...], *, mapped: bool, chunked: bool) -> None:
        super().__init__(rows, mapped=mapped)
        self.absent: list[tuple[int, str]] = []
        self.positions: list[int] = []
        self.digests: list[list[bytes]] = [[] for _ in stubs]
        self._stubs = () if mapped and not chunked else stubs

    def add_sample(self, position: int, sample: Sample) -> None:
        super().add_sample(position, sample)
        image = None if sample.image is None else bytes(sample.image)
        self.digest(position, image, None if sample.text is None else sample.text.encode("utf-8", "backslashreplace"))

    def digest(self, position: int, image: bytes | None, text: bytes | None) -> None:
        if not self._stubs:
            return
        contents = [image if stub.modality == "image" else text for stub in self._stubs]
        if any(content is None for content in contents):
            self.absent.append(self._rows.names[position])
            return
        self.positions.append(position)
        for stub, digests, content in zip(self._stubs, self.digests, contents, strict=True):
            digests.append(stub_digest(content or b"", stub.dim))


class Words(Documents):
    """Counts the words of a stub model again."""

    def __init__(self, rows: pa.Table, failures: pa.Table, words: Chunking | None) -> None:
        super().__init__(rows, failures)
        self._words = words

    def content(self, text: str, parts: Sequence[ChunkRow], incomplete: bool) -> str:
        wrong = super().content(text, parts, incomplete)
        return wrong or (self._windows(text, parts) if self._words is not None else "")

    def _windows(self, text: str, parts: Sequence[ChunkRow]) -> str:
        assert self._words is not None
        most, step = self._words.tokens, self._words.tokens - self._words.overlap
        words = text.split()
        for part in parts:
            expected = words[part.chunk * step : part.chunk * step + most]
            if (part.text or "").split() != expected:
                return f"chunk {part.chunk} does not hold words {part.chunk * step} to {part.chunk * step + most}"
            if part.chunks != 1 + max(0, -(-(len(words) - most) // step)):
                return f"{len(words)} words do not make {part.chunks} chunks"
        return ""


class SecondUnits(Units):
    """Attributes: `recomputed`: rows whose vectors were recomputed and compared."""

    metadata = SecondMetadata

    def __init__(self, info: RunInfo, findings: Findings) -> None:
        super().__init__(info, findings)
        self.recomputed = 0
        self._stubs = stubs_of(info.model)

    def can_read(self, unit: Unit) -> bool:
        return unit.kind in READERS

    def read(self, unit: Unit) -> Iterator[Sample]:
        images = any(stub.modality == "image" for stub in self._stubs)
        try:
            for ordinal, found in enumerate(reread(unit, images=images)):
                yield Sample(
                    ordinal=ordinal,
                    key=found.key,
                    image=found.image,
                    text=found.text,
                    metadata=None if found.metadata is None else json.dumps(found.metadata),
                    error=("source_changed", found.changed) if found.changed else None,
                )
        except SourceChangedError as error:
            raise SourceError(str(error), code="source_changed") from error
        except SourceUnreadableError as error:
            raise SourceError(str(error), code="source_damaged") from error

    def content(self, rows: Rows, *, mapped: bool) -> Content:
        return Recomputed(rows, self._stubs, mapped=mapped, chunked=self._chunking is not None)

    def documents(self, rows: pa.Table, failures: pa.Table) -> Documents:
        return Words(rows, failures, self._chunking if self._stubs else None)

    def add_differences(self, where: str, rows: Rows, check: Content) -> None:
        super().add_differences(where, rows, check)
        assert isinstance(check, Recomputed)
        if self._chunking is not None:
            for position, text in enumerate(rows.captions or ()):
                check.digest(position, None, None if text is None else text.encode())
        if wrong := check.absent + self._wrong_vectors(check, rows):
            self._findings.add("vectors", where, f"not what the sample's bytes give: {first_few(wrong)}")

    def _wrong_vectors(self, check: Recomputed, rows: Rows) -> list[tuple[int, str]]:
        """The samples whose stored vectors are not those of their bytes."""
        if not check.positions or any(stub.column not in rows.vectors for stub in self._stubs):
            return []
        good = np.ones(len(check.positions), dtype=bool)
        for stub, digests in zip(self._stubs, check.digests, strict=True):
            stored = rows.vectors[stub.column][check.positions]
            if stored.shape[1] != self._rows.width(stub.dim):
                return [rows.names[position] for position in check.positions]
            good &= ~differing(stored, stub_vectors(digests, stub.dim), self._rows)
        self.recomputed += len(check.positions)
        return [rows.names[check.positions[i]] for i in np.flatnonzero(~good).tolist()]


class SecondVerification(Verification):
    """`embq verify` with `SecondUnits`, and with the rows of tables counted."""

    units = SecondUnits

    def _report(self, litter: list[str]) -> SecondReport:
        report = super()._report(litter)
        assert isinstance(self._units, SecondUnits)
        values = {field.name: getattr(report, field.name) for field in fields(report)}
        return SecondReport(**values, vectors_recomputed=self._units.recomputed)


def verify(root: Place, **options: Any) -> SecondReport:
    """The report of the second reader; `embq verify` itself must find a fault where this finds one, and no other."""
    first = verify_once(root, **options)
    mode, readers = options.pop("mode", "full"), options.pop("readers", None)
    report = SecondVerification(root, mode).run(readers, None)
    assert isinstance(report, SecondReport)
    found, second = ({one.invariant for one in each.violations} for each in (first, report))
    assert found or not second - RECOMPUTED, (first.violations, report.violations)
    assert second or not found, (first.violations, report.violations)
    assert first.samples_checked >= report.samples_checked
    return report


def differing(values: np.ndarray, given: np.ndarray, rows: RowSpec) -> np.ndarray:
    """Mask of stored vectors that differ from the stored form of `given`: bool of shape (n,).

    Floats that are only cut are compared bit for bit, and so are the signs of binary. What was divided by its length
    may be off by one unit in the last place, int8 by half a step.

    Args:
        values: as stored, shape (n, width).
        given: float32 of shape (n, dim), as the model gives them.
    """
    kept = given[:, : rows.truncate_dim].astype(np.float64) if rows.truncate_dim else given.astype(np.float64)
    if rows.unit_length:
        kept = kept / np.linalg.norm(kept, axis=1, keepdims=True)
    wrong: np.ndarray
    off: np.ndarray
    if rows.dtype == "binary":
        signs = (kept > 0).reshape(len(kept), kept.shape[1] // 8, 8)
        wrong = (signs * BIT_VALUES).sum(axis=2) != values
    elif rows.dtype == "int8":
        step = rows.int8_range / 127
        off = np.abs(values.astype(np.float64) * step - np.clip(kept, -rows.int8_range, rows.int8_range))
        wrong = (off > STEP_OFF * step) | (values == -128)
    elif rows.unit_length:
        relative, least = LAST_PLACE[rows.dtype]
        off = np.abs(values.astype(np.float64) - kept)
        wrong = off > relative * np.abs(kept) + least
    else:
        # As bytes: a comparison of numbers would take -0.0 for 0.0.
        wrong = _as_bytes(values) != _as_bytes(kept.astype(rows.dtype))
    return np.asarray(wrong.any(axis=1))


def _as_bytes(matrix: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(matrix).view(np.uint8)
