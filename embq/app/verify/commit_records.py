"""Checks the chain of commit records: numbers, hashes, epochs, totals, units, fingerprint."""

from __future__ import annotations

from collections.abc import Iterator

from embq.app.verify.findings import Findings
from embq.core import wire
from embq.core.errors import OutputError
from embq.core.run.commits import MOST_BYTES, Commit, damaged
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import RunInfo
from embq.core.storage.beneath import read_bytes
from embq.core.storage.durable import denied, names_in


class Records:
    """Reads the log from its first to its last number, one record in memory at a time.

    Attributes:
        count: records read.
        done: number of different units committed.
        totals: sums of units, rows, failures, quarantined units, truncated texts and tokens.
        fingerprint: of the run, "" before its first rows.
        broken: whether a number is missing, so that sums over the whole log cannot be checked.
        after_gap: whether the record just read follows a missing one.
        closed_by: name of the record that closed the log, or "" if there is none or units were added since.
        grew: whether units were added after the log was closed.
    """

    def __init__(self, layout: Layout, info: RunInfo, manifest: Manifest | None, findings: Findings) -> None:
        self.layout = layout
        self.run = info.run
        self.count = 0
        self.done = 0
        self.totals = {"units": 0, "rows": 0, "failures": 0, "quarantined": 0, "truncated": 0, "tokens": 0}
        self.fingerprint = ""
        self.broken = False
        self.after_gap = False
        self.closed_by = ""
        self.grew = False
        self._units = info.units
        self._ends = info.ends
        self._manifest = manifest
        self._findings = findings
        self._bits = bytearray((info.units + 7) // 8)
        self._previous: Commit | None = None
        self._baseline: dict[str, int] | None = dict(self.totals)
        self._writers: dict[int, str] = {}
        self._epoch = 0
        self._widths: dict[str, int] = {}

    def read(self) -> Iterator[Commit]:
        """Every record, checked against those before it; OutputError if one cannot be parsed."""
        for number in range(1, self._last_number() + 1):
            name = f"{number:08d}.json"
            try:
                data = read_bytes(self.layout.root, f"{self.layout.commits.name}/{name}", most_bytes=MOST_BYTES)
            except FileNotFoundError:
                self._findings.add("log_numbers", name, "there is no such record, and there are later ones")
                self.broken = self.after_gap = True
                self._previous = self._baseline = None
                continue
            except OSError as error:
                raise denied(error, self.layout.commits / name) or OutputError(
                    f"commit record {name} cannot be read: {error.strerror}"
                ) from error
            commit = Commit.parse(data, name)
            if commit.n != number:
                raise damaged(name, f"it says that it is record {commit.n}")
            self._check(commit, name)
            self.count += 1
            yield commit
            self.after_gap = False

    def is_known(self, u: int, unit_id: str) -> bool:
        """True if the manifest has this unit at this index."""
        manifest = self._manifest
        return manifest is not None and 0 <= u < len(manifest) and manifest.unit_id(u) == unit_id

    def _last_number(self) -> int:
        return max((wire.decimal(name.removesuffix(".json")) or 0 for name in names_in(self.layout.commits)), default=0)

    def _check(self, commit: Commit, name: str) -> None:
        add, previous = self._findings.add, self._previous
        if commit.run != self.run:
            add("log_run", name, f"it belongs to run {commit.run}, this is {self.run}")
        if self.count == 0 and not self.broken and commit.prev:
            add("log_chain", name, "it is the first record and names one before it")
        if previous is not None and commit.prev != previous.sha256:
            add("log_chain", name, f"it does not hold the hash of record {previous.n}")
        if previous is not None and commit.epoch < previous.epoch:
            add("log_epoch", name, f"writer epoch {commit.epoch} comes after epoch {previous.epoch}")
        if self._writers.setdefault(commit.epoch, commit.writer) != commit.writer:
            writers = f"{self._writers[commit.epoch]} and {commit.writer}"
            add("log_writer", name, f"epoch {commit.epoch} has two writers, {writers}")
        if commit.epoch > self._epoch and commit.kind != "fence" and not self.after_gap:
            add("log_fence", name, f"it is the first record of writer epoch {commit.epoch}, and no fence")
        self._epoch = max(self._epoch, commit.epoch)
        if self.closed_by and commit.kind == "data" and not self.grew:
            add("log_close", name, f"it adds data, and record {self.closed_by} closed the log")
        if self.grew and commit.kind == "data":
            self.closed_by, self.grew = "", False
        if commit.kind == "close":
            self.closed_by, self.grew = name, self.done in self._ends[:-1]
        self._check_fingerprint(commit, name)
        self._check_widths(commit, name)
        self._check_units(commit, name)
        self._check_totals(commit, name)
        self._previous = commit

    def _check_fingerprint(self, commit: Commit, name: str) -> None:
        if not commit.fingerprint:
            if any(file.kind == "rows" for file in commit.files):
                self._findings.add("fingerprint", name, "it names rows and no model fingerprint")
            return
        self.fingerprint = self.fingerprint or commit.fingerprint
        if commit.fingerprint != self.fingerprint:
            self._findings.add(
                "fingerprint", name, f"model {commit.fingerprint}, rows before it have {self.fingerprint}"
            )

    def _check_widths(self, commit: Commit, name: str) -> None:
        if any(file.kind == "rows" for file in commit.files):
            self._widths = self._widths or commit.widths
            if not commit.widths or commit.widths != self._widths:
                self._findings.add(
                    "schema", name, f"vectors of {commit.widths} numbers, rows before it have {self._widths}"
                )

    def _check_units(self, commit: Commit, name: str) -> None:
        for unit in commit.units:
            where = f"{name} unit {unit.u}"
            if self._manifest is not None and not self.is_known(unit.u, unit.unit_id):
                self._findings.add("unit_known", where, f"the manifest has no unit {unit.unit_id} under this number")
            if not 0 <= unit.u < self._units:
                continue
            bit = 0x80 >> (unit.u & 7)
            if self._bits[unit.u >> 3] & bit:
                self._findings.add("unit_once", where, "the unit was committed before")
            else:
                self._bits[unit.u >> 3] |= bit
                self.done += 1

    def _check_totals(self, commit: Commit, name: str) -> None:
        added = {
            "units": len(commit.units),
            "rows": sum(unit.rows for unit in commit.units),
            "failures": sum(unit.failures - unit.supersedes for unit in commit.units),
            "quarantined": sum(bool(unit.quarantined) - unit.lifts for unit in commit.units),
            "truncated": sum(unit.truncated for unit in commit.units),
            "tokens": sum(unit.tokens for unit in commit.units),
        }
        for what, count in added.items():
            self.totals[what] += count
            # Records of earlier versions do not have totals of truncated texts or tokens.
            recorded = commit.totals.get(what, 0 if what in ("truncated", "tokens") else None)
            if self._baseline is not None and recorded != (sum_ := self._baseline.get(what, 0) + count):
                self._findings.add("log_totals", name, f"it says {recorded} {what} in total, they add up to {sum_}")
        self._baseline = dict(commit.totals)
