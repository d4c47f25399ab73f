"""Sources of the fleet page: a broker with all of its runs, and output folders with the server of their `embq run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import redis

from embq.app.status.fleet import FleetStatus
from embq.app.status.folder_runs import FolderRuns
from embq.app.status.overview import OverviewMonitor
from embq.app.status.run_monitor import RemoteRunMonitor, RunMonitor
from embq.app.status.run_progress import RunProgress
from embq.core.broker.client import connect
from embq.core.errors import command_line
from embq.core.queue.ledger import Ledger
from embq.core.queue.runs import RunRecord, registered
from embq.core.queue.uploads import UploadProgress
from embq.core.redaction import masked
from embq.core.run.control import RunState
from embq.core.storage.paths import Place
from embq.index.index_files.files import LOCK, Attempt, attempted
from embq.index.workers.builds import announced


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
    """The runs and indexes in and below a folder.

    Args:
        folder: of a run or an index, or above them.
    """

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._runs = FolderRuns(folder, index_file=LOCK)

    def poll(self, now_s: float) -> Seen:
        """The runs and builds at `now_s`, since the epoch; unreadable runs are left out until the next search."""
        states = self._runs.poll()
        runs = [_view(state.monitor, state.progress, state.client, now_s, local=True) for state in states]
        fleets = [state.fleet for state in states if state.fleet is not None]
        builds = [build for index in self._runs.indexes if (build := build_at(index)) is not None]
        return Seen(runs=runs, fleets=fleets, builds=builds)

    def registered(self, run: str) -> tuple[RunRecord, redis.Redis] | None:
        """See `BrokerSource.registered`; of a run that an `embq run` works on."""
        return self._runs.registered(run)

    def close(self) -> None:
        """Close the connections."""
        self._runs.close()


Source = BrokerSource | FolderSource


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
