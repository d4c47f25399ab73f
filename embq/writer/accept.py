"""Validation of results against the manifest and the run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta

from embq.core.broker.bounded import Oversized
from embq.core.errors import AwayError, MalformedError, OutputError, OutsideError
from embq.core.formats.base import FORMAT_ERRORS
from embq.core.formats.part import UNIT_FORMATS, read_unit
from embq.core.process.limits import memory_bytes
from embq.core.queue.keys import VERSION
from embq.core.queue.result_stream import DATA, LIMIT_BYTES, PART_SUFFIX, QUARANTINE, Entry, Sender, read_fields
from embq.core.rows.results import DecodedResult, ResultDecoder, failure_batch, row_schema, vector_widths
from embq.core.run.commits import CommittedFile
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import RunInfo
from embq.core.run.standing_failures import failed_keys, record_failures
from embq.core.storage.beneath import reader
from embq.core.storage.hashing import read_hashed
from embq.core.units import DAMAGED_REST, Failure, Retry, Unit
from embq.core.wire import Count, ShortText, UnitId, Word
from embq.sources.damaged import keeps_damaged
from embq.writer.staging import is_staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A result that will be committed.

    Attributes:
        entry: receipt of its stream entry.
        u: unit index.
        unit_id: unit id, checked against the manifest.
        token: attempt that made it.
        rows: rows without id and unit_id; none if a part has them.
        part: the file of its rows, where the worker has written them, without its final name.
        widths: lengths of its vectors by column, of a part.
        failures: its failures.
        quarantined: code of the failure that stands for the whole unit, or "".
        staged: name of its staging file, or "".
        bytes: its size.
        truncated: texts of which only the beginning was embedded.
        tokens: what its samples cost the device; 0 if the worker does not say.
        unread: samples whose metadata, or captions that are not embedded, could not be read.
        retry: what it does again, if it is a retry.
    """

    entry: str
    u: int
    unit_id: str
    token: str
    rows: pa.Table
    failures: pa.Table
    quarantined: str
    staged: str
    bytes: int
    truncated: int = 0
    tokens: int = 0
    unread: int = 0
    retry: Retry | None = None
    part: CommittedFile | None = None
    widths: Mapping[str, int] = field(default_factory=dict)

    @property
    def row_count(self) -> int:
        """Number of its rows."""
        return self.rows.num_rows if self.part is None else self.part.rows


@dataclass(frozen=True, slots=True)
class _Decoded:
    """What a result says.

    Attributes:
        result: its rows and failures; of rows in a part only the columns that tell which samples they are.
        schema: of its rows.
        bytes: what it takes in memory until it is committed.
        part: see `Accepted`.
    """

    result: DecodedResult
    schema: pa.Schema
    bytes: int
    part: CommittedFile | None = None


class _Version(msgspec.Struct, frozen=True):
    v: Word = ""


class _Published(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a result, besides `data`. Either that is there, or `ref` and `sha256` of a staging file.

    Where the staging file is a part, `data` holds the failures alone.
    """

    unit_id: UnitId
    rows: Count
    failures: Count
    fingerprint: Word
    truncated: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    tokens: Annotated[int, Meta(ge=0, lt=2**36)] = 0  # so that their sum over all units of a run has 64 bits
    unread: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    ref: ShortText = ""
    sha256: Word = ""


class _GivenUp(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the failure that stands for a unit after its last attempt."""

    code: Word
    message: ShortText
    attempts: Annotated[int, Meta(ge=0, lt=1_000_000)]


MOST_MESSAGE = 1_000
"""Characters of the message of a failure."""


class Rejected(Exception):
    """A result that cannot be used; its unit runs again. `code` and the message go into the unit's account.

    Attributes:
        may_come: whether what is missing may only be seen later here, as on a network's file system.
    """

    def __init__(self, code: str, message: str, *, may_come: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.may_come = may_come


class Acceptor:
    """Checks results of one run.

    Attributes:
        fingerprint: the run's; fixed by its first result.
        widths: lengths of its vectors by column; fixed by the first result that has rows.

    Args:
        info: the run. It says which columns a result has, and of which types.
    """

    def __init__(
        self, layout: Layout, manifest: Manifest, info: RunInfo, *, fingerprint: str, widths: Mapping[str, int]
    ) -> None:
        self.layout = layout
        self.manifest = manifest
        self.fingerprint = fingerprint
        self.widths = widths
        outputs = info.model.output_names
        lengths = dict.fromkeys(outputs, 8)  # which only a loaded model tells
        compared = tuple(info.model.compared) if info.rows.similarity else ()
        chunked = info.model.chunking is not None
        self._most_bytes = max(LIMIT_BYTES, memory_bytes() // 4)
        schema = row_schema(outputs, lengths, info.rows, compared=compared, chunked=chunked)
        self._format = info.format
        self._schema = schema.append(pa.field("unit_id", pa.string()))
        self._decoder = ResultDecoder(schema)

    def accept(self, entry: Entry) -> Accepted:
        """The result in a stream entry; Rejected if it cannot be trusted."""
        try:
            return self._accept(entry)
        except MalformedError as error:
            raise Rejected("bad_result", error.message) from error

    def _accept(self, entry: Entry) -> Accepted:
        sender = read_fields(Sender, entry)
        u = sender.u
        unit, unit_id = self.manifest.unit(u), self.manifest.unit_id(u)
        retry = unit.retry
        if sender.token == QUARANTINE:
            return self._given_up(entry, u, unit_id, retry)
        version = read_fields(_Version, entry).v or "none"
        if version != str(VERSION):
            raise Rejected("wrong_version", f"the result is of protocol version {version}, this writer's is {VERSION}")
        header = read_fields(_Published, entry)
        self._check_origin(u, unit_id, header)
        decoded = self._decode(entry, header, unit_id)
        result = decoded.result
        self._check_counts(result, unit, u, header)
        widths = self._check_widths(decoded)
        self.fingerprint, self.widths = header.fingerprint, widths
        failures = self._by_sample(result.failures, retry)
        whole_unit = failures["ordinal"].null_count
        return Accepted(
            entry=entry.receipt,
            u=u,
            unit_id=unit_id,
            token=sender.token,
            rows=result.rows if decoded.part is None else pa.table({}),
            part=decoded.part,
            widths=widths,
            failures=failures,
            quarantined=str(failures["code"][0]) if whole_unit else "",
            staged=header.ref,
            bytes=decoded.bytes,
            truncated=header.truncated,
            tokens=header.tokens,
            unread=header.unread,
            retry=retry,
        )

    def _given_up(self, entry: Entry, u: int, unit_id: str, retry: Retry | None) -> Accepted:
        """The failure that the broker has published for a unit after its last attempt."""
        header = read_fields(_GivenUp, entry)
        unit_failure = Failure(
            ordinal=None,
            key="",
            code=header.code or "crash",
            message=header.message,
            attempt=header.attempts + (0 if retry is None else retry.attempts),
        )
        failures = pa.Table.from_batches([failure_batch([unit_failure])])
        return Accepted(
            entry=entry.receipt,
            u=u,
            unit_id=unit_id,
            token=QUARANTINE,
            rows=pa.table({}),
            failures=self._by_sample(failures, retry),
            quarantined=unit_failure.code if retry is None or not retry.only else "",
            staged="",
            bytes=0,
            retry=retry,
        )

    def _check_origin(self, u: int, unit_id: str, header: _Published) -> None:
        """The result is of this unit and the run's model."""
        if header.unit_id != unit_id:
            raise Rejected("wrong_unit", f"unit {u} is {unit_id}, the result is of {header.unit_id}")
        if self.fingerprint and header.fingerprint != self.fingerprint:
            raise Rejected("wrong_model", f"model fingerprint {header.fingerprint}, the run has {self.fingerprint}")

    def _by_sample(self, failures: pa.Table, retry: Retry | None) -> pa.Table:
        """The failures; one that stands for all samples of a retry as one of each, so that each key keeps its own."""
        if retry is None or not retry.only or not failures["ordinal"].null_count:
            return failures
        (unit_failure,) = failures.to_pylist()
        keys = failed_keys(record_failures(self.layout.root, retry.record), retry)
        each = [
            Failure(
                ordinal=ordinal,
                key=keys[ordinal],
                code=unit_failure["code"],
                message=unit_failure["message"],
                attempt=unit_failure["attempt"],
            )
            for ordinal in retry.ordinals
        ]
        return pa.Table.from_batches([failure_batch(each)])

    def _decode(self, entry: Entry, header: _Published, unit_id: str) -> _Decoded:
        ref, data = header.ref, entry.fields.get(DATA, b"")
        if isinstance(data, Oversized):
            raise Rejected("bad_result", f"its rows have {len(data):,} bytes, or pieces larger than are read")
        if ref and not is_staged(ref, unit_id):
            raise Rejected("bad_result", f"{ref!r} is no staging file of unit {unit_id}")
        try:
            if ref.endswith(PART_SUFFIX):
                return self._look_into(header, self._decoder.decode_failures(data))
            content = self._read(header) if ref else data
            result = self._decoder.decode(content)
            return _Decoded(result, result.rows.schema, len(content))
        except OutsideError as error:
            raise Rejected("bad_result", error.message) from error
        except AwayError:
            raise
        except OutputError as error:
            raise Rejected(error.code, error.message) from error
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            raise Rejected("lost_result", f"staging file {ref} is gone: {error.strerror}", may_come=missing) from error

    def _read(self, header: _Published) -> memoryview:
        """The bytes of a staging file with an encoded result."""
        data, digest = read_hashed(self.layout.staging, header.ref, self._most_bytes)
        # Workers do not fsync these files (a lost one is only computed again), so the hash decides.
        if digest != header.sha256:
            raise Rejected("lost_result", f"staging file {header.ref} is damaged")
        return data

    def _look_into(self, header: _Published, failures: pa.Table) -> _Decoded:
        """What a part says without its vectors, keys and texts being read: they are as good as the worker.

        The worker has synced it, so its hash is not compared here but by `embq verify`.
        """
        if not header.rows:
            raise Rejected("bad_result", f"part {header.ref} has no rows")  # its name would be that of the next part
        if self._format not in UNIT_FORMATS or not self.layout.takes_parts:
            raise Rejected("bad_result", f"a worker writes no part of this run, whose format is {self._format}")
        folder = self.layout.staged_parts
        with reader(folder.parent, f"{folder.name}/{header.ref}") as file:
            size = file.seek(0, os.SEEK_END)
            try:
                schema, rows = read_unit(self._format, file, self._schema, most_rows=header.rows)
            except FORMAT_ERRORS as error:
                raise Rejected("bad_result", f"part {header.ref} is not readable: {error}"[:300]) from error
        part = CommittedFile(path=header.ref, kind="rows", rows=rows.num_rows, bytes=size, sha256=header.sha256)
        return _Decoded(DecodedResult(rows, failures), schema, failures.nbytes, part)

    def _check_widths(self, decoded: _Decoded) -> Mapping[str, int]:
        """The lengths of the run's vectors, which these rows may be the first to tell."""
        if not decoded.result.rows.num_rows:
            return self.widths
        widths = vector_widths(decoded.schema)
        if self.widths and widths != self.widths:
            raise Rejected(
                "wrong_schema",
                f"its vectors have {_widths_text(widths)} numbers, the run's {_widths_text(self.widths)}",
            )
        return widths

    def _check_counts(self, result: DecodedResult, unit: Unit, u: int, header: _Published) -> None:
        """Each ordinal exactly once, as a row or as a failure, and as many as were announced and planned."""
        selected = unit.selected
        rows, failures = result.rows.num_rows, result.failures.num_rows
        if (rows, failures) != (header.rows, header.failures):
            raise Rejected("wrong_count", f"unit {u} has {rows} rows and {failures} failures, not what it announced")
        if failures and not _are_plain(result.failures):
            raise Rejected("bad_result", f"unit {u}: a failure has no plain code, or too long a message")
        if result.failures["ordinal"].null_count:
            if rows or failures != 1:
                raise Rejected("wrong_count", f"unit {u} failed as a whole and has {rows} rows")
            return
        if "chunk" in result.rows.column_names:
            _check_rest(result, unit, u)
            _check_chunks(result, u, selected, unit.expected, unit.first_ordinal)
            return
        if failures:
            _check_rest(result, unit, u)
        if unit.expected not in (None, rows + failures):
            raise Rejected("wrong_count", f"unit {u} has {unit.expected} samples, the result {rows + failures}")
        ordinals = np.concatenate([result.rows["ordinal"].to_numpy(), result.failures["ordinal"].to_numpy()])
        every = np.arange(rows + failures) + unit.first_ordinal if selected is None else selected
        if not np.array_equal(ordinals, every) and not np.array_equal(np.sort(ordinals), every):
            raise Rejected("wrong_count", f"unit {u}: its ordinals are not each there once")


def _widths_text(widths: Mapping[str, int]) -> str:
    return ", ".join(str(width) for width in widths.values())


def _are_plain(failures: pa.Table) -> bool:
    codes = pc.match_substring_regex(failures["code"], "^[A-Za-z0-9._+-]{1,64}$")
    lengths = pc.utf8_length(failures["message"])
    return bool(
        pc.all(codes).as_py() and pc.max(lengths).as_py() <= MOST_MESSAGE and pc.min(failures["attempt"]).as_py() >= 0
    )


def _check_rest(result: DecodedResult, unit: Unit, u: int) -> None:
    """A failure for the rest of a shard is the last of it: its retry returns all samples from that ordinal on."""
    rest = pc.equal(result.failures["code"], DAMAGED_REST)
    if not pc.any(rest).as_py():
        return
    ordinals = result.failures["ordinal"].filter(rest).to_pylist()
    row, failure = (pc.max(table["ordinal"]).as_py() for table in (result.rows, result.failures))
    if (
        not keeps_damaged(unit)
        or unit.selected is not None
        or ordinals != [failure]
        or failure <= (-1 if row is None else row)
    ):
        raise Rejected("wrong_count", f"unit {u}: samples behind the damage of its shard, or no damage was to be kept")


def _check_chunks(
    result: DecodedResult, u: int, selected: Sequence[int] | None, expected: int | None, start: int
) -> None:
    """Each text of the unit once, as many as are expected if that is known: as a failure, or as its chunks, each of
    which is a row or a failure.

    Where a text has rows, they say how many chunks it has; a failure of one of them has its key.
    """
    rows, failures = result.rows, result.failures
    ordinals, counts = rows["ordinal"].to_numpy(), rows["chunks"].to_numpy()
    failed = failures["ordinal"].to_numpy()
    texts, first, chunks = np.unique(ordinals, return_index=True, return_counts=True)
    every = np.union1d(texts, failed)
    if not np.array_equal(every, np.arange(len(every)) + start if selected is None else selected):
        raise Rejected("wrong_count", f"unit {u}: a text has neither rows nor a failure")
    if expected not in (None, len(every)):
        raise Rejected("wrong_count", f"unit {u} has {expected} texts, the result {len(every)}")
    pairs = np.stack([ordinals, rows["chunk"].to_numpy()])
    if np.unique(pairs, axis=1).shape[1] != len(ordinals) or (pairs[1] < 0).any() or (pairs[1] >= counts).any():
        raise Rejected("wrong_count", f"unit {u}: a chunk is there twice, or has no number of its text")
    if not np.array_equal(counts, counts[first][np.searchsorted(texts, ordinals)]):
        raise Rejected("wrong_count", f"unit {u}: the rows of a text disagree on how many chunks it has")
    of_texts = np.bincount(failed, minlength=int(every[-1]) + 1)[texts] if len(every) else np.zeros(0, dtype=int)
    if not np.array_equal(chunks + of_texts, counts[first]):
        raise Rejected("wrong_count", f"unit {u}: a text has not as many rows and failures as chunks")
    if len(set(zip(failed.tolist(), failures["key"].to_pylist(), strict=True))) != len(failed):
        raise Rejected("wrong_count", f"unit {u}: a failure is there twice")
