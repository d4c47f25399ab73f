"""Sources of the fleet page: a broker with all of its runs, and output folders with the server of their `embq run`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import redis
from redis.exceptions import RedisError

from embq.app.status.broker_snapshot import BrokerSnapshot, Reports, take_snapshots
from embq.app.status.fleet import FleetStatus, fleet_of
from embq.app.status.overview import OverviewMonitor
from embq.app.status.run_monitor import RemoteRunMonitor, RunMonitor
from embq.app.status.run_progress import RunProgress
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import EmbqError, command_line
from embq.core.queue.heartbeats import live_workers, services
from embq.core.queue.ledger import Ledger
from embq.core.queue.runs import RunRecord, registered
from embq.core.queue.uploads import UploadProgress
from embq.core.redaction import masked
from embq.core.run.control import RunState
from embq.core.run.layout import Layout
from embq.core.storage.paths import Place
from embq.index.index_files.files import LOCK, Attempt, attempted
from embq.index.workers.builds import announced

DEPTH = 5
"""Folders between a folder that a user names and a run in it."""
MOST_FOLDERS, MOST_RUNS = 20_000, 1_000
"""Limits of one search for runs."""
SEARCH_S = 10.0
"""Between two searches for new runs."""
SEARCH_REST = 20
"""The same, in times of a search: of a large tree it takes seconds."""
SERVER_S = 2.0
"""Between two looks for the server of an `embq run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment.

    Attributes:
        recent: (rows, seconds) committed in the last ten minutes, see `CommitPace`; None if not known yet.
        root: its output folder if it can be read here.
        client: the broker if it is at work.
        needs_bytes: for the rows that are left; None if unknown.
        local: whether it is of an `embq run`, which has a broker of its own while it is at work.
    """

    progress: RunProgress
    recent: tuple[int, float] | None
    root: Place | None
    client: redis.Redis | None
    needs_bytes: float | None
    local: bool

    @property
    def state(self) -> str:
        """That of its progress; "waiting" for an `embq run` without a device, "interrupted" for one that was ended."""
        if self.local and self.progress.state == "stopped":
            return "interrupted" if self.client is None else "waiting"
        return self.progress.state

    @property
    def active(self) -> bool:
        """True unless it is done, cancelled, paused or interrupted."""
        return not (self.progress.state.ended or self.state in (RunState.PAUSED, "interrupted"))

    @property
    def command(self) -> str:
        """The command that has somebody work on it; "" if somebody does, and if it is over."""
        if self.local and self.client is None and self.state in ("interrupted", "paused"):
            return command_line("resume", self.root or self.progress.output)
        return "embq worker" if self.state == "stopped" else ""


@dataclass(frozen=True, slots=True)
class SeenBuild:
    """A build or change of an index, its folder or URL; it is "running", "waiting" for a worker, "failed" or
    "interrupted", which is ended without an error."""

    index: str
    state: str
    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a source shows at one moment."""

    runs: Sequence[RunView] = ()
    uploads: Sequence[UploadProgress] = ()
    fleets: Sequence[FleetStatus] = ()
    builds: Sequence[SeenBuild] = ()


class BrokerSource:
    """All runs and services of a broker.

    Args:
        url, password: as settings have them.
    """

    def __init__(self, url: str, password: str = "") -> None:
        self.name = f"the broker {masked(url)}"
        self._client = connect(url, password=password)
        self._monitor = OverviewMonitor(self._client, opens_over=True)
        self._indexes: list[str] = []

    def poll(self, now_s: float) -> Seen:
        """The runs and services at `now_s`, since the epoch. Raises redis.exceptions.RedisError without the broker."""
        overview = self._monitor.poll()
        runs = [
            _view(self._monitor.monitors[progress.run], progress, self._client, now_s, local=False)
            for progress in overview.runs
        ]
        return Seen(runs=runs, uploads=overview.uploads, fleets=[overview.fleet], builds=self._builds())

    def _builds(self) -> list[SeenBuild]:
        """The builds on workers, and those that were and whose folder is on this machine."""
        stages = {stage.build.index: stage for stage in announced(self._client)}
        indexes = dict.fromkeys((*self._indexes, *stages))
        builds = {index: build for index in indexes if (build := build_at(Path(index))) is not None}
        self._indexes = [index for index in indexes if index in builds or index in stages]
        for index, stage in stages.items():
            ledger = Ledger(self._client, stage.run, scripts={})
            meta = ledger.meta()
            far = Attempt(stages={stage.stage: (int(meta.get("done", 0)), int(meta.get("total", 0)))})
            build = builds.get(index) or SeenBuild(index, "running", far)
            waits = build.state == "running" and not ledger.leased()
            builds[index] = replace(build, state="waiting") if waits else build
        return list(builds.values())

    def registered(self, run: str) -> tuple[RunRecord, redis.Redis] | None:
        """The record of a run, and the broker; None if it knows no such run."""
        record = registered(self._client).get(run)
        return None if record is None else (record, self._client)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class FolderSource:
    """The runs in and below a folder, with the private servers of `embq run` if some work on them.

    Args:
        folder: of a run, or above runs.

    Attributes:
        unreadable: output folder -> why it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._folder = folder
        self._runs: dict[Path, _FolderRun] = {}
        self.unreadable: dict[Path, str] = {}
        self._indexes: list[Path] = []
        self._search_at = 0.0

    def poll(self, now_s: float) -> Seen:
        """The runs now; one whose folder cannot be read is left out until the next search."""
        if time.monotonic() >= self._search_at:
            began = time.monotonic()
            listed = dict(runs_and_indexes(self._folder))
            self._runs = {root: self._runs.get(root) or _FolderRun(root) for root, is_run in listed.items() if is_run}
            self._indexes = [index for index, is_run in listed.items() if not is_run]
            self.unreadable.clear()
            took_s = time.monotonic() - began
            self._search_at = time.monotonic() + max(SEARCH_S, SEARCH_REST * took_s)
        runs, fleets = [], []
        for root, item in self._runs.items():
            if root in self.unreadable:
                continue
            try:
                run, fleet = item.poll(now_s)
            except EmbqError as error:  # no run of embq, or a damaged one: `embq status` says why
                self.unreadable[root] = error.message
                continue
            runs.append(run)
            fleets += [] if fleet is None else [fleet]
        builds = [build for index in self._indexes if (build := build_at(index)) is not None]
        return Seen(runs=runs, fleets=fleets, builds=builds)

    def registered(self, run: str) -> tuple[RunRecord, redis.Redis] | None:
        """See `BrokerSource.registered`; of a run that an `embq run` works on."""
        for item in self._runs.values():
            if item.client is not None and item.run == run and (record := registered(item.client).get(run)) is not None:
                return record, item.client
        return None

    def close(self) -> None:
        """Close the connections."""
        for item in self._runs.values():
            item.leave()


Source = BrokerSource | FolderSource


class _FolderRun:
    """A run in a folder of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = ""
        self.client: redis.Redis | None = None
        self._monitor: RunMonitor | None = None
        self._server_at = 0.0

    def poll(self, now_s: float) -> tuple[RunView, FleetStatus | None]:
        if self.client is None and time.monotonic() >= self._server_at:
            self._server_at = time.monotonic() + SERVER_S
            if url := EmbeddedServer.find(Layout(self.root).broker):
                self.client, self._monitor = connect(url), None
        try:
            return self._poll(now_s)
        except RedisError:  # the `embq run` has ended
            self.leave()
            return self._poll(now_s)

    def _poll(self, now_s: float) -> tuple[RunView, FleetStatus | None]:
        if self._monitor is None:
            self._monitor = RunMonitor(self.root, self.client)
            self.run = self._monitor.info.run
        ledger = self._monitor.ledger()
        if ledger is None or self.client is None:
            return _view(self._monitor, self._monitor.progress(BrokerSnapshot()), None, now_s, local=True), None
        workers, reports = live_workers(self.client), services(self.client)
        progress = self._monitor.progress(take_snapshots([ledger], Reports(workers), reports)[0])
        fleet = fleet_of(self.client, registered(self.client), workers, reports)
        return _view(self._monitor, progress, self.client, now_s, local=True), fleet

    def leave(self) -> None:
        if self.client is not None:
            self.client.close()
        self.client, self._monitor = None, None


def _view(
    monitor: RunMonitor | RemoteRunMonitor,
    progress: RunProgress,
    client: redis.Redis | None,
    now_s: float,
    *,
    local: bool,
) -> RunView:
    rows_left = None if progress.rows_total is None else max(0, progress.rows_total - progress.rows - progress.failures)
    if progress.state.ended:
        rows_left = 0
    per_row = monitor.pace.bytes_per_row
    return RunView(
        progress=progress,
        recent=monitor.pace.recent(now_s),
        root=monitor.root if isinstance(monitor, RunMonitor) else None,
        client=client,
        needs_bytes=None if rows_left is None or per_row is None else rows_left * per_row,
        local=local,
    )


def build_at(index: Path) -> SeenBuild | None:
    """The build in the folder of an index; None if there is none, or it succeeded."""
    if (last_attempt := attempted(index)) is None:
        return None
    attempt, at_work = last_attempt
    return SeenBuild(str(index), "running" if at_work else "failed" if attempt.error else "interrupted", attempt)


def runs_and_indexes(folder: Path) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is of a run) of each run and index in and below a folder, at most `MOST_RUNS`; of what is
    below a run, its indexes."""
    count = 0
    for looked, (path, names, files) in enumerate(os.walk(folder, followlinks=False), start=1):
        is_run = "run.json" in files
        if is_run or LOCK in files:
            names[:] = [name for name in names if is_run and name == "index"]
            count += 1
            yield Path(path), is_run
        if count >= MOST_RUNS or looked >= MOST_FOLDERS:
            return
        if len(Path(path).relative_to(folder).parts) >= DEPTH:
            names.clear()
        names[:] = sorted(name for name in names if not name.startswith(("_", ".")))


def sources_of(folders: Sequence[str], broker: str, password: str = "") -> list[Source]:
    """The sources that a user names.

    Args:
        folders: of runs, or above runs; URLs of object stores are left out: a search there is no listing of a folder.
        broker: URL; "" for none.

    Raises ConfigError if the URL cannot be used.
    """
    sources: list[Source] = [BrokerSource(broker, password)] if broker else []
    for given in folders:
        if "://" in given:
            continue
        folder = Path(given).resolve()
        if not folder.is_dir():  # an error of the server, which wants indexes there
            continue
        # An index lies in the folder of its run.
        of_run = (candidate for candidate in (folder, *folder.parents[:3]) if (candidate / "run.json").is_file())
        sources.append(FolderSource(next(of_run, folder)))
    return sources
