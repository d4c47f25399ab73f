"""Records of the commit log, sealed by their hash. A unit is done, and a file is committed, when a record names it.

A record that does not match its hash stops the run: it is never skipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from embq.core import wire
from embq.core.errors import MalformedError, OutputError
from embq.core.storage.beneath import below
from embq.core.storage.paths import Place
from embq.core.units import canonical_json, sealed
from embq.core.wire import Count, RelativePath, ShortText, UnitNumber, Word

SCHEMA, SCHEMA_OF_PARTS = 1, 2
"""Of a record; the second of one that names several parts, of which an earlier embq would read one."""

MOST_BYTES = 1 << 28
"""Limit of one record: more than a million units."""

RowId = Annotated[int, Meta(ge=-1, le=2**62)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedFile:
    """A file that a record commits.

    Attributes:
        path: relative to the output folder.
        kind: "rows", "vectors" (a column of the record's rows, in the same order) or "failures".
        rows: number of rows in it.
        bytes: its size.
        sha256: hash of its bytes.
        first_id: id of its first row; -1 for files that are not of kind "rows".
        column: the column that a file of kind "vectors" holds, else "".
    """

    path: RelativePath
    kind: Word
    rows: Count
    bytes: Count
    sha256: Word
    first_id: RowId = -1
    column: ShortText = ""

    @property
    def of_rows(self) -> bool:
        """True if the file is one of those that hold the record's rows."""
        return self.kind in ("rows", "vectors")

    def place(self, root: Place) -> Place:
        """Path of the file in the output folder `root`; OutsideError if a link is on the way."""
        return below(root, self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedUnit:
    """A unit that a record commits.

    Attributes:
        u: index in the manifest.
        unit_id: content id, equal to the manifest's.
        token: attempt whose result was taken.
        first_row: its first row among the record's rows, those of all its parts.
        rows: number of its rows, which follow each other.
        failures: number of its failures.
        quarantined: code of the failure that stands for the whole unit, or "".
        truncated: texts that were longer than the model reads, and of which only the beginning was embedded.
        tokens: of its samples, as the device computes them; 0 if unknown.
        unread: samples whose metadata, or captions that are not embedded, could not be read.
        supersedes: failures of earlier records that its rows and failures replace (a retry).
        lifts: units of earlier records, 0 or 1, whose quarantine it ends.
    """

    u: UnitNumber
    unit_id: Word
    token: ShortText
    first_row: Count
    rows: Count
    failures: Count
    quarantined: ShortText = ""
    truncated: Count = 0
    tokens: Count = 0
    unread: Count = 0
    supersedes: Count = 0
    lifts: Count = 0

    def describe(self) -> dict[str, Any]:
        """The unit as a record holds it, without zeros in the fields that few units have or earlier versions lack."""
        described: dict[str, Any] = msgspec.to_builtins(self)  # asdict takes 50 times as long
        for name in ("tokens", "unread", "supersedes", "lifts"):
            if not described[name]:
                del described[name]
        return described


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One record. `kind` is "data", "fence" (a new writer shuts out its predecessors) or "close" (nothing is left
    of what was planned until then).

    `widths` are the lengths of the vectors of its rows, by column; all records with rows have the same.
    `totals` are cumulative: units, rows, failures, quarantined, truncated, tokens. `created_at` and `timing` are
    information only.
    """

    n: Count
    run: Word
    kind: Word
    prev: Word
    epoch: Count
    writer: ShortText
    version: ShortText
    generation: ShortText = ""
    fingerprint: ShortText = ""
    files: tuple[CommittedFile, ...] = ()
    units: tuple[CommittedUnit, ...] = ()
    widths: dict[str, Count] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)
    created_at: ShortText = ""
    sha256: Word = ""

    @property
    def parts(self) -> tuple[tuple[CommittedFile, ...], ...]:
        """Its files of rows by part, see `parts_of`."""
        return parts_of(self.files)

    def seal(self) -> tuple[bytes, str]:
        """The record's file content and its hash."""
        schema = SCHEMA if len(self.parts) < 2 else SCHEMA_OF_PARTS
        body: dict[str, Any] = {"schema": schema, **msgspec.to_builtins(replace(self, units=()))}
        body["units"] = [unit.describe() for unit in self.units]
        body = sealed(body)
        return (canonical_json(body) + "\n").encode(), body["sha256"]

    @classmethod
    def parse(cls, data: bytes, name: str) -> Commit:
        """The record in a file's content; OutputError if it is damaged."""
        wire.prepare(cls)
        if seal_of(data):
            with suppress(ValueError, RecursionError, OverflowError):  # below, these have a message
                return msgspec.json.decode(data, type=cls)
        try:
            body = wire.read(dict[str, Any], data, what=f"commit record {name}", most_bytes=MOST_BYTES)
            if sealed(body) != body:
                raise damaged(name, "its hash does not match its content")
            if body.get("schema") not in (SCHEMA, SCHEMA_OF_PARTS):
                raise OutputError(f"{name} has schema {body.get('schema')}, this embq reads up to {SCHEMA_OF_PARTS}")
            return wire.convert(cls, body, what=f"commit record {name}")
        except (MalformedError, UnicodeEncodeError) as error:
            raise damaged(name, error) from error


class CommitFiles(msgspec.Struct, frozen=True):
    """A record without its units, which is read in a thirtieth of the time of one with many; fields as in `Commit`."""

    n: Count
    prev: Word
    sha256: Word
    files: tuple[CommittedFile, ...] = ()

    @classmethod
    def parse(cls, data: bytes, name: str) -> CommitFiles:
        """The record in a file's content; OutputError if it is damaged."""
        wire.prepare(cls)
        if seal_of(data):
            with suppress(ValueError, RecursionError, OverflowError):
                return msgspec.json.decode(data, type=cls)
        commit = Commit.parse(data, name)
        return cls(commit.n, commit.prev, commit.sha256, commit.files)


class _Seal(msgspec.Struct):
    schema: int
    sha256: str


def seal_of(data: bytes) -> str:
    """The hash of a record by the bytes of its file, without a look at its units.

    "" if they do not match, or if they are JSON of another form than `Commit.seal` writes; then `Commit.parse` decides.
    """
    try:
        seal = msgspec.json.decode(data, type=_Seal)
    except (ValueError, RecursionError):
        return ""
    field = f'"sha256":"{seal.sha256}",'.encode()  # keys are in order, so others follow
    start, end = data.find(field), len(data) - data.endswith(b"\n")
    if start < 0 or seal.schema not in (SCHEMA, SCHEMA_OF_PARTS) or len(data) > MOST_BYTES:
        return ""
    content = hashlib.sha256(memoryview(data)[:start])  # of the record without its hash, as `sealed` has it
    content.update(memoryview(data)[start + len(field) : end])
    return seal.sha256 if content.hexdigest() == seal.sha256 else ""


def parts_of(files: Iterable[CommittedFile]) -> tuple[tuple[CommittedFile, ...], ...]:
    """Files of rows of a record by part, in order of their ids: a file of rows and those of vectors beside it."""
    parts: list[list[CommittedFile]] = []
    for file in files:
        if file.of_rows:
            if file.kind == "rows" or not parts:
                parts.append([])
            parts[-1].append(file)
    return tuple(map(tuple, parts))


def damaged(name: str, why: object) -> OutputError:
    """The error for a damaged record."""
    return OutputError(
        f"commit record {name} is damaged: {why}",
        next_step="restore it from a backup; rows of records before it are safe",
        code="commit_damaged",
    )
