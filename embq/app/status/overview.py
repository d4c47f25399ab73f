"""Overview of a broker, `embq status` without a run: runs, uploads and services."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import click
import redis
from redis.exceptions import BusyLoadingError, ConnectionError, TimeoutError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from embq.app.status import fleet
from embq.app.status.broker_snapshot import BrokerSnapshot, Reports, take_snapshots
from embq.app.status.display import FittedTable, count, panel, plain_line, state_text
from embq.app.status.fleet import FleetStatus, fleet_of
from embq.app.status.resolve_run import arriving
from embq.app.status.run_monitor import RemoteRunMonitor, RunMonitor, open_monitor
from embq.app.status.run_progress import RunProgress
from embq.core.errors import MalformedError, OutputError
from embq.core.queue.heartbeats import live_workers, services
from embq.core.queue.ledger import Ledger
from embq.core.queue.runs import RunRecord, over, registered
from embq.core.queue.scripts import Script, load_scripts
from embq.core.queue.uploads import UploadProgress
from embq.core.redaction import printable
from embq.core.run.control import RunState
from embq.core.service.progress_line import PLAIN_EVERY_S, duration, size_text

LOOK_S = 1.0
DROPPED = ("output", "model", "age", "rows", "failures")
DROPPED_IN_FOLDER = ("run", "model", "left", "rows/s", "failures", "done")
"""Columns that narrow terminals lack, in this order."""
PIPE_COLUMNS = 10_000
"""Width if no terminal has one, so that nothing is folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Runs, uploads and services of a broker, or the runs below a folder, at one moment.

    Attributes:
        of_broker: whether it is a broker's.
        unreadable: why runs below the folder are not shown, a line each.
    """

    runs: list[RunProgress]
    uploads: list[UploadProgress] = field(default_factory=list)
    fleet: FleetStatus = field(default_factory=FleetStatus)
    of_broker: bool = True
    unreadable: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """The shape that `embq status --json` promises."""
        return {
            "schema": 1,
            "runs": [run.to_json() for run in self.runs],
            "uploads": [upload_json(upload) for upload in self.uploads],
            "services": self.fleet.to_json(),
            "warnings": [*self.unreadable, *self.fleet.warnings()],
        }

    def renderable(self, *, verbose: bool) -> Group:
        """A line for each run, upload, service and device; with `verbose`, a panel for each run that is not over."""
        panels = [run for run in self.runs if verbose and not run.state.ended]
        rows = [_columns(run, of_broker=self.of_broker) for run in self.runs if run not in panels]
        parts: list[RenderableType] = [panel(run, verbose=True) for run in panels]
        parts += [FittedTable(rows, DROPPED if self.of_broker else DROPPED_IN_FOLDER, verbose)] if rows else []
        parts += [Text(upload_line(upload)) for upload in self.uploads]
        if not parts:
            parts.append(Text("the broker knows no run" if self.of_broker else "there is no run"))
        if self.fleet.reports:
            parts += [Text(), fleet.table(self.fleet, verbose=verbose)]
        return Group(*parts, *(Text(line, style="yellow") for line in self.notes()))

    def print(self, *, verbose: bool) -> None:
        """On stdout, where lines of text keep their length."""
        console = Console(highlight=False)
        wide = console if console.is_terminal else Console(highlight=False, width=PIPE_COLUMNS)
        wide.print(self.renderable(verbose=verbose))

    def notes(self) -> list[str]:
        """Warnings on runs and services, a line each."""
        lines = [f"warning: {line}" for line in (*self.unreadable, *self.fleet.warnings())]
        if self.of_broker and not self.fleet.reports:
            lines.insert(0, "no producer, no writer and no worker reports to the broker")
        return lines

    def plain_lines(self) -> list[str]:
        """For logs, a line for each run, upload and service."""
        return [
            *(plain_line(run) for run in self.runs),
            *(upload_line(upload) for upload in self.uploads),
            *fleet.plain_lines(self.fleet),
            *self.notes(),
        ]


class OverviewMonitor:
    """Reads overviews of a broker, and each commit record once.

    Args:
        opens_over: read also the folders of runs that are over. Otherwise these are shown as the broker knows them.

    Attributes:
        monitors: run id -> monitor, of the runs of the last overview.
    """

    def __init__(self, client: redis.Redis, *, opens_over: bool = False) -> None:
        self.client = client
        self._opens_over = opens_over
        self.monitors: dict[str, RunMonitor | RemoteRunMonitor] = {}
        self._scripts: dict[str, Script] = {}
        self._final: dict[str, RunProgress] = {}

    def poll(self) -> Overview:
        """The overview now. Raises redis.exceptions.RedisError if the broker is unreachable."""
        records = registered(self.client)
        # Once for all runs: each time it asks the broker for its version.
        self._scripts = self._scripts or load_scripts(self.client)
        ended = over(self.client, records)
        # Nothing changes in a run that is over until somebody has it go on, and a broker may know thousands of them.
        self._final = {run: progress for run, progress in self._final.items() if run in ended}
        remote = set() if self._opens_over else ended
        self.monitors = {
            run: self.monitors.get(run)
            or (RemoteRunMonitor if run in remote else open_monitor)(record, self.client, self._scripts)
            for run, record in records.items()
        }
        ledgers = {run: self._ledger(record) for run, record in records.items() if run not in self._final}
        # Once for all runs: with many workers and many runs, the reports are most of what is read.
        workers, reports = live_workers(self.client), services(self.client)
        open_ledgers = [ledger for ledger in ledgers.values() if ledger is not None]
        pairs = zip(open_ledgers, take_snapshots(open_ledgers, Reports(workers), reports), strict=True)
        snapshots = {ledger.run: snapshot for ledger, snapshot in pairs}
        runs = [
            self._final.get(run) or monitor.progress(snapshots.get(run, BrokerSnapshot()))
            for run, monitor in self.monitors.items()
        ]
        self._final = {run.run: run for run in runs if run.run in ended and run.state == RunState.DONE}
        return Overview(
            runs=runs,
            uploads=arriving(self.client, ""),
            fleet=fleet_of(self.client, records, workers, reports),
        )

    def _ledger(self, record: RunRecord) -> Ledger | None:
        """The ledger of a run; one whose folder is damaged is monitored through the broker from then on."""
        try:
            return self.monitors[record.run].ledger()
        except OutputError as error:
            click.echo(f"warning: {error.message}; the state in the broker is shown", err=True)
            self.monitors[record.run] = remote = RemoteRunMonitor(record, self.client, self._scripts)
            return remote.ledger()


def _columns(run: RunProgress, *, of_broker: bool) -> dict[str, str]:
    """The cells of a run; without a broker its folder, by which it is named then, comes first."""
    output = Path(run.output)
    output = output if of_broker or not output.is_relative_to(Path.cwd()) else output.relative_to(Path.cwd())
    return ({} if of_broker else {"output": str(output)}) | {
        "run": run.run,
        "state": state_text(run) if run.state == RunState.DONE else run.state,
        "done": f"{run.share_committed:.1%}",
        "rows/s": f"{run.speed:,.1f}",
        "left": "-" if run.eta_s is None or run.state == RunState.DONE else duration(run.eta_s),
        "failures": f"{run.failures:,}",
        "age": "-" if run.created_s is None else duration(max(0.0, time.time() - run.created_s)),
        "rows": f"{run.rows:,} of {count(run.rows_total, run.rows_total_exact)}",
        "model": run.model,
        **({"output": run.output} if of_broker else {}),
    }


def follow(poll: Callable[[], Overview], *, as_json: bool, verbose: bool) -> NoReturn:
    """Show overviews until interrupted: live on a terminal, as lines in a log, or as JSON, a line every second."""
    console = Console(stderr=True, highlight=False)
    on_terminal = console.is_terminal and not as_json
    with (
        Live(console=console, refresh_per_second=4, vertical_overflow="visible") if on_terminal else nullcontext()
    ) as live:
        while True:
            try:
                overview = poll()
            except (ConnectionError, TimeoutError, BusyLoadingError):
                click.echo("the broker does not answer; it is asked again", err=True)
            else:
                if live is not None:
                    live.update(overview.renderable(verbose=verbose))
                elif as_json:
                    click.echo(json.dumps(overview.to_json()))
                else:
                    click.echo("\n".join(overview.plain_lines()), err=True)
            time.sleep(LOOK_S if as_json or on_terminal else PLAIN_EVERY_S)


def upload_json(progress: UploadProgress) -> dict[str, Any]:
    """The shape of an upload that `embq status --json` promises."""
    return {
        "upload": progress.name,
        "run": progress.upload.run,
        "output": progress.upload.output,
        "model": _model(progress),
        "bytes": progress.bytes,
        "bytes_total": progress.bytes_total,
        "sent": progress.sent,
        "waits": progress.why,
    }


def upload_line(progress: UploadProgress) -> str:
    """An upload in one line for people."""
    how = "all of it is in the broker" if progress.sent else "its sender has not sent all of it"
    waits = f"; waits: {progress.why}" if progress.why else ""
    return printable(
        f"arriving: run {progress.upload.run} for {progress.upload.output} ({_model(progress)}): "
        f"{size_text(progress.bytes)} of {size_text(progress.bytes_total)} are on the writer's disk, {how}{waits}"
    )


def _model(progress: UploadProgress) -> str:
    try:
        record = RunRecord.from_json(progress.upload.record)
    except MalformedError:
        return "?"
    return "?" if record is None else record.model.spec
