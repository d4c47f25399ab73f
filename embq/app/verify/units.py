"""Checks the rows and failures of a unit against its source: each sample once, with its key and its vector."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embq.app.verify.chunks import Documents
from embq.app.verify.findings import Findings
from embq.app.verify.metadata import StoredMetadata
from embq.app.verify.vectors import COSINE_OFF, wrong_cosines, wrong_norms
from embq.core.errors import OutputError, SourceError
from embq.core.formats.base import vectors
from embq.core.models import has_unit_length
from embq.core.rows.results import clean_text, embedding_columns
from embq.core.run.commits import CommittedUnit
from embq.core.run.run_info import RunInfo
from embq.core.units import DAMAGED_REST, Retry, Sample, Unit
from embq.sources.kinds import source_for
from embq.sources.unit_reader import read

CHANGED = ("source_changed", "source_denied", "source_missing", "storage_missing")
"""Codes of a source that is not what was planned any more, so that nothing can be compared with it."""

SHOWN = 3
"""Samples named in one violation."""


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
    """Collects what a unit's source says about its rows.

    Args:
        mapped: a map has changed the samples, so that only their metadata can be compared.
    """

    def __init__(self, rows: Rows, *, mapped: bool) -> None:
        self.captions: list[tuple[int, str]] = []
        self.metadata: list[str] = []
        self._rows = rows
        self._mapped = mapped

    def add_sample(self, position: int, sample: Sample) -> None:
        """One sample and the position of its row."""
        captions = self._rows.captions
        if captions is not None and not self._mapped and captions[position] != sample.text:
            self.captions.append(self._rows.names[position])
        self.take_metadata(position, sample)

    def take_metadata(self, position: int, sample: Sample) -> None:
        """The metadata of one row."""
        if why := self._rows.metadata.differs(position, sample.metadata):
            self.metadata.append(f"{self._rows.names[position][1]!r}: {why}")


def pairs(table: pa.Table) -> list[tuple[int, str]]:
    """(ordinal, key) of each row or failure."""
    if not table.num_rows:
        return []
    return list(zip(table["ordinal"].to_pylist(), table["key"].to_pylist(), strict=True))


def listed(what: list[str]) -> str:
    """The first few, and how many there are more."""
    return "; ".join(what[:SHOWN]) + (f" (and {len(what) - SHOWN} more)" if len(what) > SHOWN else "")


def first_few(samples: Iterable[tuple[int, str]]) -> str:
    """The first few of (ordinal, key), and how many there are more."""
    listed = list(samples)
    shown = ", ".join(f"{key!r} (sample {ordinal})" for ordinal, key in listed[:SHOWN])
    return shown + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


class Units:
    """Checks units one at a time; only counts are kept.

    Attributes:
        keys: samples whose keys were compared with the source.
        beside: rows with metadata that fit no column.
        not_compared: kind of a plug-in -> units that were not compared with their sources.
    """

    metadata = StoredMetadata

    def __init__(self, info: RunInfo, findings: Findings) -> None:
        self.keys = 0
        self.beside = 0
        self.not_compared: Counter[str] = Counter()
        self._findings = findings
        self._columns = embedding_columns(info.model.output_names)
        self._rows = info.rows
        self._unit_length = {
            column: info.rows.unit_length or (has_unit_length(output.spec) and not info.rows.truncate_dim)
            for column, output in zip(self._columns, info.model.outputs, strict=True)
        }
        outputs = dict(zip(info.model.output_names, self._columns, strict=True))
        self._compared = {
            column: (outputs[image], outputs[text])
            for column, (image, text) in (info.model.compared.items() if info.rows.similarity else ())
        }
        self._chunking = info.model.chunking
        self._texts = "text" in info.model.modalities

    def check(
        self,
        where: str,
        recorded: CommittedUnit,
        unit: Unit | None,
        rows: pa.Table,
        failures: pa.Table,
        again: Sequence[Retry] = (),
    ) -> None:
        """Check one unit.

        Args:
            where: the record and the unit, for messages.
            recorded: the unit in the commit record.
            unit: the manifest's unit; None if it has none, and then there is no source to compare with.
            rows: the unit's rows in their file's schema; no columns are needed if there are none.
            failures: its failures, likewise.
            again: later retries of its samples; a sample that was mended may have another key now.
        """
        self._check_ids(where, recorded, rows, failures)
        self._check_codes(where, recorded, failures)
        stored = self._vectors(where, rows)
        metadata = self.metadata(rows, self._rows.columns)
        self.beside += metadata.beside
        if self._is_whole(where, recorded, rows, failures):
            return
        if unit is not None and not self.can_read(unit):
            self._check_count(where, unit, rows, failures)
            unit = None
        if self._chunking is not None:
            self._check_chunks(where, unit, rows, failures, Rows(rows, stored, metadata), again)
            return
        failures, rest = self._without_rest(where, unit, rows, failures)
        samples = pairs(rows) + pairs(failures)
        ordinals = {ordinal for ordinal, _ in samples}
        if len(ordinals) != len(samples):
            self._findings.add("ordinals", where, f"{len(samples) - len(ordinals)} samples are there twice")
        if unit is not None:
            retried = _retried(again, failures)
            samples = [pair for pair in samples if pair[0] not in retried]
            self._compare(where, unit, samples, retried, Rows(rows, stored, metadata), rest)

    def _check_count(self, where: str, unit: Unit, rows: pa.Table, failures: pa.Table) -> None:
        """All that can be said of a unit that only a plug-in reads."""
        self.not_compared[unit.kind] += 1
        count = len({ordinal for ordinal, _ in pairs(rows) + pairs(failures)})
        if unit.expected not in (None, count):
            self._findings.add("keys", where, f"{count} samples, and {unit.expected} were planned")

    def _check_ids(self, where: str, recorded: CommittedUnit, rows: pa.Table, failures: pa.Table) -> None:
        for name, table in (("row", rows), ("failure", failures)):
            ids = table["unit_id"].unique().to_pylist() if table.num_rows else []
            if ids not in ([], [recorded.unit_id]):
                other = next(id_ for id_ in ids if id_ != recorded.unit_id)
                self._findings.add("unit_rows", where, f"it has a {name} of unit {other}")

    def _check_codes(self, where: str, recorded: CommittedUnit, failures: pa.Table) -> None:
        codes = failures["code"].to_pylist() if failures.num_rows else []
        if unnamed := codes.count(""):
            self._findings.add("failure_code", where, f"{unnamed} of its failures have no code")
        if recorded.quarantined and codes and recorded.quarantined not in codes:
            self._findings.add(
                "failure_code",
                where,
                f"its record says that it failed as {recorded.quarantined!r}, its failure {codes[0]!r}",
            )

    def _vectors(self, where: str, rows: pa.Table) -> dict[str, np.ndarray]:
        """The vectors by column, checked to be there and finite."""
        by_column: dict[str, np.ndarray] = {}
        for column in self._columns if rows.num_rows else ():
            try:
                by_column[column] = vectors(rows, column)
            except OutputError:
                self._findings.add("vectors", where, f"a row has no {column}")
                continue
            finite = np.isfinite(by_column[column]).all(axis=1)
            if not finite.all():
                key = rows["key"][int(np.argmin(finite))].as_py()
                self._findings.add("finite", where, f"{int((~finite).sum())} rows hold NaN or infinity, first {key!r}")
            elif self._unit_length[column] and (wrong := wrong_norms(by_column[column], self._rows)).any():
                key = rows["key"][int(np.argmax(wrong))].as_py()
                self._findings.add("norms", where, f"{int(wrong.sum())} {column}s do not have length 1, first {key!r}")
        self._check_cosines(where, rows, by_column)
        return by_column

    def _check_cosines(self, where: str, rows: pa.Table, by_column: dict[str, np.ndarray]) -> None:
        """Check stored similarities against the stored vectors, if these are precise enough."""
        for column, (image, text) in self._compared.items() if rows.num_rows else ():
            recorded = rows[column].to_numpy()
            off = COSINE_OFF.get(self._rows.dtype) if not self._rows.truncate_dim else None
            if off is not None and image in by_column and text in by_column:
                wrong = wrong_cosines(recorded, by_column[image], by_column[text], off)
            else:
                wrong = ~(np.abs(recorded) <= 1.0)
            if wrong.any():
                key = rows["key"][int(np.argmax(wrong))].as_py()
                self._findings.add("similarity", where, f"{int(wrong.sum())} are not those of their row, first {key!r}")

    def _is_whole(self, where: str, recorded: CommittedUnit, rows: pa.Table, failures: pa.Table) -> bool:
        """True if one failure represents the whole unit."""
        is_whole = bool(failures.num_rows) and failures["ordinal"].null_count > 0
        if is_whole != bool(recorded.quarantined):
            self._findings.add("whole_unit", where, "its record and its failures disagree on whether it failed whole")
        if is_whole and (rows.num_rows or failures.num_rows != 1):
            self._findings.add("whole_unit", where, "it failed whole and has rows or further failures")
        return is_whole

    def _without_rest(self, where: str, unit: Unit | None, rows: pa.Table, failures: pa.Table) -> tuple[pa.Table, int]:
        """The failures of single samples, and the ordinal from which one failure stands for the rest of a shard."""
        if not failures.num_rows:
            return failures, sys.maxsize
        of_rest = pc.equal(failures["code"], DAMAGED_REST)
        if unit is not None and unit.retry is not None and unit.retry.is_rest and not rows.num_rows:
            again = pc.match_substring_regex(failures["key"], f":{unit.retry.keys}#?$")  # failed as a whole
            of_rest = pc.or_(of_rest, again)
        ordinals = failures.filter(of_rest)["ordinal"].to_pylist()
        failures = failures.filter(pc.invert(of_rest))
        rest = min(ordinals, default=sys.maxsize)
        behind = [pair for pair in pairs(rows) + pairs(failures) if pair[0] >= rest]
        if len(ordinals) > 1 or behind:
            self._findings.add("ordinals", where, f"samples behind the damage of its shard: {first_few(behind)}")
        return failures, rest

    def can_read(self, unit: Unit) -> bool:
        """True if `read` can; False for the kind of a plug-in that is not installed here."""
        try:
            return bool(source_for(unit.kind))
        except SourceError:
            return False

    def read(self, unit: Unit) -> Iterator[Sample]:
        """All samples of the slice of a source that the unit names, of a retry too, without the bytes of images.

        Raises SourceError as `embq.sources.unit_reader.read` does.
        """
        return read(replace(unit, retry=None), (), images=False, texts=self._texts)

    def content(self, rows: Rows, *, mapped: bool) -> Content:
        """What collects the differences of one unit."""
        return Content(rows, mapped=mapped)

    def documents(self, rows: pa.Table, failures: pa.Table) -> Documents:
        """What checks the chunks of one unit."""
        return Documents(rows, failures)

    def _samples(self, where: str, unit: Unit, rest: int) -> Iterator[tuple[int, Sample]]:
        """(ordinal, sample) of each up to the ordinal `rest`.

        Raises _NotComparedError, after it was reported, if the source has changed or cannot be read.
        """
        try:
            samples = islice(self.read(unit), rest)
            # A retry of files names those alone that it repeats.
            of_files = unit.selected if unit.kind == "files" else None
            yield from zip(of_files, samples, strict=True) if of_files else enumerate(samples)
        except SourceError as error:
            if error.code in CHANGED:
                self._findings.add("source_changed", where, f"cannot be checked: {error.message}")
            else:
                message = f"it has rows or failures, and a second reading fails: {error.message}"
                self._findings.add("keys", where, message)
            raise _NotComparedError(error.code) from error

    def _compare(
        self, where: str, unit: Unit, samples: list[tuple[int, str]], retried: Set[int], rows: Rows, rest: int
    ) -> None:
        """Compare with a second reading of the source, up to the ordinal `rest`."""
        keys: list[tuple[int, str]] = []
        count = 0
        unread: list[str] = []
        check = self.content(rows, mapped=_is_mapped(unit))
        chosen = None if unit.selected is None else frozenset(unit.selected)
        try:
            for ordinal, sample in self._samples(where, unit, rest):
                count += 1
                if ordinal not in retried and (ordinal >= unit.first_ordinal if chosen is None else ordinal in chosen):
                    keys.append((ordinal, clean_text(sample.key)))
                position = rows.position.get(ordinal)
                if position is not None and sample.error is not None:
                    unread.append(f"cannot be checked: {sample.key!r}: {sample.error[1]}")
                elif position is not None:
                    check.add_sample(position, sample)
        except _NotComparedError as error:
            committed = len(samples) + len(retried)
            if error.code in CHANGED and unit.expected not in (None, committed):
                self._findings.add(
                    "keys", where, f"{committed} samples, {unit.expected} were planned, and the source cannot tell"
                )
            return
        if unread:
            self._findings.add("source_changed", where, listed(unread))
        if unit.samples is not None and unit.samples != count:
            self._findings.add("keys", where, f"the manifest says {unit.samples} samples, the source has {count}")
        self._compare_keys(where, samples, keys)
        self.add_differences(where, rows, check)

    def add_differences(self, where: str, rows: Rows, check: Content) -> None:
        """Report what was collected."""
        if check.captions:
            self._findings.add("captions", where, f"not the text of the source: {first_few(check.captions)}")
        if check.metadata:
            self._findings.add("metadata", where, f"not those of the source: {listed(check.metadata)}")

    def _check_chunks(
        self, where: str, unit: Unit | None, rows: pa.Table, failures: pa.Table, by_place: Rows, again: Sequence[Retry]
    ) -> None:
        """Compare the rows of cut texts with a second reading of the source."""
        failures, rest = self._without_rest(where, unit, rows, failures)
        documents = self.documents(rows, failures)
        if unit is None:
            return
        wrong: list[str] = []
        check = self.content(by_place, mapped=True)  # `documents` compares the texts
        count = 0
        retried, chosen = _retried(again, failures), None if unit.selected is None else frozenset(unit.selected)
        try:
            for ordinal, sample in self._samples(where, unit, rest):
                count += 1
                if ordinal in retried or (ordinal < unit.first_ordinal if chosen is None else ordinal not in chosen):
                    continue
                key = clean_text(sample.key)
                if not _is_mapped(unit) and (why := documents.check(ordinal, key, sample.text)):
                    wrong.append(f"text {key!r}: {why}")
                for position in by_place.positions.get(ordinal, ()):
                    check.take_metadata(position, sample)
        except _NotComparedError:
            return
        self.keys += rows.num_rows + sum(ordinal not in retried for ordinal, _ in pairs(failures))
        if unit.samples is not None and unit.samples != count:
            self._findings.add("keys", where, f"the manifest says {unit.samples} samples, the source has {count}")
        if documents.ordinals - (set(range(count)) if chosen is None else chosen):
            self._findings.add("keys", where, f"it has rows or failures of more than the {count} texts of the source")
        if wrong:
            self._findings.add("chunks", where, listed(wrong))
        self.add_differences(where, by_place, check)

    def _compare_keys(self, where: str, samples: list[tuple[int, str]], expected: list[tuple[int, str]]) -> None:
        self.keys += len(samples)
        if sorted(samples) == expected:
            return
        committed, source = Counter(samples), Counter(expected)
        missing, extra = list((source - committed).elements()), list((committed - source).elements())
        parts = [f"{len(samples)} samples, the source has {len(expected)}"]
        if missing:
            parts.append(f"without row and failure: {first_few(missing)}")
        if extra:
            parts.append(f"not in the source: {first_few(extra)}")
        self._findings.add("keys", where, "; ".join(parts))


class _NotComparedError(Exception):
    """A unit cannot be compared with its source.

    Attributes:
        code: of the SourceError.
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def _is_mapped(unit: Unit) -> bool:
    return any(name == "map" for name, _ in unit.options)


def _retried(again: Sequence[Retry], failures: pa.Table) -> Set[int]:
    """The ordinals of failures that a later retry does again."""
    failed = set(failures["ordinal"].to_pylist()) if failures.num_rows else set()
    return {ordinal for retry in again for ordinal in retry.ordinals if ordinal in failed}
