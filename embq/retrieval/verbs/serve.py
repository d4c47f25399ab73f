"""`embq serve`, `embq ui` and `embq atlas`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from embq.app.cli.precision import AUTO
from embq.app.cli.sections import GENERAL, SectionedCommand, option, section
from embq.app.cli.shared_options import broker_option, option_group, settings_with, vector_name_option
from embq.core.models import PRECISIONS

DEFAULT_PORT = 1234
"""The port of clip-retrieval's back end, so that clients keep their addresses."""

server_options = option_group(
    section("Server"),
    option(
        "--name", "names", multiple=True, metavar="NAME=INDEX", help="Name under which an index is served; repeatable."
    ),
    option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on."),
    option(
        "--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, help="Port to listen on; 0 finds a free one."
    ),
    broker_option,
    option(
        "--allow-actions",
        is_flag=True,
        help="Let browsers that come with the printed token pause, resume, cancel and retry runs, and make maps.",
    ),
    option("--no-model", is_flag=True, help="Load no model; answer queries by vector or id only."),
    option(
        "--memory",
        type=click.Choice(["ram", "mmap"]),
        default="ram",
        help="Read indexes into memory, or map their files and let the system cache them.",
    ),
    option("--threads", type=click.IntRange(min=1), default=1, help="Threads per search."),
    option("--fetch-image-urls", is_flag=True, help="Accept images by URL: https, public hosts only."),
    option(
        "--allow-origin",
        "origins",
        multiple=True,
        metavar="ORIGIN",
        help="Accept requests from pages of this origin, such as https://example.org, or of any with *; repeatable.",
    ),
    option(
        "--allow-host",
        "hosts",
        multiple=True,
        metavar="NAME",
        help="Accept this name in the Host header, beside IP addresses and names of this machine, such as that of a "
        "reverse proxy; repeatable.",
    ),
    section(GENERAL),
)
"""Options of a server of indexes and pages."""


@click.command(
    "serve",
    cls=SectionedCommand,
    epilog="Examples: embq serve ./out | embq serve --follow /data/runs | embq serve --embeddings minilm",
)
@click.argument("indices", metavar="[INDEX]...", nargs=-1, type=click.Path(file_okay=False))
@option("--follow", is_flag=True, help="Also serve every index below INDEX, new ones as they appear.")
@section("Embeddings")
@option(
    "--embeddings",
    multiple=True,
    metavar="[NAME=]SPEC",
    help="Embed texts with this model: /v1/embeddings and /embed; requests name it by NAME; repeatable.  [SPEC]",
)
@option(
    "--token-ids",
    default="",
    metavar="NAME",
    help="Accept token ids of this tokenizer of tiktoken in place of texts, as LangChain sends: cl100k_base.",
)
@option(
    "--precision",
    type=click.Choice((AUTO, *PRECISIONS)),
    default=AUTO,
    help="Compute precision of --embeddings. auto: the first of bf16, fp16 and fp32 that is fast on the device.",
)
@option(
    "--devices",
    "device",
    default="auto",
    metavar="NAME",
    help="Devices of --embeddings, one: cpu, cuda:N, or auto (the first CUDA device, else the CPU).",
)
@server_options
def command(indices: tuple[str, ...], follow: bool, **options: Any) -> None:
    """Answer searches over HTTP as clip-retrieval's back end does, until stopped.

    INDEX is the folder or the s3:// or gs:// URL of an index, or of a run with indexes, which then have the name of the
    run. A new version of an index is loaded when it is published. With --follow, INDEX is any folder, also an empty
    one: each index below it is served under the path of its run, and new ones are added as they are published.

    With --embeddings it embeds texts as well, for clients of OpenAI's API and of text-embeddings-inference; INDEX is
    not needed then.

    A browser shows the search page at the same address. The server has no users or passwords. It listens on this
    machine only, unless --host is given.
    """
    serve_pages(indices, follow=follow, announce="listening on {url}", **options)


@click.command("ui", cls=SectionedCommand, epilog="Examples: embq ui ./out | embq ui ./out --open")
@click.argument("outputs", metavar="[OUT]...", nargs=-1, type=click.Path(file_okay=False))
@option("--open", "opens", is_flag=True, help="Open the page in the browser of this machine.")
@server_options
def ui(outputs: tuple[str, ...], opens: bool, **options: Any) -> None:
    """Show runs and their indexes as web pages, until stopped: search, fleet and map.

    OUT is the output folder of a run, or any folder above such folders; without one, this folder. Indexes that are
    published below it later appear by themselves. The server is that of `embq serve --follow`.
    """
    import webbrowser

    started = webbrowser.open if opens else None
    serve_pages(
        outputs or (".",), follow=True, announce="open {url} in a browser; Ctrl-C ends it", started=started, **options
    )


def serve_pages(
    folders: tuple[str, ...],
    names: tuple[str, ...] = (),
    *,
    announce: str,
    follow: bool = False,
    embeddings: tuple[str, ...] = (),
    token_ids: str = "",
    precision: str = AUTO,
    device: str = "auto",
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    broker: str = "",
    allow_actions: bool = False,
    no_model: bool = False,
    memory: str = "ram",
    threads: int = 1,
    fetch_image_urls: bool = False,
    origins: tuple[str, ...] = (),
    hosts: tuple[str, ...] = (),
    started: Callable[[str], object] | None = None,
) -> None:
    """Serve indexes and pages until stopped; arguments as the options of `embq serve`.

    Args:
        announce: line that is printed when requests can be sent; {url} is replaced.
        started: called with the URL then.
    """
    from embq.app.services.http_server import bound, serve
    from embq.core.errors import UsageError
    from embq.core.networks import HostNames, is_loopback
    from embq.core.service.log import Events, configure, is_json
    from embq.retrieval.serving.app import application
    from embq.retrieval.serving.middleware import AccessRules
    from embq.retrieval.ui.fleet.pages import FleetPages
    from embq.retrieval.ui.fleet.sources import sources_of
    from embq.retrieval.ui.rendering import error_page
    from embq.retrieval.ui.site import Site
    from embq.retrieval.ui.thumbnails.decoder import Decoders

    if not embeddings and (precision, device, token_ids) != (AUTO, "auto", ""):
        raise UsageError(
            "--precision, --devices and --token-ids are for --embeddings", next_step="add it, or leave them out"
        )
    settings = settings_with(broker)
    fleet = FleetPages(sources_of(folders, settings.broker_url, settings.broker_password), allow_actions=allow_actions)
    local = is_loopback(host)
    names_of_host = HostNames((*hosts, *settings.allow_hosts), listens_on=host)
    rules = AccessRules(hosts=names_of_host, origins=frozenset(origins))
    configure()
    # First, so that a port in use is reported before an index is read for minutes.
    with bound(host, port) as listener:
        api: EmbeddingApi | None = None
        if embeddings:
            from embq.retrieval.serving.embeddings.api import EmbeddingApi
            from embq.retrieval.serving.embeddings.loading import load_detokenizer, load_models

            decode = load_detokenizer(token_ids) if token_ids else None
            api = EmbeddingApi(load_models(embeddings, precision=precision, device=device, settings=settings), decode)
        decoders = Decoders()
        app = application(
            folders,
            names,
            follow=follow,
            memory=memory,
            threads=threads,
            with_models=not no_model,
            image_urls=fetch_image_urls,
            rules=rules,
            try_decoding=decoders.try_decoding,
            site=partial(Site, fleet=fleet, exposed=not local or bool(hosts)),
            error_page=error_page,
            embeddings=None if api is None else api.measured_by,
        )
        log = Events("serve")
        if not local and is_json():
            log.warning("no_password", host=host)
        elif not local:
            click.echo(f"warning: anyone who can reach {host} can search and embed: there is no password", err=True)

        def announce_url(url: str) -> None:
            if is_json():
                log.info("listening", url=url)
            else:
                click.echo(announce.format(url=url))
            if fleet.token:
                click.echo(f"to act on runs, open {url}/fleet?token={fleet.token}", err=True)
            if started is not None:
                started(url)

        try:
            serve(app, listener, announce=announce_url, leave=fleet.leave)
        finally:
            decoders.close()
    if api is not None and api.broken is not None:
        raise api.broken


@click.command(
    "atlas", cls=SectionedCommand, epilog="Examples: embq atlas ./out --open | embq atlas ./out --method pca"
)
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@vector_name_option
@option(
    "--method",
    type=click.Choice(["umap", "pca"]),
    default="umap",
    help="umap: neighbours stay neighbours; pca: the two axes of the largest variance.",
)
@option(
    "--rows",
    type=click.IntRange(min=1),
    default=2_000_000,
    help="Most rows of the map, up to 2,000,000; of more, a random sample.",
)
@option("--seed", type=int, default=1234, help="Random seed for sample, clusters and UMAP.")
@option("--no-serve", is_flag=True, help="Make the map, and start no server.")
@option("--open", "opens", is_flag=True, help="Open the page in the browser of this machine.")
@option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, help="Port to listen on; 0 finds a free one.")
@option("--no-model", is_flag=True, help="Load no model: the page finds no hits of a text.")
def atlas(
    output: str,
    vector_name: str | None,
    method: str,
    rows: int,
    seed: int,
    no_serve: bool,
    opens: bool,
    port: int,
    no_model: bool,
) -> None:
    """Show the rows of the index of OUT as points in a plane, in clusters with labels from their captions.

    The map is made if it is missing, or of another version of the index or with other options, and kept beside the
    index as map.parquet. Failures have no vectors, and so no points. The page is that of `embq ui`, on this machine
    only.
    """
    import webbrowser

    from embq.core.service.progress_line import ProgressLine
    from embq.index.atlas.map_file import MapOptions, make_map, map_path
    from embq.index.index_files.version import index_path, resolve_index

    index = resolve_index(index_path(output), vector_name)
    with ProgressLine() as line:
        info, is_new = make_map(index, MapOptions(method=method, sample=rows, seed=seed), line.show)
    state = "made" if is_new else "up to date"
    click.echo(
        f"{info.rows:,} of {info.of:,} rows, {len(info.clusters)} clusters, {info.method}: {map_path(index)} ({state})"
    )
    if no_serve:
        return
    serve_pages(
        (str(index),),
        port=port,
        no_model=no_model,
        announce="open {url}/map in a browser; Ctrl-C ends it",
        started=(lambda url: webbrowser.open(f"{url}/map")) if opens else None,
    )
