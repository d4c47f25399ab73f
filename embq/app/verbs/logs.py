"""`embq logs`: logs of the services that an `embq run` started."""

from __future__ import annotations

import time
from pathlib import Path

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import broker_option
from embq.app.status.service_logs import SERVICES, ServiceLog, logs_of
from embq.core.run.layout import Layout
from embq.core.storage.paths import is_folder, place

POLL_S = 0.2


@click.command("logs", cls=SectionedCommand, epilog="Examples: embq logs out | embq logs out --service worker -f")
@click.argument("run", type=click.Path(readable=False))
@option("-f", "--follow", is_flag=True, help="Also print new lines as they are written, until Ctrl-C.")
@option(
    "--service",
    "services",
    type=click.Choice(SERVICES),
    multiple=True,
    default=SERVICES,
    help="Only the log of this service; repeatable.  [all]",
)
@option("-n", "lines", type=click.IntRange(min=0), default=100, metavar="LINES", help="Last lines; fewer if long.")
@broker_option
def command(run: str, follow: bool, services: tuple[str, ...], lines: int, broker: str) -> None:
    """Print the service logs of RUN: a run id or its output folder.

    `embq run` writes the logs of its services to OUT/_logs. Resident services log to stderr. Lines are in the order of
    their time.
    """
    logs = logs_of(_home(run, broker), tuple(dict.fromkeys(services)))
    for line in _merged(logs, lines):
        click.echo(line)
    while follow:
        for line in _merged(logs):
            click.echo(line)
        time.sleep(POLL_S)


def _home(run: str, broker: str) -> Path:
    """The folder on this machine with the local files of the run."""
    if is_folder(run):
        from embq.core.run.run_info import load_run

        load_run(place(run))  # raises if this is no output folder
        return Layout(place(run)).home
    from embq.app.status.resolve_run import resolve_run

    record, _ = resolve_run(run, broker).registered()
    return Layout(place(record.output)).home


def _merged(logs: list[ServiceLog], most: int | None = None) -> list[str]:
    """New lines of all logs in the order of their time, the last `most` of them."""
    lines = sorted((line for log in logs for line in log.new_lines(most)), key=lambda line: line.time)
    return [line.text for line in (lines if most is None else lines[max(0, len(lines) - most) :])]
