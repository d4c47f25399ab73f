"""`embq serve`."""

from __future__ import annotations

import click

DEFAULT_PORT = 1234
"""clip-retrieval's back end listens there, so clients' addresses stay as they are."""


@click.command("serve", epilog="Examples: embq serve ./out | embq serve --follow /data/runs")
@click.argument("indices", metavar="INDEX...", nargs=-1, type=click.Path(file_okay=False))
@click.option(
    "--name", "names", multiple=True, metavar="NAME=INDEX", help="Serve an index under this name; repeatable."
)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    metavar="N",
    help="0 finds a free one.",
)
@click.option("--follow", is_flag=True, help="Serve every index below INDEX, and those that are published there later.")
@click.option("--no-model", is_flag=True, help="Load no model: only vectors are answered, and rows by their ids.")
@click.option(
    "--memory",
    type=click.Choice(["ram", "mmap"]),
    default="ram",
    show_default=True,
    help="Read the index into memory, or map its files and leave it to the system what of them stays there.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Threads of one search."
)
@click.option(
    "--fetch-image-urls", is_flag=True, help="Let queries name an image by its URL: https, of public hosts only."
)
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let pages of https://example.org ask, or of any with *; repeatable.",
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Answer to this name too, behind a proxy that passes it on; repeatable.",
)
def command(
    indices: tuple[str, ...],
    names: tuple[str, ...],
    follow: bool,
    host: str,
    port: int,
    no_model: bool,
    memory: str,
    threads: int,
    fetch_image_urls: bool,
    origins: tuple[str, ...],
    hosts: tuple[str, ...],
) -> None:
    """Answer searches over HTTP as clip-retrieval's back end does, until stopped.

    INDEX is the folder of an index, or of a run with its indices, which have the run's name then. A new version of an
    index is taken up when it is published. With --follow INDEX is any folder: what is published below it is served
    under the path of its run, also what comes later; it may be empty.

    The server knows no users: whoever reaches it may ask. It listens on this machine alone unless --host says
    otherwise.
    """
    from core.service.log import Events, configure, is_json
    from embq.serving.middleware import DoorRules, is_loopback
    from embq.serving.server import bound, serve
    from embq.serving.startup import opened_service

    alone = is_loopback(host)
    rules = DoorRules(hosts=frozenset({host, *hosts}) if alone or hosts else frozenset(), origins=frozenset(origins))
    configure()
    # First, so that a port that is taken is said before an index is read for minutes.
    with bound(host, port) as listener:
        app = opened_service(
            indices,
            names,
            follow=follow,
            memory=memory,
            threads=threads,
            with_models=not no_model,
            image_urls=fetch_image_urls,
            rules=rules,
        )
        if is_json():
            log = Events("serve")
            if not alone:
                log.warning("no_password", host=host)
            serve(app, listener, announce=lambda url: log.info("listening", url=url))
            return
        if not alone:
            click.echo(f"warning: whoever reaches {host} may search: there is no password", err=True)
        serve(app, listener, announce=lambda url: click.echo(f"listening on {url}"))
