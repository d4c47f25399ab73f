"""`embq status`, `embq logs` and `embq failures`: looks at runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import broker_option, json_option, log_option, settings_with, verbose_option
from embq.app.status.service_logs import SERVICES, ServiceLog, logs_of
from embq.core.errors import Exit, UsageError
from embq.core.run.layout import Layout, part_of_run, run_above
from embq.core.storage.paths import is_folder, place

if TYPE_CHECKING:
    from collections.abc import Callable

    from embq.app.status.overview import Overview
    from embq.app.status.resolve_run import ResolvedRun
    from embq.app.status.run_monitor import RemoteRunMonitor, RunMonitor

WATCH_S = 1.0
POLL_S = 0.2
"""Between two looks at logs."""


@click.command(
    "status", cls=SectionedCommand, epilog="Examples: embq status out | embq status out --watch | embq status --json"
)
@click.argument("run", type=click.Path(readable=False), required=False, default="")
@option("--watch", is_flag=True, help="Repeat until the run is done or cancelled; without RUN, until Ctrl-C.")
@broker_option
@log_option
@json_option
@verbose_option
def command(run: str, watch: bool, broker: str, log: tuple[str, ...], as_json: bool, verbose: bool) -> Exit:
    """Show the progress of RUN: a run id or its output folder.

    Of a folder above runs, all runs below it. Without RUN, all runs that the broker knows, and the services that report
    to it; without a broker, the runs below the current folder.

    Exit status: 0; of RUN with --watch that of `embq run`, 3 if samples have failed and 130 if it is cancelled.
    """
    from embq.app.status.resolve_run import resolve_run

    if log and not (run and watch):
        raise UsageError("--log is for one run and goes on until it is over", next_step="add RUN and --watch")
    poll = _look_at_all(run, broker)
    if poll is not None:
        from embq.app.status.overview import follow

        if watch:
            follow(poll, as_json=as_json, verbose=verbose)
        overview = poll()
        if as_json:
            click.echo(json.dumps(overview.to_json()))
        else:
            overview.print(verbose=verbose)
        return Exit.DONE
    resolved = resolve_run(run, broker)
    monitor = resolved.monitor()
    while watch and monitor is None:
        _show(resolved, None, as_json=as_json)
        time.sleep(WATCH_S)
        resolved = resolve_run(run, broker)
        monitor = resolved.monitor()
    if watch and monitor is not None:
        return _follow(monitor, log, as_json=as_json, verbose=verbose)
    _show(resolved, monitor, as_json=as_json, verbose=verbose)
    return Exit.DONE


def _follow(monitor: RunMonitor | RemoteRunMonitor, targets: tuple[str, ...], *, as_json: bool, verbose: bool) -> Exit:
    """Show the run until it is done or cancelled; returns the exit status."""
    from embq.app.status.display import Display
    from embq.app.status.run_log import RunLog

    progress = monitor.poll()
    facts = {"model": progress.model, "precision": progress.precision}
    output = place(progress.output) if targets else Path()  # what a broker says names a place for these only
    with (
        RunLog(targets, output, run=progress.run, facts=facts, quiet=as_json) as log,
        Display(quiet=as_json, verbose=verbose, says_first=True) as display,
    ):
        while True:
            progress = monitor.poll()
            display.show(progress)
            log.show(progress, last=progress.state.ended)
            if as_json:
                click.echo(json.dumps(progress.to_json()))
            if progress.state.ended:
                return progress.exit_status
            time.sleep(WATCH_S)


def _show(
    resolved: ResolvedRun, monitor: RunMonitor | RemoteRunMonitor | None, *, as_json: bool, verbose: bool = False
) -> None:
    """The run on stdout, warnings of its workers, and what is still on its way to the writer."""
    from rich.console import Console

    from embq.app.status.display import panel
    from embq.app.status.fleet import fleet_status
    from embq.app.status.overview import upload_json, upload_line

    progress = monitor.poll() if monitor is not None else None
    if as_json:
        uploads = [upload_json(upload) for upload in resolved.uploads]
        if progress is not None:
            click.echo(json.dumps(progress.to_json() | ({"uploads": uploads} if uploads else {})))
        else:
            first = resolved.uploads[0].upload
            shape = {"schema": 1, "run": first.run, "output": first.output, "state": "arriving", "uploads": uploads}
            click.echo(json.dumps(shape))
        return
    if progress is not None:
        Console(highlight=False).print(panel(progress, verbose=verbose))
        if resolved.client is not None and not progress.closed:
            fleet = fleet_status(resolved.client)
            for line in [*fleet.refusals(progress.model), *fleet.unseen(progress.run)]:
                click.echo(f"warning: {line}")
    for upload in resolved.uploads:
        click.echo(upload_line(upload))


def _look_at_all(run: str, broker: str) -> Callable[[], Overview] | None:
    """What looks at all runs of the broker, or below a folder that is no run itself; None if one run is named."""
    from embq.app.status.overview import Overview, OverviewMonitor
    from embq.core.broker.client import connect, reach
    from embq.core.errors import InputError

    settings = settings_with(broker)
    if not run and settings.broker_url:
        client = connect(settings.broker_url, password=settings.broker_password)
        reach(client, settings.broker_url)
        return OverviewMonitor(client).poll
    folder = Path(run)
    if not folder.is_dir() or (run and (folder / "run.json").exists()):
        return None
    from embq.app.status.folder_runs import FolderRuns

    below = FolderRuns(folder.resolve())

    def poll() -> Overview:
        runs = [state.progress for state in below.poll()]
        return Overview(runs=runs, of_broker=False, unreadable=[*below.unreadable.values()])

    overview = poll()
    if not overview.runs and (above := run_above(folder)) is not None:
        raise part_of_run(folder, above)
    if not (overview.runs or overview.unreadable):
        raise InputError(
            f"there is no run in or below {folder.resolve()}" + ("" if run else ", and no broker is configured"),
            next_step="name an output folder, or give --broker / EMBQ_BROKER_URL",
        )
    return poll


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
def logs(run: str, follow: bool, services: tuple[str, ...], lines: int, broker: str) -> None:
    """Print the service logs of RUN: a run id or its output folder.

    `embq run` writes the logs of its services to OUT/_logs. Resident services log to stderr. Lines are in the order of
    their time.
    """
    service_logs = logs_of(_home(run, broker), tuple(dict.fromkeys(services)))
    for line in _merged(service_logs, lines):
        click.echo(line)
    while follow:
        for line in _merged(service_logs):
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


@click.command("failures", cls=SectionedCommand, epilog="Example: embq failures ./out")
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@json_option
def failures(output: str, as_json: bool) -> int:
    """List the samples of OUT without an embedding, grouped by cause, most frequent first.

    Failures are listed once committed, and of a retried sample the last one. A unit that failed as a whole counts
    once.
    """
    from embq.app.status.failure_causes import cause_lines, described, grouped

    root = place(output)
    groups = described(root, grouped(root))
    if as_json:
        click.echo(json.dumps({"schema": 1, "groups": groups}))
        return 0
    if not groups:
        click.echo("no failures")
    width = max((len(group["code"]) for group in groups), default=0)
    for group in groups:
        click.echo("\n".join(cause_lines(group, width)))
    return 0
