"""The records of the commit log: what one says, and how it is sealed. A unit is done, and a file exists for readers,
when a record names it. One that does not match its own hash stops the run: it is never skipped.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from core.errors import OutputError
from core.units import canonical_json

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedFile:
    """A file that a record makes real.

    Attributes:
        path: relative to the output folder.
        kind: "rows", "vectors" (a column of the record's rows, in the same order) or "failures".
        rows: number of rows in it.
        bytes: its size.
        sha256: hash of its bytes.
        first_id: id of its first row; -1 for files that are not of kind "rows".
        column: the column that a file of kind "vectors" holds, else "".
    """

    path: str
    kind: str
    rows: int
    bytes: int
    sha256: str
    first_id: int = -1
    column: str = ""

    @property
    def of_rows(self) -> bool:
        """Whether the file is one of those that hold the record's rows."""
        return self.kind in ("rows", "vectors")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedUnit:
    """A unit that a record makes done.

    Attributes:
        u: index in the manifest.
        unit_id: content id, equal to the manifest's.
        token: attempt whose result was taken.
        first_row: its first row within the record's rows file.
        rows: number of its rows, which follow each other.
        failures: number of its failures.
        quarantined: code of the failure that stands for the whole unit, or "".
        truncated: texts that were longer than the model reads, and of which only the beginning was embedded.
        tokens: what its samples cost the device; 0 where that is not known.
        supersedes: failures of earlier records that its rows and failures take the place of (a retry).
        lifts: units of earlier records, 0 or 1, that are not quarantined any more because of it.
    """

    u: int
    unit_id: str
    token: str
    first_row: int
    rows: int
    failures: int
    quarantined: str = ""
    truncated: int = 0
    tokens: int = 0
    supersedes: int = 0
    lifts: int = 0

    def describe(self) -> dict[str, Any]:
        """The unit as a record holds it: what is not known, and what only retries have, is left out elsewhere."""
        described = asdict(self)
        for name in ("tokens", "supersedes", "lifts"):
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

    n: int
    run: str
    kind: str
    prev: str
    epoch: int
    writer: str
    version: str
    generation: str = ""
    fingerprint: str = ""
    files: tuple[CommittedFile, ...] = ()
    units: tuple[CommittedUnit, ...] = ()
    widths: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)
    created_at: str = ""
    sha256: str = ""

    def seal(self) -> tuple[bytes, str]:
        """The record's file content and its hash."""
        body: dict[str, Any] = {"schema": SCHEMA, **asdict(replace(self, units=()))}
        body["units"] = [unit.describe() for unit in self.units]
        del body["sha256"]
        digest = hashlib.sha256(canonical_json(body).encode()).hexdigest()
        return (canonical_json({**body, "sha256": digest}) + "\n").encode(), digest

    @classmethod
    def parse(cls, data: bytes, name: str) -> Commit:
        """The record in a file's content; OutputError where it is damaged."""
        try:
            body = json.loads(data)
            digest = body.pop("sha256")
            schema = body.pop("schema")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise damaged(name, "it is not a commit record") from error
        if hashlib.sha256(canonical_json({"schema": schema, **body}).encode()).hexdigest() != digest:
            raise damaged(name, "its hash does not match its content")
        if schema != SCHEMA:
            raise OutputError(f"{name} has schema {schema}, this embq reads {SCHEMA}")
        body["files"] = tuple(CommittedFile(**item) for item in body["files"])
        body["units"] = tuple(CommittedUnit(**item) for item in body["units"])
        return cls(**body, sha256=digest)


def damaged(name: str, why: str) -> OutputError:
    """The error for a record that cannot be trusted."""
    return OutputError(
        f"commit record {name} is damaged: {why}",
        next_step="restore it from a backup; rows of records before it are safe",
        code="commit_damaged",
    )
