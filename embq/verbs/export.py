"""`embq export`: committed rows as plain files for other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from core.errors import UsageError
from embq.cli.sections import SectionedCommand
from embq.cli.shared_options import json_option

if TYPE_CHECKING:
    from embq.export.export import ExportResult


@click.command(
    "export",
    cls=SectionedCommand,
    epilog="Example: embq export ./out ./for-clip-retrieval --output-format npy --sorted",
)
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option(
    "--output-format",
    "format",
    type=click.Choice(["npy", "hdf5", "parquet", "arrow"]),
    required=True,
    help="File format of the output.",
)
@click.option(
    "--sorted",
    "order",
    flag_value="manifest",
    default="committed",
    help="Sort rows in the order of the inputs.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "int8", "binary"]),
    default=None,
    help="Type of stored vectors.  [that of the run]",
)
@click.option(
    "--int8-range",
    type=float,
    default=None,
    metavar="X",
    help="Range of int8: numbers from -X to X are stored in equal steps, larger ones as X.  [1]",
)
@click.option(
    "--rows-per-file",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Rows of each file but the last; held in memory.  [128 MB of vectors]",
)
@click.option(
    "--columns",
    default=None,
    metavar="LIST",
    help="Columns to keep besides id, key and vectors, separated by commas.  [all]",
)
@click.option(
    "--ids",
    "id_file",
    type=click.Path(),
    default=None,
    metavar="FILE",
    help="Export only the rows with the ids in FILE, one per line, as the map and a search give them.",
)
@click.option(
    "--without",
    type=click.Path(),
    default=None,
    metavar="FILE",
    help="Leave out the duplicates in FILE, the groups.parquet of `embq index dedup`.",
)
@json_option
def command(
    output: str,
    folder: str,
    columns: str | None,
    id_file: str | None,
    without: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Write the committed rows of OUT as files in DIR, which is new or empty.

    Rows keep their ids and are ordered by id, or with --sorted in the order of the inputs. DIR appears when all files
    are written, with a summary in export.json. Of an unfinished run, the committed rows are exported.

    For files of faiss and of clip-retrieval's back end: embq index export.
    """
    from pathlib import Path

    from core.run.run_info import load_run
    from core.service.progress_line import ProgressLine
    from core.storage.paths import place, refuse_unnameable
    from embq.cli.id_file import read_ids
    from embq.export.export import ExportOptions, export

    kept = None if columns is None else [name.strip() for name in columns.split(",") if name.strip()]
    if options["int8_range"] is not None and options["dtype"] != "int8":
        raise UsageError("--int8-range needs --dtype int8", next_step="add it, or leave --int8-range out")
    left_out = None
    if without is not None:
        from indexer.dedup.dedup import duplicate_ids

        left_out = duplicate_ids(without, run=load_run(place(output)).run)
    wanted = ExportOptions(
        columns=kept,
        ids=None if id_file is None else read_ids(id_file),
        without=left_out,
        **{name: value for name, value in options.items() if value is not None},
    )
    refuse_unnameable(folder)
    with ProgressLine() as line:

        def show(rows: int, total: int) -> None:
            line.show(f"{rows:,} of {total:,} rows")

        done = export(place(output), Path(folder), wanted, on_rows=show)
    if as_json:
        import json
        from dataclasses import asdict

        click.echo(json.dumps({"schema": 1, "folder": folder, **asdict(done)}))
    else:
        _print_account(folder, done)
    return 0


def _print_account(folder: str, done: ExportResult) -> None:
    if done.state == "incomplete":
        click.echo("note: the run is not complete; the rows committed so far were exported", err=True)
    click.echo(f"{done.rows:,} rows in {len(done.files):,} files ({done.bytes / 1e6:,.1f} MB), {done.dtype}: {folder}")
