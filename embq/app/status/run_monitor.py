"""Monitors a run through its commit log or, remotely, through the broker."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import datetime

import click
import redis

from embq.app.status.broker_snapshot import BrokerSnapshot, take_snapshot
from embq.app.status.run_progress import RunCounts, RunProgress, derive_progress
from embq.core.errors import EmbqError
from embq.core.queue.ledger import Ledger
from embq.core.queue.runs import RunRecord
from embq.core.queue.scripts import Script, load_scripts
from embq.core.run import checkpoint, generations
from embq.core.run.commit_log import CommitLog, LogState
from embq.core.run.commits import Commit
from embq.core.run.control import Control, RunState, load_control
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo, load_run
from embq.core.storage.paths import Place, is_folder, place

Scripts = Mapping[str, Script]

WINDOW_S = 600.0
LEAST_S = 5.0
"""Time over which a speed of commits is measured, and before which it is not believed."""

MOST_MS = 253_402_300_800_000
"""Year 10000, which no date has."""


class CommitPace:
    """Committed rows over the last ten minutes, and bytes of a row, from the records as they are read.

    Attributes:
        bytes_per_row: of the files of the records that were read; None if none had rows.
    """

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()
        self._bytes = self._rows = 0

    @property
    def bytes_per_row(self) -> float | None:
        return self._bytes / self._rows if self._rows else None

    def commit(self, commit: Commit, rows: int) -> None:
        """Take a record into account.

        Args:
            rows: committed rows after it.
        """
        self._bytes += sum(file.bytes for file in commit.files)
        self._rows += sum(file.rows for file in commit.files if file.kind == "rows")
        if commit.kind == "fence":  # the time before belongs to another session
            self._points.clear()
        if (at_s := written_at(commit.created_at)) is not None:
            self.note(at_s, rows)

    def note(self, at_s: float, rows: int) -> None:
        """Take the number of committed rows at a time into account; times never go back."""
        if self._points:
            at_s = max(at_s, self._points[-1][0])
        self._points.append((at_s, rows))
        self._forget(at_s - WINDOW_S)

    def recent(self, now_s: float) -> tuple[int, float] | None:
        """(rows, seconds) committed in the last ten minutes, or since the session began; None before `LEAST_S`."""
        from_s = now_s - WINDOW_S
        self._forget(from_s)
        if not self._points:
            return None
        first_s, first_rows = self._points[0]
        elapsed_s = now_s - max(from_s, first_s)
        return (self._points[-1][1] - first_rows, elapsed_s) if elapsed_s >= LEAST_S else None

    def _forget(self, before_s: float) -> None:
        """Drop all points before a time but the last."""
        while len(self._points) > 1 and self._points[1][0] <= before_s:
            self._points.popleft()


class RunMonitor:
    """Monitors a run through its output folder; reads each commit record once.

    Args:
        root: output folder.
        client: the broker; None for none.
        scripts: those of the broker, if they are loaded already.

    Attributes:
        pace: of the commits.
    """

    def __init__(self, root: Place, client: redis.Redis | None, scripts: Scripts | None = None) -> None:
        self.info: RunInfo = load_run(root)
        self.root = root
        self.client = client
        self._log = CommitLog(Layout(root))
        self._state = checkpoint.load(Layout(root), self.info.units)
        self._timing: dict[str, float] = {}
        self._control = Control()
        self.pace = CommitPace()
        self._scripts = scripts or (load_scripts(client) if client is not None else {})
        # Once: listing all records on every look would be too slow.
        self._log.ends_with(self.log_state().n)

    def log_state(self) -> LogState:
        """The commit log now, with units that were added to the run."""
        for commit in self._log.read(after=self._state.n):
            self._log.advance(self._state, commit)
            self.pace.commit(commit, self._state.rows)
            self._timing = commit.timing or self._timing
        if generations.exists(self._log.layout.manifest, len(self.info.added) + 1):
            self.info = load_run(self.root)
            self._state.grow(self.info.units)
        return self._state

    def ledger(self) -> Ledger | None:
        """Read the folder, and return the ledger; None if the run is over or there is no broker."""
        closed = self.log_state().closed
        self._control = load_control(Layout(self.root))
        if closed or self.client is None:
            return None
        return Ledger(self.client, self.info.run, scripts=self._scripts)

    def poll(self) -> RunProgress:
        """The progress now. Raises redis.exceptions.RedisError if the broker is unreachable."""
        ledger = self.ledger()
        return self.progress(BrokerSnapshot() if ledger is None else take_snapshot(ledger))

    def progress(self, snapshot: BrokerSnapshot) -> RunProgress:
        """The progress by the folder as `ledger` has read it, and by a snapshot of the ledger, the empty one for None.

        The broker is read last, so that no unit counts twice.
        """
        log = self._state
        # The broker has requests first, until the writer has noted them in the folder.
        control = self._control.with_changes(snapshot.meta | snapshot.requested)
        return derive_progress(
            self.info.run,
            str(self.root),
            self.info.model,
            _counts(self.info, log),
            control,
            snapshot,
            timing=self._timing if log.closed else None,
        )


class RemoteRunMonitor:
    """Monitors a run through the broker alone, for machines that cannot read its folder.

    Args:
        record: the run as it was announced.
        scripts: those of the broker, if they are loaded already.

    Attributes:
        pace: of the commits, as far as they were looked at.
    """

    def __init__(self, record: RunRecord, client: redis.Redis, scripts: Scripts | None = None) -> None:
        self.pace = CommitPace()
        self.record = record
        self.client = client
        self._ledger = Ledger(client, record.run, scripts=scripts or load_scripts(client))

    def ledger(self) -> Ledger:
        """The ledger of the run."""
        return self._ledger

    def poll(self) -> RunProgress:
        """The progress now. Raises redis.exceptions.RedisError if the broker is unreachable."""
        return self.progress(take_snapshot(self._ledger))

    def progress(self, snapshot: BrokerSnapshot) -> RunProgress:
        """The progress by a snapshot of `ledger`."""
        progress = progress_of(self.record, snapshot)
        if snapshot.now_ms:
            self.pace.note(snapshot.now_ms / 1000, progress.rows)
        return progress


def open_monitor(
    record: RunRecord, client: redis.Redis, scripts: Scripts | None = None
) -> RunMonitor | RemoteRunMonitor:
    """Monitors a run through its folder if that can be read here, else through the broker."""
    try:
        return RunMonitor(place(record.output), client, scripts)
    except EmbqError as error:
        # A missing folder is normal: output folders of other machines are not here.
        if is_folder(record.output):
            click.echo(f"warning: {error.message}; the state in the broker is shown", err=True)
        return RemoteRunMonitor(record, client, scripts)


def progress_of(record: RunRecord, snapshot: BrokerSnapshot) -> RunProgress:
    """Progress of a run by the broker's state alone.

    Args:
        record: the run as it was announced.
    """
    rows, failures, committed, quarantined = map(snapshot.number, ("rows", "failures", "done", "quarantined"))
    units = snapshot.number("total") or record.units
    closed, opened_ms = snapshot.state == RunState.DONE, snapshot.number("opened_ms")
    counts = RunCounts(
        rows=rows,
        failures=failures,
        truncated=snapshot.number("truncated"),
        tokens=snapshot.number("tokens"),
        units_total=units,
        done=committed - quarantined,
        quarantined=quarantined,
        rows_total=rows + failures if closed else _estimate(rows + failures, committed, units - record.retries),
        rows_total_exact=closed,
        closed=closed,
        created_s=opened_ms / 1000 if 0 < opened_ms < MOST_MS else None,
    )
    control = Control().with_changes(snapshot.meta | snapshot.requested)
    return derive_progress(record.run, record.output, record.model, counts, control, snapshot)


def written_at(moment: str) -> float | None:
    """Seconds since the epoch of a time that a record holds, by its writer's clock; None if that is malformed."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _counts(info: RunInfo, log: LogState) -> RunCounts:
    samples, exact = _samples(info, log)
    return RunCounts(
        rows=log.rows,
        failures=log.failures,
        truncated=log.truncated,
        tokens=log.tokens,
        units_total=info.units,
        done=log.count - log.quarantined,
        quarantined=log.quarantined,
        rows_total=samples,
        rows_total_exact=exact,
        closed=log.closed,
        created_s=written_at(info.created),
    )


def _samples(info: RunInfo, log: LogState) -> tuple[int | None, bool]:
    """(samples of a run or None, whether they are counted exactly)."""
    if info.samples is not None and info.model.chunking is None:
        return info.samples, True
    if log.count == info.units:
        return log.rows + log.failures, True
    # Units of retries add no samples, so they are left out of the mean.
    return _estimate(log.rows + log.failures, log.count - log.retries, info.units - info.retries), False


def _estimate(samples: int, done: int, units: int) -> int | None:
    """Samples of `units` units by the mean of the done ones; retries, which come last, add none."""
    return round(samples / min(done, units) * units) if done and units > 0 else None
