"""Checks the rows and failures of a unit against its source: each sample once, with its key and its vector."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embq.app.verify.chunks import Documents
from embq.app.verify.findings import Findings
from embq.app.verify.metadata import StoredMetadata
from embq.app.verify.rereading import READERS, SourceChangedError, SourceSample, SourceUnreadableError, reread
from embq.app.verify.vectors import COSINE_OFF, differing, wrong_cosines, wrong_norms
from embq.core.errors import OutputError
from embq.core.formats.base import vectors
from embq.core.models import ModelConfig, ModelSpec, has_unit_length
from embq.core.rows.results import embedding_columns
from embq.core.run.commits import CommittedUnit
from embq.core.run.run_info import RunInfo
from embq.core.units import DAMAGED_REST, Retry, Unit
from embq.worker.embedders.stub import stub_digest, stub_vectors

SHOWN = 3
"""Samples named in one violation."""


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

    def __init__(self, rows: Rows, stubs: tuple[Stub, ...], *, mapped: bool = False) -> None:
        self.captions: list[tuple[int, str]] = []
        self.metadata: list[str] = []
        self.absent: list[tuple[int, str]] = []
        self.positions: list[int] = []
        self.digests: list[list[bytes]] = [[] for _ in stubs]
        self._rows = rows
        self._stubs = stubs
        self._mapped = mapped

    def take(self, ordinal: int, found: SourceSample) -> None:
        """One sample that has a row."""
        position = self._rows.position[ordinal]
        captions = self._rows.captions
        if self._mapped:  # the source does not tell what the map made of it
            self.take_metadata(position, found)
            return
        text = None if found.text is None else found.text.encode("utf-8", "backslashreplace")
        if captions is not None and captions[position] != (None if text is None else text.decode()):
            self.captions.append(self._rows.names[position])
        self.take_metadata(position, found)
        self._digest(position, found.image, text)

    def take_metadata(self, position: int, found: SourceSample) -> None:
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


class Units:
    """Checks units one at a time; only counts are kept.

    Attributes:
        keys: samples whose keys were compared with the source.
        recomputed: rows whose vectors were recomputed and compared; see `embq.app.verify.vectors.differing`.
        beside: rows with metadata that fit no column.
        not_compared: kind of a plug-in -> units that were not compared with their sources.
    """

    def __init__(self, info: RunInfo, findings: Findings) -> None:
        self.keys = 0
        self.recomputed = 0
        self.beside = 0
        self.not_compared: Counter[str] = Counter()
        self._findings = findings
        self._columns = embedding_columns(info.model.output_names)
        self._stubs = stubs_of(info.model)
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
            unit: the manifest's unit; None where it has none, and then there is no source to compare with.
            rows: the unit's rows in their file's schema; no columns are needed where there are none.
            failures: its failures, likewise.
            again: later retries of its samples; a sample that was mended may have another key now.
        """
        self._check_ids(where, recorded, rows, failures)
        self._check_codes(where, recorded, failures)
        stored = self._vectors(where, rows)
        metadata = StoredMetadata(rows, self._rows.columns)
        self.beside += metadata.beside
        if self._is_whole(where, recorded, rows, failures):
            return
        if unit is not None and unit.kind not in READERS:
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
                other = next(one for one in ids if one != recorded.unit_id)
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
        found: dict[str, np.ndarray] = {}
        for column in self._columns if rows.num_rows else ():
            try:
                found[column] = vectors(rows, column)
            except OutputError:
                self._findings.add("vectors", where, f"a row has no {column}")
                continue
            finite = np.isfinite(found[column]).all(axis=1)
            if not finite.all():
                key = rows["key"][int(np.argmin(finite))].as_py()
                self._findings.add("finite", where, f"{int((~finite).sum())} rows hold NaN or infinity, first {key!r}")
            elif self._unit_length[column] and (wrong := wrong_norms(found[column], self._rows)).any():
                key = rows["key"][int(np.argmax(wrong))].as_py()
                self._findings.add("norms", where, f"{int(wrong.sum())} {column}s do not have length 1, first {key!r}")
        self._check_cosines(where, rows, found)
        return found

    def _check_cosines(self, where: str, rows: pa.Table, found: dict[str, np.ndarray]) -> None:
        """Check stored similarities against the stored vectors, where these are precise enough."""
        for column, (image, text) in self._compared.items() if rows.num_rows else ():
            recorded = rows[column].to_numpy()
            off = COSINE_OFF.get(self._rows.dtype) if not self._rows.truncate_dim else None
            if off is not None and image in found and text in found:
                wrong = wrong_cosines(recorded, found[image], found[text], off)
            else:
                wrong = ~(np.abs(recorded) <= 1.0)
            if wrong.any():
                key = rows["key"][int(np.argmax(wrong))].as_py()
                self._findings.add("similarity", where, f"{int(wrong.sum())} are not those of their row, first {key!r}")

    def _is_whole(self, where: str, recorded: CommittedUnit, rows: pa.Table, failures: pa.Table) -> bool:
        """True if one failure represents the whole unit."""
        whole = bool(failures.num_rows) and failures["ordinal"].null_count > 0
        if whole != bool(recorded.quarantined):
            self._findings.add("whole_unit", where, "its record and its failures disagree on whether it failed whole")
        if whole and (rows.num_rows or failures.num_rows != 1):
            self._findings.add("whole_unit", where, "it failed whole and has rows or further failures")
        return whole

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
            self._findings.add("ordinals", where, f"samples behind the damage of its shard: {some(behind)}")
        return failures, rest

    def _compare(
        self, where: str, unit: Unit, samples: list[tuple[int, str]], retried: Set[int], rows: Rows, rest: int
    ) -> None:
        """Compare with an independent second reading of the source, up to the ordinal `rest`."""
        keys: list[tuple[int, str]] = []
        count = 0
        changed: list[str] = []
        check = Content(rows, self._stubs, mapped=_is_mapped(unit))
        images = any(stub.modality == "image" for stub in self._stubs)
        wanted = None if unit.wanted is None else frozenset(unit.wanted)
        try:
            for ordinal, found in islice(numbered(unit, images=images), rest):
                count += 1
                if ordinal not in retried and (ordinal >= unit.first_ordinal if wanted is None else ordinal in wanted):
                    keys.append((ordinal, found.key))
                if ordinal not in rows.position:
                    continue
                if found.changed:
                    changed.append(found.changed)
                else:
                    check.take(ordinal, found)
        except SourceChangedError as error:
            self._findings.add("source_changed", where, str(error))
            there = len(samples) + len(retried)
            if unit.expected is not None and unit.expected != there:
                self._findings.add(
                    "keys", where, f"{there} samples, {unit.expected} were planned, and the source cannot tell"
                )
            return
        except SourceUnreadableError as error:
            self._findings.add("keys", where, f"it has rows or failures, and a second reading fails: {error}")
            return
        if changed:
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            self._findings.add("source_changed", where, changed[0] + more)
        if unit.samples is not None and unit.samples != count:
            self._findings.add("keys", where, f"the manifest says {unit.samples} samples, the source has {count}")
        self._compare_keys(where, samples, keys)
        if check.captions:
            self._findings.add("captions", where, f"not the text of the source: {some(check.captions)}")
        if check.metadata:
            self._findings.add("metadata", where, f"not those of the source: {listed(check.metadata)}")
        wrong = check.absent + self._wrong_vectors(check, rows)
        if wrong:
            self._findings.add("vectors", where, f"not what the sample's bytes give: {some(wrong)}")

    def _check_chunks(
        self,
        where: str,
        unit: Unit | None,
        rows: pa.Table,
        failures: pa.Table,
        by_place: Rows,
        again: Sequence[Retry],
    ) -> None:
        """Compare the rows of cut texts with an independent second reading of the source."""
        failures, rest = self._without_rest(where, unit, rows, failures)
        documents = Documents(rows, failures, self._chunking if self._stubs else None)
        if unit is None:
            return
        wrong: list[str] = []
        check = Content(by_place, self._stubs)
        count = 0
        retried, wanted = _retried(again, failures), None if unit.wanted is None else frozenset(unit.wanted)
        try:
            for ordinal, found in islice(numbered(unit, images=False), rest):
                count += 1
                if ordinal in retried or (ordinal < unit.first_ordinal if wanted is None else ordinal not in wanted):
                    continue
                if why := found.changed or (
                    "" if _is_mapped(unit) else documents.check(ordinal, found.key, found.text)
                ):
                    wrong.append(f"text {found.key!r}: {why}")
                for position in by_place.positions.get(ordinal, ()):
                    check.take_metadata(position, found)
        except SourceChangedError as error:
            self._findings.add("source_changed", where, str(error))
            return
        except SourceUnreadableError as error:
            self._findings.add("keys", where, f"it has rows or failures, and a second reading fails: {error}")
            return
        self.keys += rows.num_rows + sum(ordinal not in retried for ordinal, _ in pairs(failures))
        if unit.samples is not None and unit.samples != count:
            self._findings.add("keys", where, f"the manifest says {unit.samples} samples, the source has {count}")
        if documents.ordinals - (set(range(count)) if wanted is None else wanted):
            self._findings.add("keys", where, f"it has rows or failures of more than the {count} texts of the source")
        if wrong:
            self._findings.add("chunks", where, listed(wrong))
        if check.metadata:
            self._findings.add("metadata", where, f"not those of the source: {listed(check.metadata)}")
        for position, text in enumerate(rows["caption"].to_pylist() if rows.num_rows else ()):
            check.take_row(position, text)
        if bad := self._wrong_vectors(check, by_place):
            self._findings.add("vectors", where, f"not what the chunk's bytes give: {some(bad)}")

    def _compare_keys(self, where: str, samples: list[tuple[int, str]], expected: list[tuple[int, str]]) -> None:
        self.keys += len(samples)
        if sorted(samples) == expected:
            return
        there, source = Counter(samples), Counter(expected)
        missing, extra = list((source - there).elements()), list((there - source).elements())
        parts = [f"{len(samples)} samples, the source has {len(expected)}"]
        if missing:
            parts.append(f"without row and failure: {some(missing)}")
        if extra:
            parts.append(f"not in the source: {some(extra)}")
        self._findings.add("keys", where, "; ".join(parts))

    def _wrong_vectors(self, check: Content, rows: Rows) -> list[tuple[int, str]]:
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


def numbered(unit: Unit, *, images: bool) -> Iterator[tuple[int, SourceSample]]:
    """(ordinal, sample) of what a second reading of the unit finds; of a retry of files, only those are named."""
    found = reread(unit, images=images)
    return zip(unit.wanted, found, strict=True) if unit.wanted and unit.kind == "files" else enumerate(found)


def _is_mapped(unit: Unit) -> bool:
    return any(name == "map" for name, _ in unit.options)


def _retried(again: Sequence[Retry], failures: pa.Table) -> Set[int]:
    """The ordinals of failures that a later retry does again."""
    failed = set(failures["ordinal"].to_pylist()) if failures.num_rows else set()
    return {ordinal for retry in again for ordinal in retry.ordinals if ordinal in failed}
