"""`embq status`: how far a run is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from core.errors import EmbqError
from embq.options import broker_option, json_option, settings_with

if TYPE_CHECKING:
    import redis

    from core.registry import RunRecord

WATCH_S = 1.0


@click.command("status", epilog="Examples: embq status out | embq status out --watch | embq status --json")
@click.argument("run", required=False, default="")
@click.option("--watch", is_flag=True, help="Go on until the run is done or cancelled.")
@broker_option
@json_option
def command(run: str, watch: bool, broker: str, as_json: bool) -> None:
    """Show how far RUN is: a run id or its output folder. Without RUN, all runs that the broker knows."""
    from rich.console import Console

    from embq.display import Display, panel
    from embq.progress import BrokerWatch, Watch

    found, client = _find(run, broker)
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
        click.echo(json.dumps(shapes[0] if run else {"schema": 1, "runs": shapes}))
        return
    if not found:
        click.echo("the broker knows no run")
    console = Console(highlight=False)
    for look in looks:
        console.print(panel(look))


def _find(run: str, broker: str) -> tuple[list[tuple[Path, RunRecord | None]], redis.Redis | None]:
    """Output folders to look at, each with what the broker knows the run as, and the broker."""
    from core.broker import connect, reach
    from core.embedded import EmbeddedServer
    from core.errors import InputError
    from core.layout import Layout
    from core.registry import registered

    settings = settings_with(broker)
    folder = Path(run).absolute() if run and Path(run).is_dir() else None
    url = settings.broker_url
    if folder is not None and not broker:
        url = EmbeddedServer.find(Layout(folder).broker) or url
    client = connect(url, password=settings.broker_password) if url else None
    if client is not None:
        reach(client, url)
    if folder is not None:
        return [(folder, None)], client
    if client is None:
        what = f"{run} is not a folder" if run else "no run is named"
        raise InputError(
            f"{what}, and no broker is configured",
            next_step="name an output folder, or give --broker / EMBQ_BROKER_URL",
        )
    records = registered(client)
    if run and run not in records:
        raise InputError(f"the broker knows no run {run}", next_step="`embq status` lists the runs that it knows")
    return [(Path(record.output), record) for record in records.values() if run in ("", record.run)], client
