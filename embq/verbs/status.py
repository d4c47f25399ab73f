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
@click.option("--watch", is_flag=True, help="Go on until the run is done or cancelled.")
@broker_option
@json_option
def command(run: str, watch: bool, broker: str, as_json: bool) -> None:
    """Show how far RUN is: a run id or its output folder. Without RUN, all runs that the broker knows."""
    from rich.console import Console

    from embq import arriving
    from embq.display import Display, panel
    from embq.progress import BrokerWatch, Watch

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
        if not run:
            click.echo(json.dumps({"schema": 1, "runs": shapes, "uploads": told}))
        elif shapes:
            click.echo(json.dumps({**shapes[0], "uploads": told} if told else shapes[0]))
        else:
            click.echo(json.dumps(_of_uploads(uploads)))
        return
    if not found and not uploads:
        click.echo("the broker knows no run")
    console = Console(highlight=False)
    for look in looks:
        console.print(panel(look))
    for one in uploads:
        click.echo(arriving.line(one))


def _of_uploads(uploads: list[UnderWay]) -> dict[str, Any]:
    """What is told of a run that is still on its way to the writer."""
    from embq.arriving import to_json

    first = uploads[0].upload
    told = [to_json(one) for one in uploads]
    return {"schema": 1, "run": first.run, "output": first.output, "state": "arriving", "uploads": told}


def _find(run: str, broker: str) -> tuple[list[tuple[Place, RunRecord | None]], redis.Redis | None, list[UnderWay]]:
    """Output folders to look at, each with what the broker knows the run as; the broker; what is on its way there."""
    from core.broker import connect, reach
    from core.embedded import EmbeddedServer
    from core.errors import InputError
    from core.layout import Layout
    from core.registry import registered
    from embq.arriving import arriving, became_of

    settings = settings_with(broker)
    folder = place(run) if run and is_folder(run) else None
    url = settings.broker_url
    if folder is not None and not broker:
        url = EmbeddedServer.find(Layout(folder).broker) or url
    client = connect(url, password=settings.broker_password) if url else None
    if client is not None:
        reach(client, url)
    if folder is not None:
        return [(folder, None)], client, arriving(client, run, str(folder)) if client is not None else []
    if client is None:
        what = f"{run} is not a folder" if run else "no run is named"
        raise InputError(
            f"{what}, and no broker is configured",
            next_step="name an output folder, or give --broker / EMBQ_BROKER_URL",
        )
    records, asked = registered(client), run
    if run and run not in records:
        if uploads := arriving(client, run):
            return [], client, uploads
        run = became_of(client, run)
        if run not in records:
            raise InputError(f"the broker knows no run {asked}", next_step="`embq status` lists the runs that it knows")
    found: list[tuple[Place, RunRecord | None]] = [
        (place(record.output), record) for record in records.values() if run in ("", record.run)
    ]
    return found, client, arriving(client, run, records[run].output if run else "")
