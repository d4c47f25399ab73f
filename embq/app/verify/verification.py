"""Verify an output folder: recompute every invariant from the folder itself and from its inputs.

One pass over the commit log; in memory are one record, one row group and one unit at a time, and eight bytes per unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa

from embq.app.verify.clip_retrieval_layout import check_clip_retrieval
from embq.app.verify.commit_records import Records
from embq.app.verify.committed_files import Files, read_failed
from embq.app.verify.findings import Findings, Violation
from embq.app.verify.manifest import check_digests, check_manifest
from embq.app.verify.source_lines import SLICED, SourceLines
from embq.app.verify.units import Units
from embq.core.errors import EmbqError, OutputError
from embq.core.formats.part import Cursor
from embq.core.run.commits import Commit, CommittedUnit
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import RunInfo, load_run
from embq.core.run.standing_failures import Retries, failed_keys, record_failures
from embq.core.storage.paths import Place
from embq.core.units import Retry, Unit
from embq.producer.retry_planner import SourceCheck
from embq.sources.kinds import SOURCES

Mode = Literal["full", "quick"]
"""Quick: the log, the manifest's digest, size and footer of each file, litter. Full: also the hash of each file, each
row, and a second reading of the inputs."""

Readers = Literal["clip-retrieval"]

KEYS_COUNTED = 5_000_000
"""Rows up to which keys that occur in several units are counted: eight bytes each."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationReport:
    """The result of a verification.

    Attributes:
        mode: what was checked.
        seconds: by kind of work: "layout", "manifest", "log", "files", "rows", and "inputs", the second reading.
        state: "complete" if every unit is committed, else "incomplete".
        rows, failures, units, quarantined: committed, added up from the records, without failures that were retried.
        units_total: units of the run.
        records: commit records read.
        files, bytes: committed files that are whole.
        litter: files that are in no record.
        samples_checked: rows and failures whose keys were compared with the source.
        violations: the first ones; `violations_total` counts all.
        notes: observations that are not violations.
    """

    mode: Mode
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
    violations: tuple[Violation, ...]
    violations_total: int
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """True if no violation was found; an unfinished run can be ok."""
        return self.violations_total == 0


def verify(
    root: Place,
    *,
    mode: Mode = "full",
    readers: Readers | None = None,
    on_record: Callable[[int, int], None] | None = None,
) -> VerificationReport:
    """Check an output folder.

    Args:
        mode: how much of it.
        readers: also check the layout that these programs expect.
        on_record: called with (units checked, units of the run) after each commit record.

    Raises InputError if the folder holds no run, OutputError if run.json or a commit record is damaged.
    """
    verification = Verification(root, mode)
    return verification.run(readers, on_record)


class Verification:
    """One verification of a folder: checks the log record by record, and each record unit by unit."""

    units = Units

    def __init__(self, root: Place, mode: Mode) -> None:
        self._mode = mode
        self._layout, self._info = Layout(root), load_run(root)
        self._findings, self._watch = Findings(), Stopwatch()
        self._files = Files(self._layout, self._info, self._findings)
        self._units = self.units(self._info, self._findings)
        self._key_hashes: list[np.ndarray] | None = []
        self._empty_units = 0
        self._first_empty = ""

    def run(self, readers: Readers | None, on_record: Callable[[int, int], None] | None) -> VerificationReport:
        """Check everything. Raises as `verify`."""
        layout, info, findings = self._layout, self._info, self._findings
        if readers is not None:
            with self._watch.on("layout"):
                check_clip_retrieval(layout, info, findings)
        with self._watch.on("manifest"):
            check = check_manifest if self._mode == "full" else check_digests
            self._manifest = check(layout, info, findings)
        full = self._mode == "full" and self._manifest is not None
        self._retried = Retried(layout, info, self._manifest, findings) if full and self._manifest is not None else None
        self._records = Records(layout, info, self._manifest, findings)
        for commit in self._watch.each("log", self._records.read()):
            self._check(commit)
            if on_record is not None:
                on_record(self._records.done, info.units)
        litter = self._files.unnamed()
        self._check_end(litter)
        self._add_notes()
        return self._report(litter)

    def _check(self, commit: Commit) -> None:
        """Check one record's files, and with mode full its units."""
        if self._records.after_gap:
            self._files.forget_ids()
        for file in commit.files:
            if file.kind != "failures" and not file.of_rows:
                self._findings.add("file_kind", file.path, f"record {commit.n} names it as {file.kind!r}")
        with self._watch.on("files"):
            if self._mode == "quick":
                self._files.look_at(commit)
                return
            rows, failures = self._files.rows(commit), self._files.failures(commit)
        if rows is None or failures is None:
            return
        try:
            with self._watch.on("rows"):
                self._check_units(commit, rows, failures)
        except OutputError as error:
            read_failed(self._findings, commit, error)

    def _check_units(self, commit: Commit, rows: Cursor, failures: Cursor) -> None:
        """Go through the units of a record, with their rows and failures side by side."""
        first = 0
        for recorded in commit.units:
            where = f"{commit.n:08d}.json unit {recorded.u}"
            if recorded.first_row != first:
                self._findings.add("unit_rows", where, f"its first row is {recorded.first_row}, not {first}")
            first += recorded.rows
            of_unit, failed = rows.read(recorded.rows), failures.read(recorded.failures)
            if (of_unit.num_rows, failed.num_rows) != (recorded.rows, recorded.failures):
                self._findings.add(
                    "counts",
                    where,
                    f"{of_unit.num_rows} rows and {failed.num_rows} failures are there, "
                    f"its record says {recorded.rows} and {recorded.failures}",
                )
                return
            is_known = self._records.is_known(recorded.u, recorded.unit_id)
            unit = self._manifest.unit(recorded.u) if is_known and self._manifest is not None else None
            again: list[Retry] = []
            if unit is not None and self._retried is not None:
                self._retried.check(where, recorded, unit.retry)
                again, unit = self._retried.again(recorded.u), self._retried.now(recorded.u, unit)
            with self._watch.on("inputs"):
                self._units.check(where, recorded, unit, of_unit, failed, again)
            if not recorded.rows + recorded.failures:
                self._empty_units += 1
                self._first_empty = self._first_empty or (where if unit is None else unit.source)
            self._remember_keys(of_unit)
        if rest := rows.rest() + failures.rest():
            self._findings.add("counts", f"{commit.n:08d}.json", f"{rest} rows or failures belong to none of its units")

    def _remember_keys(self, rows: pa.Table) -> None:
        if self._key_hashes is None or not rows.num_rows:
            return
        self._key_hashes.append(np.fromiter(map(hash, rows["key"].to_pylist()), np.int64, rows.num_rows))
        if sum(map(len, self._key_hashes)) > KEYS_COUNTED:
            self._key_hashes = None

    def _check_end(self, litter: list[str]) -> None:
        """Check that the log is closed where it should be, and note files that no record names."""
        records, findings = self._records, self._findings
        missing = self._info.units - records.done
        if records.grew:
            findings.note(f"{missing:,} units were added after the log was closed, and are not done yet")
        elif records.closed_by and missing and not records.broken:
            findings.add("complete", records.closed_by, f"it closes the log, and {missing} units have no record")
        if not missing and not records.closed_by:
            findings.note("every unit is committed, and the record that closes the log is not there yet")
        if litter:
            hint = "`embq gc` deletes them"
            if not records.closed_by:
                hint = "readers ignore them, and `embq gc` deletes those that are safe to delete"
            findings.note(f"{len(litter):,} files that no record names, such as {litter[0]}: {hint}")

    def _add_notes(self) -> None:
        """Note units without a sample, metadata that fit no column, and keys that stand for several rows."""
        if self._empty_units:
            which = f"{self._empty_units:,} units hold no sample, such as {self._first_empty}"
            self._findings.note(f"{which}: check how it was written")
        if beside := self._units.beside:
            self._findings.note(f"{beside:,} rows hold metadata that fit no column; they are JSON text in 'metadata'")
        for kind, units in self._units.not_compared.items():
            self._findings.note(f"{units:,} units of kind {kind}, of a plug-in, were not compared with their inputs")
        if self._key_hashes:
            _, counts = np.unique(np.concatenate(self._key_hashes), return_counts=True)
            if repeated := int((counts > 1).sum()):
                self._findings.note(f"{repeated:,} keys stand for more than one row")

    def _report(self, litter: list[str]) -> VerificationReport:
        records, findings = self._records, self._findings
        return VerificationReport(
            mode=self._mode,
            run=self._info.run,
            model=self._info.model.spec,
            state="complete" if records.done == self._info.units else "incomplete",
            **{name: records.totals[name] for name in ("rows", "failures", "quarantined")},
            units=records.done,
            units_total=self._info.units,
            records=records.count,
            files=self._files.count,
            bytes=self._files.bytes,
            litter=len(litter),
            samples_checked=self._units.keys,
            violations=tuple(findings.violations),
            violations_total=findings.count,
            seconds={kind: round(seconds, 3) for kind, seconds in self._watch.seconds.items()},
            notes=tuple(findings.notes),
        )


class Retried:
    """The retries of a run: the failures that each replaces, and units as of the last one.

    Memory grows with the retried inputs only.
    """

    def __init__(self, layout: Layout, info: RunInfo, manifest: Manifest, findings: Findings) -> None:
        self._layout = layout
        self._findings = findings
        self._sources = SourceCheck(info, manifest)
        self._retries = Retries(manifest, lambda _: True)
        self._versions: dict[str, tuple[str, int]] = {}
        self._sizes: dict[tuple[str, str], int] = {}
        self._claimed: dict[int, set[int]] = {}
        self._lines = SourceLines()
        self._record = 0
        self._failures = pa.table({})
        for _, unit in manifest.retries():
            if unit.kind == "files":
                self._sizes.update({(unit.source, path): size for path, size in unit.items})
            else:
                self._versions[unit.source] = unit.etag, unit.stop

    def now(self, u: int, unit: Unit) -> Unit:
        """Unit `u` with its source as of the last retry; unchanged if the source cannot be read."""
        if unit.kind == "files":
            items = tuple((path, self._sizes.get((unit.source, path), size)) for path, size in unit.items)
            return replace(unit, items=items)
        version, size = self._versions.get(unit.source, (unit.etag, 0))
        if version == unit.etag:
            return unit
        mended = replace(unit, etag=version, stop=size if unit.kind == "tar" else unit.stop)
        if unit.samples is None:
            return mended
        if unit.kind in SLICED:
            return self._lines.placed(mended)
        # A plug-in alone knows where its units begin.
        return mended if unit.kind in SOURCES else self._planned_again(u, unit, mended)

    def _planned_again(self, u: int, unit: Unit, mended: Unit) -> Unit:
        """The unit as its source is planned now; `mended` if that is not the version of the last retry."""
        try:
            planned = self._sources.current_units(u, unit)
        except EmbqError:  # reading it says why
            return mended
        return next((replace(part, retry=unit.retry) for part in planned if part.etag == mended.etag), mended)

    def again(self, u: int) -> list[Retry]:
        """The later retries of the samples of unit `u`."""
        return [retry for _, retry in self._retries.of(u)]

    def check(self, where: str, recorded: CommittedUnit, retry: Retry | None) -> None:
        """Check that a retry replaces existing failures, each once, and that other units replace none."""
        planned = (0, 0) if retry is None else (retry.replaces, retry.lifts)
        if (recorded.supersedes, recorded.lifts) != planned:
            self._findings.add(
                "supersedes",
                where,
                f"it takes the place of {recorded.supersedes} failures and {recorded.lifts} units, planned were "
                f"{planned[0]} and {planned[1]}",
            )
        if retry is None or not retry.replaces:
            return
        ordinals = retry.ordinals or [-1]
        if retry.only and retry.replaces != len(ordinals):
            self._findings.add("supersedes", where, f"{len(ordinals)} samples replace {retry.replaces} failures")
        claimed = self._claimed.setdefault(retry.failed, set())
        if twice := claimed.intersection(ordinals):
            self._findings.add(
                "supersedes", where, f"{len(twice)} failures of unit {retry.failed} were retried before it"
            )
        claimed.update(ordinals)
        try:
            if self._record != retry.record:
                self._failures, self._record = record_failures(self._layout.root, retry.record), retry.record
            failed_keys(self._failures, retry)
        except OutputError as error:
            self._findings.add("supersedes", where, error.message)


class Stopwatch:
    """Seconds by kind of work; nested work counts for the inner kind only.

    Attributes:
        seconds: by kind, in the order in which they began.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._kinds: list[str] = []
        self._since = clock()

    @contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """Count the block as work of this kind."""
        self._turn()
        self._kinds.append(kind)
        self.seconds.setdefault(kind, 0.0)
        try:
            yield
        finally:
            self._turn()
            self._kinds.pop()

    def each(self, kind: str, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate over items, and count the making of each as work of this kind."""
        iterator = iter(items)
        while True:
            with self.on(kind):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def _turn(self) -> None:
        now = self._clock()
        if self._kinds:
            self.seconds[self._kinds[-1]] += now - self._since
        self._since = now
