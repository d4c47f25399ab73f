"""`embq search`: query an index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from embq.app.cli.sections import GENERAL, SectionedCommand, option, section
from embq.app.cli.shared_options import json_option, model_option, vector_name_option
from embq.core.errors import UsageError

if TYPE_CHECKING:
    from embq.retrieval.searching.query import Answer, Query

FULL_WIDTH = 160
"""Characters of a line if the width of the terminal is not known."""

KEY_WIDTH, SOURCE_WIDTH = 44, 28
"""Most characters of a key and of a source."""


class _RowId(click.ParamType[int]):
    """The id of a row, which is a number and not its key."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; click's error for another text, with the way from a key to its row."""
        try:
            return int(value)
        except ValueError:
            why = f"{value!r} is no id: --json shows the ids of results, and --where 'key = {value}' finds a key"
            self.fail(why, param, ctx)


ROW_ID = _RowId()


@click.command(
    "search",
    cls=SectionedCommand,
    epilog='Examples: embq search ./out "a red bicycle" -k 5 | '
    'embq search http://localhost:1234 "a red bicycle" --name notes',
)
@click.argument("index", metavar="INDEX", type=click.Path())
@click.argument("words", metavar="[TEXT]", nargs=-1)
@section("Query")
@option("--image", metavar="FILE", type=click.Path(), help="Search by an image.")
@option("--vector", metavar="FILE", type=click.Path(), help="Search by a vector: .npy, or a JSON list.")
@option("--id", type=ROW_ID, help="Search for rows similar to the row with this id.")
@option("--like", type=ROW_ID, multiple=True, help="Move the query towards the row with this id; repeatable.")
@option("--unlike", type=ROW_ID, multiple=True, help="Move it away from the row with this id; repeatable.")
@option(
    "--where",
    multiple=True,
    metavar="CONDITION",
    help="Only rows that satisfy it, such as 'year >= 2020' or 'caption contains cat'; repeatable, all must hold.",
)
@option("-k", "k", type=click.IntRange(min=1), default=10, help="Number of results.")
@option("--offset", type=click.IntRange(min=0), default=0, help="Results to skip.")
@option("--name", metavar="NAME", help="Name of the index, of a server that serves several.")
@section("Model")
@vector_name_option
@option(
    "--prompt-name",
    metavar="NAME",
    help="Name of the model's prompt before TEXT.  [query, if rows have document]",
)
@option("--prompt", metavar="TEXT", help="Prompt to put before TEXT; '' for none.")
@model_option("Model that embeds the query: that of the run, at another location.  [where the run had it]")
@section("Index")
@option("--nprobe", type=click.IntRange(min=1), help="Inverted lists to search.  [tuned value]")
@option("--no-refine", is_flag=True, help="Skip re-ranking by full vectors.")
@section(GENERAL)
@json_option
def command(
    index: str,
    words: tuple[str, ...],
    image: str | None,
    vector: str | None,
    name: str | None,
    vector_name: str | None,
    where: tuple[str, ...],
    no_refine: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Find the rows of an index that are nearest to a text, an image, a vector or other rows.

    INDEX is the folder of an index or of one of its versions, the output folder of a run, the s3:// or gs:// URL of an
    index, or the URL of an `embq serve`, which needs only embq itself on this machine. Texts and images are embedded
    with the model of the rows; a different model is an error.
    """
    from pathlib import Path

    from embq.core.filter.condition import read_conditions
    from embq.retrieval.searching.query import Query

    query = Query(
        text=" ".join(words) if words else None,
        image=None if image is None else Path(image),
        vector=None if vector is None else Path(vector),
        where=read_conditions(where),
        refine=False if no_refine else None,
        **options,
    )
    query.check()
    answer = _search(index, query, name, vector_name)
    if as_json:
        import json

        results = [result.describe() for result in answer.results]
        click.echo(json.dumps({"schema": 1, "results": results, "timing": answer.timing}))
    else:
        _print_table(answer)
    return 0


def _search(index: str, query: Query, name: str | None, vector_name: str | None) -> Answer:
    from embq.retrieval.searching.remote import is_server, looks_like_server, search_remote

    if is_server(index):
        return search_remote(index, query, name=name, output=vector_name, on_load=_print_loading)
    if looks_like_server(index):
        raise UsageError(f"there is no folder {index}", next_step=f"a server is a URL: embq search http://{index}")
    if name is not None:
        raise UsageError(
            "--name selects an index of a server, and INDEX is a folder",
            next_step="give the URL of the server as INDEX",
        )
    from embq.core.settings import compute_in_one_thread

    compute_in_one_thread()
    from embq.retrieval.searching.local import search_local

    return search_local(index, query, output=vector_name, on_load=_print_loading)


def _print_loading(spec: str) -> None:
    click.echo(f"loading {spec} ...", err=True)


def _print_table(answer: Answer) -> None:
    import shutil

    from embq.retrieval.searching.query import by_document

    documents = by_document(answer.results)
    results = [chunk for chunks in documents for chunk in chunks]
    if not results:
        click.echo("no results", err=True)
        return
    width = shutil.get_terminal_size((FULL_WIDTH, 24)).columns
    indents = ["  " if number else "" for chunks in documents for number in range(len(chunks))]
    keys = [f"{indent}{_shortened(hit.key, KEY_WIDTH)}" for indent, hit in zip(indents, results, strict=True)]
    sources = [_shortened(result.source or "", SOURCE_WIDTH, keep_end=True) for result in results]
    key_width, source_width = max(3, *map(len, keys)), max(map(len, sources))
    caption_width = max(20, width - 4 - 9 - key_width - source_width - 6)
    for result, key, source in zip(results, keys, sources, strict=True):
        caption = _shortened(result.caption or "", caption_width)
        line = f"{result.rank:>4} {result.score:>8.4f}  {key:<{key_width}}  {caption:<{caption_width}}  {source}"
        click.echo(line.rstrip())


def _shortened(text: str, width: int, *, keep_end: bool = False) -> str:
    """The text in one line, shortened to `width` characters."""
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    if len(line) <= width:
        return line
    return f"…{line[1 - width :]}" if keep_end else f"{line[: width - 1]}…"
