"""`embq search`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from core.errors import UsageError
from embq.cli.options import json_option

if TYPE_CHECKING:
    from embq.searching.query import Answer, Question

FULL_WIDTH = 160
"""Characters of a line where no terminal says how wide it is."""

KEY_WIDTH, SOURCE_WIDTH = 44, 28
"""Most characters of a key and of a source."""


@click.command(
    "search",
    epilog='Examples: embq search ./out "a red bicycle" -k 5 | '
    'embq search http://localhost:1234 "a red bicycle" --index notes',
)
@click.argument("index", metavar="INDEX", type=click.Path())
@click.argument("text", metavar="[TEXT]", required=False)
@click.option("--image", metavar="FILE", type=click.Path(), default=None, help="Ask by an image.")
@click.option(
    "--vector", metavar="FILE", type=click.Path(), default=None, help="Ask by a vector: .npy, or a JSON list."
)
@click.option("--id", type=int, metavar="N", default=None, help="Ask for what is like a row, by its id.")
@click.option("-k", "k", type=click.IntRange(min=1), default=10, show_default=True, metavar="N", help="Results.")
@click.option("--index", "name", default=None, metavar="NAME", help="Which index of a server, where it serves several.")
@click.option(
    "--output", default=None, metavar="NAME", help="Which of the vectors of a run, where several are indexed."
)
@click.option(
    "--prompt", default=None, metavar="NAME", help="Prompt of the model before TEXT.  [query, where rows have document]"
)
@click.option("--prompt-text", default=None, metavar="TEXT", help="The prompt itself; '' for none.")
@click.option(
    "--model",
    "-m",
    default=None,
    metavar="SPEC",
    help="Where the model is, if not where the run had it; it must be the same model.",
)
@click.option(
    "--nprobe",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Lists of the index to look at.  [as it was tuned]",
)
@click.option("--no-refine", is_flag=True, help="Leave the best rows as their codes rank them.")
@json_option
def command(
    index: str,
    image: str | None,
    vector: str | None,
    name: str | None,
    output: str | None,
    no_refine: bool,
    as_json: bool,
    **asked: Any,
) -> int:
    """Ask an index for the rows that are nearest to a text, an image, a vector or another row.

    INDEX is the folder of an index, of one of its versions, the output folder of a run, or the URL of an `embq serve`,
    which needs nothing but embq itself here. Texts and images are embedded by the model that made the rows; with
    another model nothing is answered.
    """
    from pathlib import Path

    from embq.searching.query import Question

    question = Question(
        image=None if image is None else Path(image),
        vector=None if vector is None else Path(vector),
        refine=False if no_refine else None,
        **asked,
    )
    question.check()
    answer = _answer(index, question, name, output)
    if as_json:
        import json

        results = [result.describe() for result in answer.results]
        click.echo(json.dumps({"schema": 1, "results": results, "timing": answer.timing}))
    else:
        _print_table(answer)
    return 0


def _answer(index: str, question: Question, name: str | None, output: str | None) -> Answer:
    from embq.searching.remote import ask_server, is_server, looks_like_server

    if is_server(index):
        return ask_server(index, question, name=name, output=output, on_load=_tell)
    if looks_like_server(index):
        raise UsageError(f"there is no folder {index}", next_step=f"a server is a URL: embq search http://{index}")
    if name is not None:
        raise UsageError(
            "--index names an index of a server, and INDEX is a folder", next_step="give the URL of the server as INDEX"
        )
    from pathlib import Path

    from core.settings import compute_in_one_thread

    compute_in_one_thread()
    from embq.searching.local import ask

    return ask(Path(index), question, output=output, on_load=_tell)


def _tell(spec: str) -> None:
    click.echo(f"loading {spec} ...", err=True)


def _print_table(answer: Answer) -> None:
    import shutil

    results = answer.results
    if not results:
        click.echo("nothing was found", err=True)
        return
    width = shutil.get_terminal_size((FULL_WIDTH, 24)).columns
    keys = [_shortened(result.key, KEY_WIDTH) for result in results]
    sources = [_shortened(result.source or "", SOURCE_WIDTH, keep_end=True) for result in results]
    key_width, source_width = max(3, *map(len, keys)), max(map(len, sources))
    caption_width = max(20, width - 4 - 9 - key_width - source_width - 6)
    for result, key, source in zip(results, keys, sources, strict=True):
        caption = _shortened(result.caption or "", caption_width)
        line = f"{result.rank:>4} {result.score:>8.4f}  {key:<{key_width}}  {caption:<{caption_width}}  {source}"
        click.echo(line.rstrip())


def _shortened(text: str, width: int, *, keep_end: bool = False) -> str:
    """At most so many characters, in one line."""
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    if len(line) <= width:
        return line
    return f"…{line[1 - width :]}" if keep_end else f"{line[: width - 1]}…"
