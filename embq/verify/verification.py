"""Recompute every invariant of an output folder from the folder itself and from its inputs.

One pass over the commit log; in memory are one record, one row group and one unit at a time, and eight bytes per unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from core.errors import OutputError
from core.formats.part import Cursor
from core.run.commits import Commit
from core.run.layout import Layout
from core.run.manifest import Manifest
from core.run.run_info import RunInfo, load_run
from core.storage.paths import Place
from core.units import Retry
from embq.verify.clip_retrieval_layout import check_clip_retrieval
from embq.verify.commit_records import Records
from embq.verify.files import Files, read_failed
from embq.verify.findings import Findings, Violation
from embq.verify.manifest import check_digests, check_manifest
from embq.verify.retries import Retried
from embq.verify.units import Units

Item = TypeVar("Item")


class Stopwatch:
    """Counts the seconds of each kind of work; those of work within other work are counted once, as the inner one's.

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
        """The block does work of this kind."""
        self._turn()
        self._kinds.append(kind)
        self.seconds.setdefault(kind, 0.0)
        try:
            yield
        finally:
            self._turn()
            self._kinds.pop()

    def each(self, kind: str, items: Iterable[Item]) -> Iterator[Item]:
        """The items; making each of them is work of this kind."""
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


Mode = Literal["full", "quick"]
"""What is checked. Quick: the log, the manifest's digest, the size and the footer of each file, litter. Full: the hash
of each file, each row, and a second reading of the inputs as well."""

Readers = Literal["clip-retrieval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a verification found.

    Attributes:
        mode: what was checked.
        seconds: spent, by what on: "layout", "manifest", "log", "files", "rows", and "inputs", which is the second
            reading.
        state: "complete" where every unit is committed, else "incomplete".
        rows, failures, units, quarantined: committed, added up from the records; failures that were retried are not
            among them.
        units_total: units of the run.
        records: commit records read.
        files, bytes: committed files that are whole.
        litter: files that no record names.
        samples_checked: rows and failures whose keys were compared with the source.
        vectors_recomputed: rows whose vectors were recomputed bit for bit (models `stub:` only).
        violations: the first ones; `violations_total` counts all.
        notes: what breaks nothing.
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
    vectors_recomputed: int
    violations: tuple[Violation, ...]
    violations_total: int
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether nothing is broken; an unfinished run can be ok."""
        return self.violations_total == 0


def verify(
    root: Place,
    *,
    mode: Mode = "full",
    readers: Readers | None = None,
    on_record: Callable[[int, int], None] | None = None,
) -> Report:
    """Check an output folder.

    Args:
        mode: how much of it.
        readers: other programs that are to find in the folder what they take it for.
        on_record: told (units checked, units of the run) after each commit record.

    Raises InputError where the folder holds no run, OutputError where run.json or a commit record is damaged.
    """
    layout = Layout(root)
    info = load_run(root)
    findings, watch = Findings(), Stopwatch()
    if readers is not None:
        with watch.on("layout"):
            check_clip_retrieval(layout, info, findings)
    with watch.on("manifest"):
        manifest = (check_manifest if mode == "full" else check_digests)(layout, info, findings)
    records = Records(layout, info, manifest, findings)
    files, units = Files(layout, info, findings), Units(info, findings)
    retried = None if manifest is None or mode == "quick" else Retried(layout, manifest, findings)
    walk: Walk = (
        FullWalk(records, files, units, manifest, retried, findings, watch)
        if mode == "full"
        else QuickWalk(records, files, findings, watch)
    )
    for commit in watch.each("log", records.read()):
        walk.take(commit)
        if on_record is not None:
            on_record(records.done, info.units)
    litter = files.unnamed()
    _look_at_the_end(records, info.units, litter, findings)
    for note in walk.notes():
        findings.note(note)
    return _reported(mode, info, records, files, units, litter, findings, watch)


def _look_at_the_end(records: Records, units: int, litter: Sequence[str], findings: Findings) -> None:
    """Whether the log is closed where it should be, and what lies beside it.

    Args:
        units: of the run.
        litter: files that no record names.
    """
    missing = units - records.done
    if records.grew:
        findings.note(f"{missing:,} units were added after the log was closed, and are not done yet")
    elif records.closed_by and missing and not records.broken:
        findings.add("complete", records.closed_by, f"it closes the log, and {missing} units have no record")
    if not missing and not records.closed_by:
        findings.note("every unit is committed, and the record that closes the log is not there yet")
    if litter:
        mend = (
            "`embq gc` deletes them" if records.closed_by else "readers ignore them, and `embq gc` knows which may go"
        )
        findings.note(f"{len(litter):,} files that no record names, such as {litter[0]}: {mend}")


def _reported(
    mode: Mode,
    info: RunInfo,
    records: Records,
    files: Files,
    units: Units,
    litter: Sequence[str],
    findings: Findings,
    watch: Stopwatch,
) -> Report:
    return Report(
        mode=mode,
        run=info.run,
        model=info.model.spec,
        state="complete" if records.done == info.units else "incomplete",
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
        seconds={kind: round(seconds, 3) for kind, seconds in watch.seconds.items()},
        notes=tuple(findings.notes),
    )
