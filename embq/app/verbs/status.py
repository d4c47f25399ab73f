"""`embq status`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import broker_option, json_option, log_option, settings_with, verbose_option
from embq.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from embq.app.status.overview import Overview
    from embq.app.status.resolve_run import ResolvedRun
    from embq.app.status.run_monitor import RemoteRunMonitor, RunMonitor

WATCH_S = 1.0


@click.command(
    "status", cls=SectionedCommand, epilog="Examples: embq status out | embq status out --watch | embq status --json"
)
@click.argument("run", type=click.Path(readable=False), required=False, default="")
@option("--watch", is_flag=True, help="Repeat until the run is done or cancelled; without RUN, until Ctrl-C.")
@broker_option
@log_option
@json_option
@verbose_option
def command(run: str, watch: bool, broker: str, log: tuple[str, ...], as_json: bool, verbose: bool) -> None:
    """Show the progress of RUN: a run id or its output folder.

    Of a folder above runs, all runs below it. Without RUN, all runs that the broker knows, and the services that report
    to it; without a broker, the runs below the current folder.
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
        return
    resolved = resolve_run(run, broker)
    monitor = resolved.monitor()
    while watch and monitor is None:
        _show(resolved, None, as_json=as_json)
        time.sleep(WATCH_S)
        resolved = resolve_run(run, broker)
        monitor = resolved.monitor()
    if watch and monitor is not None:
        _follow(monitor, log, as_json=as_json, verbose=verbose)
    else:
        _show(resolved, monitor, as_json=as_json, verbose=verbose)


def _follow(monitor: RunMonitor | RemoteRunMonitor, targets: tuple[str, ...], *, as_json: bool, verbose: bool) -> None:
    """Show the run until it is done or cancelled."""
    from embq.app.status.display import Display
    from embq.app.status.run_log import RunLog
    from embq.core.storage.paths import place

    progress = monitor.poll()
    facts = {"model": progress.model, "precision": progress.precision}
    output = place(progress.output) if targets else Path()  # what a broker says names a place for these only
    with (
        RunLog(targets, output, run=progress.run, facts=facts, quiet=as_json) as log,
        Display(quiet=as_json, verbose=verbose) as display,
    ):
        while True:
            progress = monitor.poll()
            display.show(progress)
            log.show(progress, last=progress.state.ended)
            if as_json:
                click.echo(json.dumps(progress.to_json()))
            if progress.state.ended:
                return
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
    from embq.app.ui.fleet.sources import FolderSource

    source = FolderSource(folder.resolve())

    def poll() -> Overview:
        runs = [view.progress for view in source.poll(time.time()).runs]
        return Overview(runs=runs, of_broker=False, unreadable=[*source.unreadable.values()])

    overview = poll()
    if not (overview.runs or overview.unreadable):
        raise InputError(
            f"there is no run in or below {folder.resolve()}" + ("" if run else ", and no broker is configured"),
            next_step="name an output folder, or give --broker / EMBQ_BROKER_URL",
        )
    return poll
