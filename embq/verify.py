"""Recompute every invariant of an output folder from the folder itself and from its inputs.

One pass over the commit log; in memory are one record, one row group and one unit at a time, and eight bytes per unit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from core.commits import Commit
from core.errors import OutputError
from core.layout import Layout, load_run
from core.manifest import Manifest
from embq.verification.files import Cursor, Files, read_failed
from embq.verification.findings import Findings, Violation
from embq.verification.manifest import check_manifest
from embq.verification.records import Records
from embq.verification.units import Units

KEYS_COUNTED = 5_000_000
"""Rows up to which keys that occur in several units are counted: eight bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a verification found.

    Attributes:
        state: "complete" where every unit is committed, else "incomplete".
        rows, failures, units, quarantined: committed, added up from the records.
        units_total: units of the run.
        records: commit records read.
        files, bytes: committed files that are whole.
        litter: files that no record names.
        samples_checked: rows and failures whose keys were compared with the source.
        vectors_recomputed: rows whose vectors were recomputed bit for bit (models `stub:` only).
        violations: the first ones; `violations_total` counts all.
        notes: what breaks nothing.
    """

    run: str
    model: str
    state: str
    rows: int
    failures: int
    units: int
    units_total: int
    quarantined: int
    records: int
    files: int
    bytes: int
    litter: int
    samples_checked: int
    vectors_recomputed: int
    violations: tuple[Violation, ...]
    violations_total: int
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether nothing is broken; an unfinished run can be ok."""
        return self.violations_total == 0


def verify(root: Path, *, on_record: Callable[[int, int], None] | None = None) -> Report:
    """Check an output folder.

    Args:
        on_record: told (units checked, units of the run) after each commit record.

    Raises InputError where the folder holds no run, OutputError where run.json or a commit record is damaged.
    """
    layout = Layout(root)
    info = load_run(root)
    findings = Findings()
    manifest = check_manifest(layout, info, findings)
    records = Records(layout, info, manifest, findings)
    files, units = Files(layout, info, findings), Units(info, findings)
    walk = _Walk(records, files, units, manifest, findings)
    for commit in records.read():
        walk.take(commit)
        if on_record is not None:
            on_record(records.done, info.units)
    complete = records.done == info.units
    if records.grew:
        findings.note(f"{info.units - records.done:,} units were added after the log was closed, and are not done yet")
    elif records.closed_by and not complete and not records.broken:
        missing = info.units - records.done
        findings.add("complete", records.closed_by, f"it closes the log, and {missing} units have no record")
    if complete and not records.closed_by:
        findings.note("every unit is committed, and the record that closes the log is not there yet")
    if litter := files.unnamed():
        mend = (
            "`embq gc` deletes them" if records.closed_by else "readers ignore them, and `embq gc` knows which may go"
        )
        findings.note(f"{len(litter):,} files that no record names, such as {litter[0]}: {mend}")
    if walk.empty:
        findings.note(f"{walk.empty:,} units hold no sample, such as {walk.an_empty_one}: check how it was written")
    if repeated := walk.repeated_keys():
        findings.note(f"{repeated:,} keys stand for more than one row")
    return Report(
        run=info.run,
        model=info.model.spec,
        state="complete" if complete else "incomplete",
        **{name: records.totals[name] for name in ("rows", "failures", "quarantined")},
        units=records.done,
        units_total=info.units,
        records=records.count,
        files=files.count,
        bytes=files.bytes,
        litter=len(litter),
        samples_checked=units.keys,
        vectors_recomputed=units.recomputed,
        violations=tuple(findings.violations),
        violations_total=findings.count,
        notes=tuple(findings.notes),
    )


class _Walk:
    """Goes through the units of each record, with their rows and failures side by side.

    Attributes:
        empty: units without a sample.
        an_empty_one: the source of the first of them.
    """

    def __init__(
        self, records: Records, files: Files, units: Units, manifest: Manifest | None, findings: Findings
    ) -> None:
        self._records = records
        self._files = files
        self._units = units
        self._manifest = manifest
        self._findings = findings
        self._hashes: list[np.ndarray] | None = []
        self.empty = 0
        self.an_empty_one = ""

    def take(self, commit: Commit) -> None:
        """Check one record's files and units."""
        if self._records.after_gap:
            self._files.forget_ids()
        for file in commit.files:
            if file.kind not in ("rows", "failures"):
                self._findings.add("file_kind", file.path, f"record {commit.n} names it as {file.kind!r}")
        rows, failures = self._files.open(commit, "rows"), self._files.open(commit, "failures")
        if rows is None or failures is None:
            return
        try:
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
            self._units.check(where, said, unit, of_unit, failed)
            if not said.rows + said.failures:
                self.empty += 1
                self.an_empty_one = self.an_empty_one or (where if unit is None else unit.source)
            self._remember(of_unit)
        if left := rows.rest() + failures.rest():
            self._findings.add("counts", f"{commit.n:08d}.json", f"{left} rows or failures belong to none of its units")

    def _remember(self, rows: pa.Table) -> None:
        if self._hashes is None or not rows.num_rows:
            return
        self._hashes.append(np.fromiter(map(hash, rows["key"].to_pylist()), np.int64, rows.num_rows))
        if sum(map(len, self._hashes)) > KEYS_COUNTED:
            self._hashes = None

    def repeated_keys(self) -> int:
        """How many keys stand for more than one row; 0 too where there are too many rows to count."""
        if not self._hashes:
            return 0
        _, counts = np.unique(np.concatenate(self._hashes), return_counts=True)
        return int((counts > 1).sum())
