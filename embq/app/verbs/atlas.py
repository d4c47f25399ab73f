"""`embq atlas`: the map of an index."""

from __future__ import annotations

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import vector_name_option
from embq.app.verbs.serve import DEFAULT_PORT, serve_pages


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
def command(
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
    from embq.indexer.atlas.map_file import MapOptions, make_map, map_path
    from embq.indexer.index_files.version import index_path, resolve_index

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
