"""How the checks go through the commit log: record by record, and within each unit by unit."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pyarrow as pa

from core.errors import OutputError
from core.formats.part import Cursor
from core.run.commits import Commit
from core.run.manifest import Manifest
from core.units import Retry
from embq.verification.files import Files, read_failed
from embq.verification.findings import Findings
from embq.verification.records import Records
from embq.verification.retried import Retried
from embq.verification.stopwatch import Stopwatch
from embq.verification.units import Units

KEYS_COUNTED = 5_000_000
"""Rows up to which keys that occur in several units are counted: eight bytes each."""


class Walk(Protocol):
    """What is done with each record."""

    def take(self, commit: Commit) -> None:
        """Check one record's files and units."""
        ...

    def notes(self) -> list[str]:
        """What was noticed on the way and breaks nothing."""
        ...


class QuickWalk:
    """Looks at sizes and footers of the files; reads no row, and no input."""

    def __init__(self, records: Records, files: Files, findings: Findings, watch: Stopwatch) -> None:
        self._records = records
        self._files = files
        self._findings = findings
        self._watch = watch

    def take(self, commit: Commit) -> None:
        """Check one record's files."""
        if self._records.after_gap:
            self._files.forget_ids()
        check_kinds(commit, self._findings)
        with self._watch.on("files"):
            self._files.look_at(commit)

    def notes(self) -> list[str]:
        """Nothing."""
        return []


class FullWalk:
    """Goes through the units of each record, with their rows and failures side by side."""

    def __init__(
        self,
        records: Records,
        files: Files,
        units: Units,
        manifest: Manifest | None,
        retried: Retried | None,
        findings: Findings,
        watch: Stopwatch,
    ) -> None:
        self._records = records
        self._files = files
        self._units = units
        self._manifest = manifest
        self._retried = retried
        self._findings = findings
        self._watch = watch
        self._hashes: list[np.ndarray] | None = []
        self._empty = 0
        self._an_empty_one = ""

    def take(self, commit: Commit) -> None:
        """Check one record's files and units."""
        if self._records.after_gap:
            self._files.forget_ids()
        check_kinds(commit, self._findings)
        with self._watch.on("files"):
            rows, failures = self._files.rows(commit), self._files.failures(commit)
        if rows is None or failures is None:
            return
        try:
            with self._watch.on("rows"):
                self._check_units(commit, rows, failures)
        except OutputError as error:
            read_failed(self._findings, commit, error)

    def _check_units(self, commit: Commit, rows: Cursor, failures: Cursor) -> None:
        first = 0
        for said in commit.units:
            where = f"{commit.n:08d}.json unit {said.u}"
            if said.first_row != first:
                self._findings.add("unit_rows", where, f"its first row is {said.first_row}, not {first}")
            first += said.rows
            of_unit, failed = rows.take(said.rows), failures.take(said.failures)
            if (of_unit.num_rows, failed.num_rows) != (said.rows, said.failures):
                self._findings.add(
                    "counts",
                    where,
                    f"{of_unit.num_rows} rows and {failed.num_rows} failures are there, "
                    f"its record says {said.rows} and {said.failures}",
                )
                return
            known = self._records.is_known(said.u, said.unit_id)
            unit = self._manifest.unit(said.u) if known and self._manifest is not None else None
            again: list[Retry] = []
            if unit is not None and self._retried is not None:
                self._retried.check(where, said, unit.retry)
                again, unit = self._retried.again(said.u), self._retried.now(unit)
            with self._watch.on("inputs"):
                self._units.check(where, said, unit, of_unit, failed, again)
            if not said.rows + said.failures:
                self._empty += 1
                self._an_empty_one = self._an_empty_one or (where if unit is None else unit.source)
            self._remember(of_unit)
        if left := rows.rest() + failures.rest():
            self._findings.add("counts", f"{commit.n:08d}.json", f"{left} rows or failures belong to none of its units")

    def _remember(self, rows: pa.Table) -> None:
        if self._hashes is None or not rows.num_rows:
            return
        self._hashes.append(np.fromiter(map(hash, rows["key"].to_pylist()), np.int64, rows.num_rows))
        if sum(map(len, self._hashes)) > KEYS_COUNTED:
            self._hashes = None

    def notes(self) -> list[str]:
        """Units without a sample, and keys that stand for several rows."""
        notes = []
        if self._empty:
            which = f"{self._empty:,} units hold no sample, such as {self._an_empty_one}"
            notes.append(f"{which}: check how it was written")
        if beside := self._units.beside:
            notes.append(f"{beside:,} rows hold metadata that fit no column; they are JSON text in 'metadata'")
        if repeated := self._repeated_keys():
            notes.append(f"{repeated:,} keys stand for more than one row")
        return notes

    def _repeated_keys(self) -> int:
        """How many keys stand for more than one row; 0 too where there are too many rows to count."""
        if not self._hashes:
            return 0
        _, counts = np.unique(np.concatenate(self._hashes), return_counts=True)
        return int((counts > 1).sum())


def check_kinds(commit: Commit, findings: Findings) -> None:
    """Whether each file of a record is of a kind that is known here."""
    for file in commit.files:
        if file.kind != "failures" and not file.of_rows:
            findings.add("file_kind", file.path, f"record {commit.n} names it as {file.kind!r}")
