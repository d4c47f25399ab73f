"""All that a broker knows, as `embq status` shows it without a run: runs, uploads and machines."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import click
import redis
from redis.exceptions import BusyLoadingError, ConnectionError, TimeoutError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from core.queue.runs import registered
from core.queue.uploads import UnderWay
from core.service.progress_line import PLAIN_EVERY_S
from embq.status import fleet, upload_status
from embq.status.display import cell, panel, plain_line
from embq.status.fleet import FleetStatus
from embq.status.run_monitor import RemoteRunMonitor, RunMonitor, open_monitor
from embq.status.run_progress import RunProgress

LOOK_S = 1.0
OVER = ("done", "cancelled")
PIPE_COLUMNS = 200
"""Where no terminal says how wide it is, nothing is folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """One look at everything."""

    runs: list[RunProgress]
    uploads: list[UnderWay]
    fleet: FleetStatus

    def to_json(self) -> dict[str, Any]:
        """The shape that `embq status --json` promises."""
        return {
            "schema": 1,
            "runs": [run.to_json() for run in self.runs],
            "uploads": [upload_status.to_json(one) for one in self.uploads],
            "services": self.fleet.to_json(),
            "warnings": self.fleet.warnings(),
        }

    def shown(self) -> RenderableType:
        """Everything as something to look at: runs, those that are over in a line each, and below them the machines."""
        parts: list[RenderableType] = [panel(run) if run.state not in OVER else _line(run) for run in self.runs]
        parts += [Text(upload_status.line(one)) for one in self.uploads]
        if not parts:
            parts.append(Text("the broker knows no run"))
        if self.fleet.heard:
            parts.append(fleet.table(self.fleet))
        return Group(*parts, *(Text(line, style="yellow") for line in self.notes()))

    def tell(self) -> None:
        """The same on stdout, where lines of text keep their length."""
        console = Console(highlight=False)
        for run in self.runs:
            console.print(panel(run))
        if not self.runs and not self.uploads:
            click.echo("the broker knows no run")
        for one in self.uploads:
            click.echo(upload_status.line(one))
        if self.fleet.heard:
            wide = console if console.is_terminal else Console(highlight=False, width=PIPE_COLUMNS)
            wide.print(fleet.table(self.fleet))
        for line in self.notes():
            click.echo(line)

    def notes(self) -> list[str]:
        """What a person should know of the fleet, a line each."""
        none = [] if self.fleet.heard else ["no producer, no writer and no worker reports to the broker"]
        return [*none, *(f"warning: {line}" for line in self.fleet.warnings())]

    def plain_lines(self) -> list[str]:
        """The same for logs, a line each."""
        return [
            *(plain_line(run) for run in self.runs),
            *(upload_status.line(one) for one in self.uploads),
            *fleet.plain_lines(self.fleet),
            *self.notes(),
        ]


class OverviewMonitor:
    """Looks again and again, reading each commit record once.

    Args:
        client: the broker.
    """

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self._watches: dict[str, RunMonitor | RemoteRunMonitor] = {}

    def look(self) -> Overview:
        """All of it now. Raises redis.exceptions.RedisError where the broker is away."""
        records = registered(self.client)
        self._watches = {
            run: self._watches.get(run) or open_monitor(record, self.client) for run, record in records.items()
        }
        return Overview(
            runs=[watch.look() for watch in self._watches.values()],
            uploads=upload_status.arriving(self.client, ""),
            fleet=fleet.fleet_status(self.client),
        )


def _line(run: RunProgress) -> Text:
    return cell(f"run {run.run}  {run.model}  {run.state}  {run.rows:,} rows, {run.failures:,} failures  {run.output}")


def follow(client: redis.Redis) -> None:
    """Show everything every second until interrupted: live on a terminal, else some lines every 30 seconds."""
    everything, console = OverviewMonitor(client), Console(stderr=True, highlight=False)
    if not console.is_terminal:
        while True:
            if (look := _look(everything)) is not None:
                print("\n".join(look.plain_lines()), file=sys.stderr, flush=True)  # noqa: T201 - progress, as in display
            time.sleep(PLAIN_EVERY_S)
    with Live(console=console, refresh_per_second=4, vertical_overflow="visible") as live:
        while True:
            if (look := _look(everything)) is not None:
                live.update(look.shown())
            time.sleep(LOOK_S)


def follow_as_json(client: redis.Redis) -> None:
    """One JSON object a line every second, until interrupted."""
    everything = OverviewMonitor(client)
    while True:
        if (look := _look(everything)) is not None:
            click.echo(json.dumps(look.to_json()))
        time.sleep(LOOK_S)


def _look(everything: OverviewMonitor) -> Overview | None:
    """None while the broker is away."""
    try:
        return everything.look()
    except (ConnectionError, TimeoutError, BusyLoadingError):
        click.echo("the broker does not answer; it is asked again", err=True)
        return None
