"""`embq shards serve`: serve shards over HTTP."""

from __future__ import annotations

import os
from pathlib import Path

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.core.errors import InputError

DEFAULT_PORT = 8080


@click.command("serve", cls=SectionedCommand, epilog="Example: embq shards serve ./shards --host 10.0.0.5")
@click.argument("folder", metavar="DIR", type=click.Path())
@option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on.")
@option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, help="Port to listen on; 0 finds a free one.")
def command(folder: str, host: str, port: int) -> None:
    """Serve the shards in DIR and below it to other machines over HTTP, until stopped.

    Serves .tar and .parquet files, sizes.json and classes.json read-only, whole or in ranges, without listings.
    Trainings, `embq run` and webdataset read them by the expressions that are printed.

    There is no authentication: everyone who reaches the server may read. It listens on the loopback unless --host is
    given.
    """
    from embq.app.services.http_server import serve
    from embq.core.networks import Address, bound, is_loopback
    from embq.core.service.log import Events, configure, is_json
    from embq.training.shards.serving import app

    if not os.path.isdir(folder):
        raise InputError(f"{folder}: is no folder", code="source_missing", next_step="name the folder of the shards")
    configure()
    address = Address(host=host, port=port)
    taken = "stop that program, or take another port: --port 0 finds a free one"
    with bound(address, taken=taken, example="--host 127.0.0.1 is for this machine alone") as listener:
        answers = app(Path(folder), host=host)
        if is_json():
            log = Events("shards")
            if not is_loopback(host):
                log.warning("no_password", host=host)
            serve(answers, listener, announce=lambda url: log.info("listening", url=url))
            return
        if not is_loopback(host):
            click.echo(f"warning: anyone who reaches {host} can read: there is no password", err=True)
        serve(answers, listener, announce=lambda url: click.echo("\n".join(_announcement(url, folder))))


def _announcement(url: str, folder: str) -> list[str]:
    """The address of the server, and expressions for its shards."""
    from embq.training.shards.names import contract

    names = sorted(name for name in os.listdir(folder) if name.endswith(".tar") and not name.startswith("."))
    try:
        expressions = [f"  {url}/{run.expression}" for run in contract(names)]
    except InputError:  # names that no expression can say are served all the same
        expressions = []
    return [f"listening on {url}", *expressions]
