"""Copies the committed rows of a run into a target, and proves that it holds each of them once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embq.app.export.export import ALWAYS, check_columns_exist, check_rows
from embq.app.output.output import Output
from embq.core.errors import EmbqError, InputError, OutputError
from embq.core.extras import missing
from embq.core.redaction import HIDDEN, masked, printable
from embq.core.rows.results import ARROW_DTYPES
from embq.core.settings import TARGET_SECRETS, target_secret

PRIVATE = ("ordinal", "unit_id")
"""Columns that are exported only if they are named: they mean nothing outside of the run."""

OTHER_TOOL = "?"
"""Stands for the run of a table that embq has not made."""

RUN = b"embq.run"
"""Key of an Arrow schema's metadata with the id of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRows:
    """The rows of an export.

    Attributes:
        run: id of the run; a target holds rows of one run.
        model: its spec.
        schema: `id` int64, `key` string, one fixed-size list of float16 or float32 per vector, and further columns of
            string, int32, int64, double and bool.
        dims: column of vectors -> length of a vector.
        json: columns with JSON texts.
    """

    run: str
    model: str
    schema: pa.Schema
    dims: dict[str, int]
    json: frozenset[str]

    @property
    def payload_fields(self) -> list[pa.Field]:
        """The columns beside the id and the vectors."""
        return [field for field in self.schema if field.name != "id" and field.name not in self.dims]


class Target(Protocol):
    """What receives the rows.

    Attributes:
        name: destination and table, for messages.
        batch_rows: most rows of a `write`.
        errors: exceptions of the client library that mean a failed request.
    """

    name: str
    batch_rows: int

    @property
    def errors(self) -> tuple[type[BaseException], ...]: ...

    def open(self, rows: TargetRows) -> str | None:
        """Create the table if there is none; returns the run whose rows it holds, `OTHER_TOOL`, or None for no rows.

        Raises InputError if the table has other columns.
        """
        ...

    def ids(self) -> Iterator[np.ndarray]:
        """The ids of all rows that the target holds, int64, in any order."""
        ...

    def write(self, table: pa.Table) -> None:
        """Store rows durably; a row whose id the target has replaces the other, or is left out."""
        ...

    def finish(self) -> None:
        """Write what follows all rows."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A finished export into a target.

    Attributes:
        rows: that the target holds; their ids were compared with those of the run.
        written: by this call; the target had the others.
        state: "complete" if every unit of the run was committed, else "incomplete".
    """

    run: str
    model: str
    target: str
    rows: int
    written: int
    state: str


def copy_rows(
    output: Output,
    target: Target,
    *,
    columns: Sequence[str] | None = None,
    ids: np.ndarray | None = None,
    without: np.ndarray | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> CopyResult:
    """Write the rows that the target does not have, then compare its ids with those of the run.

    Ids never change, so a row that the target has is the right one: the same call goes on after one that was killed.
    Holds two bytes per row of the run, and one batch.

    Args:
        columns: to keep beside `ALWAYS` and the vectors; None for all but `PRIVATE`.
        ids, without: as in `embq.app.export.export.ExportOptions`.
        on_rows: called with (rows that the target has, all rows) after each batch.

    Raises InputError `empty_input` and `no_such_id`; `other_rows` if the target holds rows that are not exported,
    `other_columns` if it has another form; OutputError `target_failed` if it refuses or does not answer, and
    `target_differs` if it does not hold each row once at the end.
    """
    selected, rows = _selection(output, ids, without), _rows_of(output, columns)
    with closing(target), _translated(target):
        holder = target.open(rows)
        if holder is not None and holder != rows.run:
            foreign = "rows of another tool" if holder == OTHER_TOOL else f"rows of the run {holder[:500]}"
            raise _other_rows(target, foreign)
        present, _ = _present(target, selected)
        total, existing = int(selected.sum()), int(present.sum())
        done = existing
        for table in _missing(output, rows, selected & ~present, target.batch_rows):
            target.write(table)
            done += table.num_rows
            if on_rows is not None:
                on_rows(done, total)
        _prove(target, selected)
        target.finish()
    state = "complete" if output.complete else "incomplete"
    return CopyResult(rows.run, rows.model, masked(target.name), total, done - existing, state)


def _selection(output: Output, ids: np.ndarray | None, without: np.ndarray | None) -> np.ndarray:
    """Whether each row of the run is exported: bool (rows,)."""
    check_rows(output.root, len(output), ids)
    selected = np.full(len(output), ids is None)
    for numbers, value in ((ids, True), (without, False)):
        if numbers is not None:
            selected[numbers[numbers < len(selected)]] = value
    return selected


def _rows_of(output: Output, columns: Sequence[str] | None) -> TargetRows:
    schema, item = output.schema, ARROW_DTYPES["float16" if output.dtype == "float16" else "float32"]
    check_columns_exist(columns or (), schema)
    dims = output.dims
    fields = []
    for field in schema:
        if field.name in dims:
            fields.append(pa.field(field.name, pa.list_(item, dims[field.name])))
        elif field.name not in PRIVATE if columns is None else field.name in (*ALWAYS, *columns):
            is_dictionary = pa.types.is_dictionary(field.type)
            fields.append(pa.field(field.name, field.type.value_type if is_dictionary else field.type))
    return TargetRows(
        run=output.run,
        model=output.model,
        schema=pa.schema(fields),
        dims=dims,
        json=output.json_columns & {field.name for field in fields},
    )


def _missing(output: Output, rows: TargetRows, missing: np.ndarray, most: int) -> Iterator[pa.Table]:
    """The rows whose place in `missing` is True, at most this many at a time; parts without one are not read."""
    start, waiting = 0, rows.schema.empty_table()
    for number, count in enumerate(output.part_rows()):
        if missing[start : start + count].any():
            for table in output.part_tables(number, rows.schema.names, 0, count):
                table = table.filter(pa.array(missing[table["id"].to_numpy()]))
                waiting = pa.concat_tables([waiting, _converted(output, table, rows)])
                while waiting.num_rows >= most:
                    yield waiting.slice(0, most)
                    waiting = waiting.slice(most)
        start += count
    if waiting.num_rows:
        yield waiting


def _converted(output: Output, table: pa.Table, rows: TargetRows) -> pa.Table:
    columns = []
    for field in rows.schema:
        if field.name in rows.dims:
            block = np.ascontiguousarray(output.restored(table, field.name), field.type.value_type.to_pandas_dtype())
            columns.append(pa.FixedSizeListArray.from_arrays(pa.array(block.reshape(-1)), type=field.type))
        else:
            columns.append(pc.cast(table[field.name], field.type))
    return pa.table(columns, schema=rows.schema)


def _present(target: Target, selected: np.ndarray) -> tuple[np.ndarray, int]:
    """(whether the target holds each row of the run: bool (rows,), rows that it holds a second time).

    Raises InputError if it holds a row that is not exported, or over twice as many.
    """
    present, count = np.zeros(len(selected), np.bool_), 0
    for ids in target.ids():
        exported = (ids >= 0) & (ids < len(selected))
        exported[exported] = selected[ids[exported]]
        if not exported.all():
            raise _other_rows(target, f"rows that are not exported, such as the one with id {ids[~exported][0]}")
        present[ids] = True
        count += len(ids)
        if count > len(selected) + int(selected.sum()):  # a server may return the same page without end
            raise _other_rows(target, "more rows than are exported")
    return present, count - int(present.sum())


def _other_rows(target: Target, foreign: str) -> InputError:
    return InputError(
        f"{target.name} holds {foreign}",
        next_step="export into another table or folder, or delete this one first",
        code="other_rows",
    )


def _prove(target: Target, selected: np.ndarray) -> None:
    present, twice = _present(target, selected)
    lost = int(selected.sum()) - int(present.sum())
    if lost or twice:
        raise OutputError(
            f"{target.name} lacks {lost:,} rows and holds {twice:,} a second time",
            next_step="delete it and export again, with nothing else that writes there"
            if twice
            else "repeat the command: it writes the rows that are missing",
            code="target_differs",
        )


@contextmanager
def _translated(target: Target) -> Iterator[None]:
    try:
        yield
    except EmbqError:
        raise
    except target.errors as error:
        raise target_failed(target.name, error) from error


def target_failed(name: str, error: BaseException) -> OutputError:
    """The error of a target that refused a request, or did not answer."""
    message = str(error)
    for secret in filter(None, map(target_secret, TARGET_SECRETS)):  # a server or a proxy may repeat what it was sent
        message = message.replace(secret, HIDDEN)
    message = printable(masked(message).strip())[:500] or type(error).__name__
    return OutputError(
        f"{name}: {message}",
        next_step="repeat the command when the cause is removed: it goes on where it stopped",
        code="target_failed",
    )


def client_library(module: str, extra: str) -> Any:
    """Import the client library of a target; ConfigError if it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise missing(package, f"--to {extra} needs the package {package}") from error


def json_value(text: str | None) -> Any:
    """A JSON text as a value that every client can send: without NUL, NaN and halves of surrogate pairs."""
    return None if text is None else _sendable(json.loads(text, parse_constant=lambda _: None))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return sendable_text(value)
    if isinstance(value, dict):
        return {sendable_text(name): _sendable(member) for name, member in value.items()}
    return [_sendable(member) for member in value] if isinstance(value, list) else value


def sendable_text(text: str) -> str:
    """The text with U+FFFD in place of NUL, which PostgreSQL refuses, and of halves of surrogate pairs."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def records(table: pa.Table, rows: TargetRows, *, json_as_text: bool = False) -> list[dict[str, Any]]:
    """The columns beside id and vectors as a dict per row: JSON parsed, or as its text; NaN as None."""
    dicts: list[dict[str, Any]] = table.select([field.name for field in rows.payload_fields]).to_pylist()
    for record in dicts:
        for name, value in record.items():
            if name in rows.json:
                parsed = json_value(value)
                record[name] = json.dumps(parsed) if json_as_text and value is not None else parsed
            elif isinstance(value, str):
                record[name] = sendable_text(value)
            elif value != value:  # NaN: JSON has none
                record[name] = None
    return dicts


def run_in(schema: pa.Schema) -> str:
    """The id of the run in the metadata of a schema, or `OTHER_TOOL`."""
    return str((schema.metadata or {}).get(RUN, OTHER_TOOL.encode()), "utf-8")


def check_columns(name: str, columns: Sequence[str], rows: TargetRows) -> None:
    """Raise InputError `other_columns` if a table that exists does not have the columns of the export."""
    if sorted(columns) != sorted(rows.schema.names):
        raise other_form(name, f"the columns {', '.join(sorted(columns))}", ", ".join(sorted(rows.schema.names)))


def other_form(name: str, actual: str, expected: str) -> InputError:
    """The error of a table that exists in another form."""
    return InputError(
        f"{name} exists with {actual[:500]}; the export has {expected}",
        next_step="choose another --table, or the --columns that it was made with",
        code="other_columns",
    )
