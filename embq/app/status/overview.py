"""Overview of a broker, `embq status` without a run: runs, uploads and services."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import redis
from redis.exceptions import BusyLoadingError, ConnectionError, TimeoutError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from embq.app.status import fleet, upload_status
from embq.app.status.broker_snapshot import BrokerSnapshot, take_snapshots
from embq.app.status.display import FittedTable, count, panel, plain_line
from embq.app.status.fleet import FleetStatus, fleet_of
from embq.app.status.reports import Reports
from embq.app.status.run_monitor import RemoteRunMonitor, RunMonitor, open_monitor
from embq.app.status.run_progress import RunProgress
from embq.core.errors import OutputError
from embq.core.queue.heartbeats import live_workers, services
from embq.core.queue.ledger import Ledger
from embq.core.queue.runs import RunRecord, over, registered
from embq.core.queue.scripts import Script, load_scripts
from embq.core.queue.uploads import UploadProgress
from embq.core.run.control import RunState
from embq.core.service.progress_line import PLAIN_EVERY_S, duration

LOOK_S = 1.0
DROPPED = ("output", "model", "age", "rows", "failures")
DROPPED_IN_FOLDER = ("run", "model", "left", "rows/s", "failures", "done")
"""Columns that narrow terminals lack, in this order."""
PIPE_COLUMNS = 10_000
"""Width where no terminal has one, so that nothing is folded."""

Answer = TypeVar("Answer")


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
            "uploads": [upload_status.to_json(one) for one in self.uploads],
            "services": self.fleet.to_json(),
            "warnings": [*self.unreadable, *self.fleet.warnings()],
        }

    def renderable(self, *, verbose: bool) -> Group:
        """A line for each run, upload, service and device; with `verbose`, a panel for each run that is not over."""
        panels = [run for run in self.runs if verbose and not run.state.ended]
        rows = [_columns(run, of_broker=self.of_broker) for run in self.runs if run not in panels]
        parts: list[RenderableType] = [panel(run, verbose=True) for run in panels]
        parts += [FittedTable(rows, DROPPED if self.of_broker else DROPPED_IN_FOLDER, verbose)] if rows else []
        parts += [Text(upload_status.line(one)) for one in self.uploads]
        if not parts:
            parts.append(Text("the broker knows no run" if self.of_broker else "there is no run"))
        if self.fleet.heard:
            parts += [Text(), fleet.table(self.fleet, verbose=verbose)]
        return Group(*parts, *(Text(line, style="yellow") for line in self.notes()))

    def print(self, *, verbose: bool) -> None:
        """On stdout, where lines of text keep their length."""
        console = Console(highlight=False)
        wide = console if console.is_terminal else Console(highlight=False, width=PIPE_COLUMNS)
        wide.print(self.renderable(verbose=verbose))

    def notes(self) -> list[str]:
        """Warnings on the services, a line each."""
        none = (
            []
            if self.fleet.heard or not self.of_broker
            else ["no producer, no writer and no worker reports to the broker"]
        )
        return [*none, *(f"warning: {line}" for line in (*self.unreadable, *self.fleet.warnings()))]

    def plain_lines(self) -> list[str]:
        """For logs, a line for each run, upload and service."""
        return [
            *(plain_line(run) for run in self.runs),
            *(upload_status.line(one) for one in self.uploads),
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

    def look(self) -> Overview:
        """The overview now. Raises redis.exceptions.RedisError where the broker is away."""
        records = registered(self.client)
        # Once for all runs: each time it asks the broker for its version.
        self._scripts = self._scripts or load_scripts(self.client)
        ended = set() if self._opens_over else over(self.client, records)
        self.monitors = {
            run: self.monitors.get(run)
            or (RemoteRunMonitor if run in ended else open_monitor)(record, self.client, self._scripts)
            for run, record in records.items()
        }
        ledgers = {run: self._ledger(record) for run, record in records.items()}
        # Once for all runs: with many workers and many runs, the reports are most of what is read.
        workers, heard = live_workers(self.client), services(self.client)
        asked = [ledger for ledger in ledgers.values() if ledger is not None]
        found = take_snapshots(asked, Reports(workers), heard)
        seen = {one.run: snapshot for one, snapshot in zip(asked, found, strict=True)}
        return Overview(
            runs=[monitor.progress(seen.get(run, BrokerSnapshot())) for run, monitor in self.monitors.items()],
            uploads=upload_status.arriving(self.client, ""),
            fleet=fleet_of(self.client, records, workers, heard),
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
        "state": run.state,
        "done": f"{run.share_committed:.1%}",
        "rows/s": f"{run.rows_per_s if run.state == RunState.DONE else run.embedding_per_s:,.1f}",
        "left": "-" if run.eta_s is None or run.state == RunState.DONE else duration(run.eta_s),
        "failures": f"{run.failures:,}",
        "age": "-" if run.created_s is None else duration(max(0.0, time.time() - run.created_s)),
        "rows": f"{run.rows:,} of {count(run.rows_total, run.rows_total_exact)}",
        "model": run.model,
        **({"output": run.output} if of_broker else {}),
    }


def follow(look: Callable[[], Overview], *, as_json: bool, verbose: bool) -> NoReturn:
    """Show overviews until interrupted: live on a terminal, as lines in a log, or as JSON, a line every second."""
    console = Console(stderr=True, highlight=False)
    if as_json:
        while True:
            if (overview := answered(look)) is not None:
                click.echo(json.dumps(overview.to_json()))
            time.sleep(LOOK_S)
    if not console.is_terminal:
        while True:
            if (overview := answered(look)) is not None:
                click.echo("\n".join(overview.plain_lines()), err=True)
            time.sleep(PLAIN_EVERY_S)
    with Live(console=console, refresh_per_second=4, vertical_overflow="visible") as live:
        while True:
            if (overview := answered(look)) is not None:
                live.update(overview.renderable(verbose=verbose))
            time.sleep(LOOK_S)


def answered(look: Callable[[], Answer]) -> Answer | None:
    """The result of `look`; None while the broker is away."""
    try:
        return look()
    except (ConnectionError, TimeoutError, BusyLoadingError):
        click.echo("the broker does not answer; it is asked again", err=True)
        return None
