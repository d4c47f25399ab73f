"""`embq status`: how far a run is."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from core.errors import EmbqError
from core.objects import Place, is_folder, place
from embq.options import broker_option, json_option, settings_with

if TYPE_CHECKING:
    import redis

    from core.registry import RunRecord
    from core.uploads import UnderWay

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
    from rich.console import Console

    from embq import arriving, machines
    from embq.display import Display, panel
    from embq.watch import BrokerWatch, Watch

    if not run:
        _show_everything(_connected(broker), watch=watch, as_json=as_json)
        return
    found, client, uploads = _find(run, broker)
    while uploads and not found and watch:
        click.echo(json.dumps(_of_uploads(uploads)) if as_json else arriving.line(uploads[0]))
        time.sleep(WATCH_S)
        found, client, uploads = _find(run, broker)
    watches: list[Watch | BrokerWatch] = []
    for root, record in found:
        try:
            watches.append(Watch(root, client))
        except EmbqError as error:
            if record is None or client is None:
                raise
            if is_folder(record.output):  # else it is another machine's, and a laptop is not expected to have it
                click.echo(f"warning: {error.message}; what the broker knows is shown", err=True)
            watches.append(BrokerWatch(record, client))
    if watch and len(watches) == 1:
        with Display(quiet=as_json) as display:
            while True:
                progress = watches[0].look()
                display.show(progress)
                if as_json:
                    click.echo(json.dumps(progress.to_json()))
                if progress.state in ("done", "cancelled"):
                    return
                time.sleep(WATCH_S)
    looks = [one.look() for one in watches]
    if as_json:
        shapes = [look.to_json() for look in looks]
        told = [arriving.to_json(one) for one in uploads]
        if shapes:
            click.echo(json.dumps({**shapes[0], "uploads": told} if told else shapes[0]))
        else:
            click.echo(json.dumps(_of_uploads(uploads)))
        return
    console = Console(highlight=False)
    for look in looks:
        console.print(panel(look))
        if client is not None and look.state != "done":
            fleet = machines.look(client)
            for line in [*fleet.refusals(look.model), *fleet.unseen(look.run)]:
                click.echo(f"warning: {line}")
    for one in uploads:
        click.echo(arriving.line(one))


def _show_everything(client: redis.Redis, *, watch: bool, as_json: bool) -> None:
    from embq.everything import Everything, follow, follow_as_json

    if watch:
        follow_as_json(client) if as_json else follow(client)
        return
    look = Everything(client).look()
    if as_json:
        click.echo(json.dumps(look.to_json()))
    else:
        look.tell()


def _connected(broker: str) -> redis.Redis:
    """The broker, where no run is named."""
    from core.broker import connect, reach
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


def _of_uploads(uploads: list[UnderWay]) -> dict[str, Any]:
    """What is told of a run that is still on its way to the writer."""
    from embq.arriving import to_json

    first = uploads[0].upload
    told = [to_json(one) for one in uploads]
    return {"schema": 1, "run": first.run, "output": first.output, "state": "arriving", "uploads": told}


def _unknown(client: redis.Redis, run: str) -> EmbqError:
    from core.errors import InputError
    from core.fleet import foreign_runs
    from core.notices import FOREIGN_NEXT

    for foreign in foreign_runs(client):
        if foreign.run == run:
            return InputError(
                f"the run {run} was announced under protocol version {foreign.protocol}, which this embq does not read",
                next_step=FOREIGN_NEXT,
            )
    return InputError(f"the broker knows no run {run}", next_step="`embq status` lists the runs that it knows")


def _find(run: str, broker: str) -> tuple[list[tuple[Place, RunRecord | None]], redis.Redis | None, list[UnderWay]]:
    """Output folders to look at, each with what the broker knows the run as; the broker; what is on its way there."""
    from core.broker import connect, reach
    from core.embedded import EmbeddedServer
    from core.errors import InputError
    from core.layout import Layout
    from core.registry import registered
    from embq.arriving import arriving, became_of

    settings = settings_with(broker)
    folder = place(run) if is_folder(run) else None
    url = settings.broker_url
    if folder is not None and not broker:
        url = EmbeddedServer.find(Layout(folder).broker) or url
    client = connect(url, password=settings.broker_password) if url else None
    if client is not None:
        reach(client, url)
    if folder is not None:
        return [(folder, None)], client, arriving(client, run, str(folder)) if client is not None else []
    if client is None:
        raise InputError(
            f"{run} is not a folder, and no broker is configured",
            next_step="name an output folder, or give --broker / EMBQ_BROKER_URL",
        )
    records, asked = registered(client), run
    if run not in records:
        if uploads := arriving(client, run):
            return [], client, uploads
        run = became_of(client, run)
        if run not in records:
            raise _unknown(client, asked)
    record = records[run]
    return [(place(record.output), record)], client, arriving(client, run, record.output)
