"""Writes the committed rows of a run as plain files in a new folder, with the stores that write parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from embq.app.export.row_order import Places, sorted_tables
from embq.core.errors import InputError, UsageError
from embq.core.formats.base import PartName, vectors
from embq.core.formats.part import Cursor, check_writable, join_parts, opened, write_part
from embq.core.rows.results import ARROW_DTYPES
from embq.core.rows.spec import FORMATS, INT8_RANGE, RowSpec
from embq.core.rows.vectors import restored, stored
from embq.core.run.commit_log import CommitLog, LogState
from embq.core.run.commits import CommittedFile
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.reader import part_tables
from embq.core.run.run_info import RunInfo, load_run
from embq.core.storage.durable import publish, write_new, writing
from embq.core.storage.new_folder import new_folder
from embq.core.storage.paths import Place

FILE_BYTES = 128 * 1024 * 1024
"""Default bytes of vectors in one file, and of rows in memory while they are sorted."""

MOST_ROWS = 1_000_000
"""Default upper bound of the rows of one file."""

ACCOUNT = "export.json"
"""File with the `ExportResult`."""

ALWAYS = ("id", "key")
"""Columns that are always exported, with the vectors."""

Order = Literal["committed", "manifest"]
"""By id, or by unit and ordinal. The latter is the same for every run of the same input, except for the ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of `embq export`.

    Attributes:
        format: of the files, one of `embq.core.rows.spec.FORMATS`.
        order: of the rows.
        dtype: of stored vectors; "" for that of the run.
        int8_range: if the run stores floats and `dtype` is int8: the number that is stored as 127; None for
            the 1 that suits vectors of length 1.
        rows_per_file: most rows of a file; 0 for as many as `FILE_BYTES` hold.
        columns: names of the columns to keep beside `ALWAYS` and the vectors; None for all.
        ids: int64 (n,), ascending: ids of the rows to export; None for all.
        without: the same of the rows to leave out; None for no row.
    """

    format: str
    order: Order = "committed"
    dtype: str = ""
    int8_range: float | None = None
    rows_per_file: int = 0
    columns: Sequence[str] | None = None
    ids: np.ndarray | None = None
    without: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """A finished export.

    Attributes:
        records: commit records whose rows are included; a later export may have more.
        state: "complete" if every unit of the run was committed, else "incomplete".
        ids: "committed": a row has the id that it has in the run. They count from 0 in the order of commits.
        columns: of a row, in order.
        files: path below the folder, rows, bytes and sha256 of each.
    """

    run: str
    model: str
    fingerprint: str
    format: str
    order: Order
    dtype: str
    rows: int
    bytes: int
    records: int
    state: str
    ids: str
    columns: tuple[str, ...]
    files: tuple[dict[str, Any], ...]


def export(
    root: Place, folder: Path, options: ExportOptions, *, on_rows: Callable[[int, int], None] | None = None
) -> ExportResult:
    """Write all committed rows as files in a new folder.

    Holds the rows of one file in memory, and with order "manifest" as much again for sorting.

    Args:
        on_rows: called with (rows written, all rows) after each file.

    Raises InputError if `folder` is in use, the run holds no rows, there is no row with one of `options.ids`, or the
    options do not fit the run; OutputError if the run cannot be read, or the folder not be written. The folder is
    removed then.
    """
    info = load_run(root)
    _refuse_inside(root, folder)
    state, places = _committed(root, info, Manifest(Layout(root)))
    check_rows(root, state.rows, options.ids)
    if options.ids is not None:
        places = places.only_parts_with(options.ids)
    rows = wanted_rows(info.rows, options.dtype or info.rows.dtype, options.int8_range)
    _refuse_npy(options.format, rows.dtype)
    with opened(root, places.parts[0]) as part:
        schema = part.schema
    if rows.dtype == "binary" != info.rows.dtype:
        for vector_type in _vector_types(schema):
            rows.check(info.model.spec, vector_type.list_size)
    columns = _columns(schema, options.columns)
    per_file = options.rows_per_file or min(MOST_ROWS, _rows_within(FILE_BYTES, schema))
    as_run = replace(
        info,
        format=options.format,
        rows=replace(rows, columns=tuple(column for column in rows.columns if column.name in columns)),
    )
    notes = replace(info, rows=rows).notes(fingerprint=state.fingerprint, version=info.version)
    window_rows = _rows_within(FILE_BYTES, schema)
    with closing(_tables(root, places, options.order, window_rows)) as tables, new_folder(folder) as unfinished:
        chosen = (converted(_chosen(table, options).select(columns), info.rows, rows) for table in tables)
        total = state.rows if options.ids is None else len(options.ids)
        files: list[CommittedFile] = []
        for written in _files(chosen, Layout(unfinished), as_run, per_file, notes):
            files += written
            if on_rows is not None:
                on_rows(sum(file.rows for file in files if file.kind == "rows"), total)
        result = _account(as_run, state, options.order, columns, files)
        text = json.dumps({"schema": 1, **asdict(result)}, indent=1).encode() + b"\n"
        write_new(unfinished / ACCOUNT, text, temporary=unfinished / f"_{ACCOUNT}")
    return result


def check_rows(root: Place, rows: int, ids: np.ndarray | None) -> None:
    """Raise InputError if a run with this many rows has none to export: none at all, or not those with the ids."""
    if not rows:
        raise InputError(f"{root} holds no committed rows", next_step="run it first", code="empty_input")
    if ids is not None and (unknown := len(ids) - int(np.searchsorted(ids, rows))):
        raise InputError(
            f"{unknown:,} of the {len(ids):,} ids are of no committed row, such as {ids[-1]}",
            next_step=f"the run holds {rows:,} rows, whose ids begin with 0: give ids of this run",
            code="no_such_id",
        )


def _chosen(table: pa.Table, options: ExportOptions) -> pa.Table:
    """The rows of a table that are to be exported."""
    if options.ids is not None:
        table = table.filter(pa.array(np.isin(table["id"].to_numpy(), options.ids)))
    if options.without is not None:
        table = table.filter(pa.array(~np.isin(table["id"].to_numpy(), options.without)))
    return table


def _committed(root: Place, info: RunInfo, manifest: Manifest) -> tuple[LogState, Places]:
    """The state of the log, and the places of all rows."""
    log, state, places = CommitLog(Layout(root)), LogState(units=info.units), Places()
    for commit in log.read():
        log.advance(state, commit)
        if state.units > len(manifest):
            manifest = Manifest(Layout(root))
        places.add(commit, manifest)
    log.ends_with(state.n)
    return state, places


def _account(
    as_run: RunInfo, state: LogState, order: Order, columns: Sequence[str], files: Sequence[CommittedFile]
) -> ExportResult:
    """The result of an export; `as_run` is the run with the format and the rows of the export."""
    return ExportResult(
        run=as_run.run,
        model=as_run.model.spec,
        fingerprint=state.fingerprint,
        format=as_run.format,
        order=order,
        dtype=as_run.rows.dtype,
        rows=sum(file.rows for file in files if file.kind == "rows"),
        bytes=sum(file.bytes for file in files),
        records=state.n,
        state="complete" if state.count == as_run.units else "incomplete",
        ids="committed",
        columns=tuple(columns),
        files=tuple({name: getattr(f, name) for name in ("path", "rows", "bytes", "sha256")} for f in files),
    )


def _tables(root: Place, places: Places, order: Order, window_rows: int) -> Generator[pa.Table, None, None]:
    if order == "manifest":
        yield from sorted_tables(root, places, window_rows=window_rows)
    else:
        for files in places.parts:
            yield from part_tables(root, files)


def _files(
    tables: Iterator[pa.Table], layout: Layout, info: RunInfo, per_file: int, notes: dict[str, str]
) -> Iterator[list[CommittedFile]]:
    """Write the rows as files numbered from 0; yields the files of each number."""
    check_writable(info)
    cursor, number = Cursor(tables), 0
    of_rows: list[CommittedFile] = []
    layout.temporary.mkdir()
    while (table := cursor.read(per_file)).num_rows:
        name = PartName(number=number, first_id=table["id"][0].as_py(), epoch=0, layout=layout)
        written = write_part(info, table, name, notes)
        for draft in written:
            path = layout.root / draft.file.path
            with writing(path):
                path.parent.mkdir(exist_ok=True)
                publish(draft.temporary, path)
        del table  # before the next one is read
        of_rows += (draft.file for draft in written if draft.file.kind == "rows")
        yield [draft.file for draft in written]
        number += 1
    join_parts(info, layout, of_rows)
    layout.temporary.rmdir()


def _columns(schema: pa.Schema, columns: Sequence[str] | None) -> list[str]:
    """The columns to keep, in the order of the run; InputError if one does not exist."""
    if columns is None:
        return list(schema.names)
    check_columns_exist(columns, schema)
    vector_types = _vector_types(schema)
    return [field.name for field in schema if field.name in (*ALWAYS, *columns) or field.type in vector_types]


def check_columns_exist(columns: Sequence[str], schema: pa.Schema) -> None:
    """Raise InputError if the rows of a run lack one of the columns."""
    if absent := [name for name in columns if name not in schema.names]:
        raise InputError(
            f"rows have no column {', '.join(absent)}",
            next_step=f"they have {', '.join(schema.names)}",
            code="no_column",
        )


def _rows_within(size: int, schema: pa.Schema) -> int:
    """Rows that have `size` bytes of vectors; by the columns alone, so that equal runs give equal files."""
    row_bytes: int = sum(kind.list_size * kind.value_type.bit_width // 8 for kind in _vector_types(schema))
    return max(1, size // max(1, row_bytes))


def _vector_types(schema: pa.Schema) -> list[pa.FixedSizeListType]:
    return [field.type for field in schema if pa.types.is_fixed_size_list(field.type)]


def _refuse_npy(format: str, dtype: str) -> None:
    assert format in FORMATS
    if format == "npy" and not dtype.startswith("float"):
        raise InputError(
            f"readers of npy files accept floats only, and the rows would hold {dtype}",
            next_step="use --dtype float16, or another --output-format"
            if dtype == "int8"
            else "use another --output-format",
            code="format_dtype",
        )


def _refuse_inside(root: Place, folder: Path) -> None:
    if isinstance(root, Path) and folder.resolve().is_relative_to(root.resolve()):
        raise InputError(f"{folder} is inside the output folder", next_step="choose a folder outside of it")


# --- conversion of vectors ---

SMALLER = {
    "float32": ("float32", "float16", "int8", "binary"),
    "float16": ("float16", "int8", "binary"),
    "int8": ("float32", "float16", "int8", "binary"),
    "binary": ("binary",),
}
"""dtype of a run -> dtypes of its exports: none finer, but int8 can be converted back to floats."""


def wanted_rows(rows: RowSpec, dtype: str, int8_range: float | None) -> RowSpec:
    """The row spec of an export with `dtype`; InputError if `rows` cannot be converted to it."""
    if dtype == rows.dtype:
        return rows
    if dtype not in SMALLER[rows.dtype]:
        possible = ", ".join(SMALLER[rows.dtype])
        raise InputError(
            f"the run stores {rows.dtype}, which cannot be converted to {dtype}",
            next_step=f"use --dtype {possible}" if possible != rows.dtype else "leave out --dtype",
            code="dtype_lost",
        )
    # Vectors are truncated already. Floats keep their length, int8 has its own rule, and binary has signs only.
    normalize = rows.normalize if dtype == "int8" else None
    if dtype == "int8" and normalize is False and int8_range is None:
        raise UsageError(
            "--dtype int8 needs --int8-range for vectors that are not of length 1",
            next_step="add --int8-range with the largest number that they hold",
        )
    range_ = INT8_RANGE if int8_range is None else int8_range
    return replace(rows, dtype=dtype, truncate_dim=0, normalize=normalize, int8_range=range_)


def converted(table: pa.Table, source: RowSpec, target: RowSpec) -> pa.Table:
    """The table with its vectors converted to `target`; InputError if one of them cannot be."""
    if source.dtype == target.dtype:
        return table
    for at, field in enumerate(table.schema):
        if not pa.types.is_fixed_size_list(field.type):
            continue
        values, faults = stored(restored(vectors(table, field.name), source), target)
        if faults:
            row = min(faults)
            raise InputError(
                f"row {table['id'][row].as_py()} ({table['key'][row].as_py()!r}) cannot be stored as {target.dtype}: "
                f"{faults[row].message}",
                next_step="export with the run's own --dtype",
                code=faults[row].code,
            )
        type_ = pa.list_(ARROW_DTYPES[target.dtype], values.shape[1])
        flat = pa.array(values.reshape(-1), type_.value_type)
        column = pa.FixedSizeListArray.from_arrays(flat, type=type_)
        table = table.set_column(at, pa.field(field.name, type_, field.nullable), column)
    return table
