"""`embq export`: committed rows as plain files, or in a vector database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import json_option
from embq.app.export.targets import FOLDERS, TABLES
from embq.core.errors import UsageError
from embq.core.redaction import masked
from embq.core.service.progress_line import size_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from embq.app.export.export import ExportResult
    from embq.app.export.targets.target import CopyResult
    from embq.core.service.progress_line import ProgressLine


@click.command(
    "export",
    cls=SectionedCommand,
    epilog="Example: embq export ./out ./for-clip-retrieval --output-format npy --sorted",
)
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@click.argument("folder", metavar="DEST", type=click.Path())
@option(
    "--output-format",
    "format",
    type=click.Choice(["npy", "hdf5", "parquet", "arrow"]),
    help="Format of the files in the new folder DEST.",
)
@option(
    "--to",
    type=click.Choice([*TABLES, *FOLDERS]),
    help="Write into a LanceDB, Qdrant, Milvus or PostgreSQL (pgvector) that DEST names, a dataset folder for "
    "Hugging Face, or tables for the Embedding Projector (tsv).",
)
@option("--table", metavar="NAME", help="Table or collection of --to.  [embq]")
@option("--sorted", "order", flag_value="manifest", help="Sort rows in the order of the inputs.")
@option(
    "--dtype",
    type=click.Choice(["float32", "float16", "int8", "binary"]),
    help="Data type of stored vectors.  [that of the run]",
)
@option(
    "--int8-range",
    type=float,
    metavar="X",
    help="Range of int8: -X to X in equal steps; larger values are clipped.  [1]",
)
@option(
    "--rows-per-file",
    type=click.IntRange(min=1),
    help="Rows of each file but the last; held in memory.  [128 MB of vectors]",
)
@option("--columns", metavar="LIST", help="Columns to keep besides id, key and vectors, separated by commas.  [all]")
@option(
    "--ids",
    "id_file",
    type=click.Path(),
    metavar="FILE",
    help="Export only the rows with the ids in FILE, one per line, as the map and a search give them.",
)
@option(
    "--without",
    type=click.Path(),
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
    to: str | None,
    table: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Write the committed rows of OUT as files in DEST, or into a vector database.

    --output-format: DEST is a new or empty folder, which appears when all files are written, with a summary in
    export.json. Rows are ordered by id, or with --sorted in the order of the inputs.

    --to: DEST is a URL, folder or file of the target. Rows that it has are left alone, so a killed export goes on, and
    a later one adds new rows; at the end the ids of the target are compared with those of the run.

    Rows keep their ids. Of an unfinished run, the committed rows are exported. For files of faiss and of
    clip-retrieval's back end: embq index export.
    """
    if (options["format"] is None) == (to is None):
        raise UsageError(
            "either --output-format or --to is needed", next_step="name a file format, or a target such as --to lance"
        )
    from pathlib import Path

    from embq.app.cli.id_file import read_ids
    from embq.app.export.export import ExportOptions, export
    from embq.app.export.targets import target_of
    from embq.app.export.targets.target import copy_rows
    from embq.app.output.output import Output
    from embq.core.run.run_info import load_run
    from embq.core.service.progress_line import ProgressLine
    from embq.core.storage.paths import place, refuse_unnameable

    kept_columns = None if columns is None else [name.strip() for name in columns.split(",") if name.strip()]
    if options["int8_range"] is not None and options["dtype"] != "int8":
        raise UsageError("--int8-range needs --dtype int8", next_step="add it, or leave --int8-range out")
    left_out = None
    if without is not None:
        from embq.core.formats.duplicate_groups import duplicate_ids

        left_out = duplicate_ids(without, run=load_run(place(output)).run)
    ids = None if id_file is None else read_ids(id_file)
    given = {name: value for name, value in options.items() if value is not None}
    refuse_unnameable(folder)
    with ProgressLine() as line:
        show = _shown_on(line)
        done: ExportResult | CopyResult
        if to is None:
            if table is not None:
                raise UsageError("--table needs --to", next_step="leave it out, or choose a target with --to")
            export_options = ExportOptions(columns=kept_columns, ids=ids, without=left_out, **given)
            done = export(place(output), Path(folder), export_options, on_rows=show)
        else:
            _refuse_for_target(to, table, given)
            target = target_of(to, folder, "embq" if table is None else table)
            done = copy_rows(Output(output), target, columns=kept_columns, ids=ids, without=left_out, on_rows=show)
    if as_json:
        import json
        from dataclasses import asdict

        click.echo(json.dumps({"schema": 1, "folder": masked(folder), **asdict(done)}))
    else:
        _print_account(folder, done)
    return 0


def _shown_on(line: ProgressLine) -> Callable[[int, int], None]:
    """Shows rows, of how many, and the time left at the rate since the first call."""
    import time

    from embq.core.service.progress_line import duration

    first: tuple[float, int] | None = None

    def show(rows: int, total: int) -> None:
        nonlocal first
        now = time.monotonic()
        began, first_rows = first = first or (now, rows)
        remaining = ""
        if first_rows < rows < total:
            remaining = f", about {duration((total - rows) * (now - began) / (rows - first_rows))} left"
        line.show(f"{rows:,} of {total:,} rows{remaining}")

    return show


def _refuse_for_target(to: str, table: str | None, given: dict[str, Any]) -> None:
    if table is not None and to in FOLDERS:
        raise UsageError(f"--to {to} writes a folder, which has no --table", next_step="leave --table out")
    if given:
        named = ", ".join("--sorted" if name == "order" else f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(
            f"{named}: --to has rows in the order of ids, with the vectors of the run",
            next_step="leave it out, or export files with --output-format",
        )


def _print_account(folder: str, done: ExportResult | CopyResult) -> None:
    from embq.app.export.targets.target import CopyResult

    if done.state == "incomplete":
        click.echo("note: the run is not complete; the rows committed so far were exported", err=True)
    if isinstance(done, CopyResult):
        existing = f", {done.rows - done.written:,} of them were there" if done.written < done.rows else ""
        click.echo(f"{done.rows:,} rows in {done.target}, each id once{existing}")
        return
    click.echo(f"{done.rows:,} rows in {len(done.files):,} files ({size_text(done.bytes)}), {done.dtype}: {folder}")
