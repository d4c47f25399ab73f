"""`embq status`: how far a run is."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from embq.cli.options import broker_option, json_option, settings_with

if TYPE_CHECKING:
    import redis

    from core.queue.uploads import UnderWay
    from embq.status.resolve_run import Whereabouts
    from embq.status.run_monitor import RemoteRunMonitor, RunMonitor

WATCH_S = 1.0


@click.command("status", epilog="Examples: embq status out | embq status out --watch | embq status --json")
@click.argument("run", required=False, default="")
@click.option("--watch", is_flag=True, help="Go on until the run is done or cancelled; without RUN, until interrupted.")
@broker_option
@json_option
def command(run: str, watch: bool, broker: str, as_json: bool) -> None:
    """Show how far RUN is: a run id or its output folder.

    Without RUN, all runs that the broker knows, and the machines that it hears of.
    """
    from embq.status import upload_status
    from embq.status.resolve_run import find

    if not run:
        _show_everything(_connected(broker), watch=watch, as_json=as_json)
        return
    found = find(run, broker)
    if watch:
        while found.watch is None:
            click.echo(json.dumps(_of_uploads(found.uploads)) if as_json else upload_status.line(found.uploads[0]))
            time.sleep(WATCH_S)
            found = find(run, broker)
        _follow(found.watch, as_json=as_json)
    elif as_json:
        click.echo(json.dumps(_to_json(found)))
    else:
        _tell(found)


def _follow(watch: RunMonitor | RemoteRunMonitor, *, as_json: bool) -> None:
    """Show the run until it is done or cancelled."""
    from embq.status.display import Display

    with Display(quiet=as_json) as display:
        while True:
            progress = watch.look()
            display.show(progress)
            if as_json:
                click.echo(json.dumps(progress.to_json()))
            if progress.state in ("done", "cancelled"):
                return
            time.sleep(WATCH_S)


def _to_json(found: Whereabouts) -> dict[str, Any]:
    from embq.status import upload_status

    if found.watch is None:
        return _of_uploads(found.uploads)
    told = [upload_status.to_json(one) for one in found.uploads]
    return found.watch.look().to_json() | ({"uploads": told} if told else {})


def _tell(found: Whereabouts) -> None:
    """The run on stdout, what its machines complain of, and what is still on its way."""
    from rich.console import Console

    from embq.status import fleet, upload_status
    from embq.status.display import panel

    if found.watch is not None:
        look = found.watch.look()
        Console(highlight=False).print(panel(look))
        if found.client is not None and look.state != "done":
            machines = fleet.fleet_status(found.client)
            for line in [*machines.refusals(look.model), *machines.unseen(look.run)]:
                click.echo(f"warning: {line}")
    for one in found.uploads:
        click.echo(upload_status.line(one))


def _of_uploads(uploads: list[UnderWay]) -> dict[str, Any]:
    """What is told of a run that is still on its way to the writer."""
    from embq.status.upload_status import to_json

    first = uploads[0].upload
    told = [to_json(one) for one in uploads]
    return {"schema": 1, "run": first.run, "output": first.output, "state": "arriving", "uploads": told}


def _show_everything(client: redis.Redis, *, watch: bool, as_json: bool) -> None:
    from embq.status.overview import OverviewMonitor, follow, follow_as_json

    if watch:
        follow_as_json(client) if as_json else follow(client)
        return
    look = OverviewMonitor(client).look()
    if as_json:
        click.echo(json.dumps(look.to_json()))
    else:
        look.tell()


def _connected(broker: str) -> redis.Redis:
    """The broker, where no run is named."""
    from core.broker.client import connect, reach
    from core.errors import InputError

    settings = settings_with(broker)
    if not settings.broker_url:
        raise InputError(
            "no run is named, and no broker is configured",
            next_step="name an output folder, or give --broker / EMBQ_BROKER_URL",
        )
    client = connect(settings.broker_url, password=settings.broker_password)
    reach(client, settings.broker_url)
    return client
