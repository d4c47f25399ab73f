"""Recompute every invariant of an output folder from the folder itself and from its inputs.

One pass over the commit log; in memory are one record, one row group and one unit at a time, and eight bytes per unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from core.run.layout import Layout
from core.run.run_info import RunInfo, load_run
from core.storage.paths import Place
from embq.verification.files import Files
from embq.verification.findings import Findings, Violation
from embq.verification.layouts import check_clip_retrieval
from embq.verification.manifest import check_digests, check_manifest
from embq.verification.records import Records
from embq.verification.retried import Retried
from embq.verification.stopwatch import Stopwatch
from embq.verification.units import Units
from embq.verification.walk import FullWalk, QuickWalk, Walk

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
