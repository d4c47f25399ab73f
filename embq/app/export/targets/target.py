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

from embq.app.export.export import ALWAYS, check_ids
from embq.app.output.output import Output
from embq.core.errors import ConfigError, EmbqError, InputError, OutputError
from embq.core.redaction import HIDDEN, masked, printable
from embq.core.rows.results import ARROW_DTYPES
from embq.core.settings import TARGET_SECRETS, target_secret

PRIVATE = ("ordinal", "unit_id")
"""Columns that are exported only where they are named: they mean nothing outside of the run."""

OTHER_TOOL = "?"
"""Stands for the run of a table that embq has not made."""


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
    def others(self) -> list[pa.Field]:
        """The columns beside the id and the vectors."""
        return [field for field in self.schema if field.name != "id" and field.name not in self.dims]


class Target(Protocol):
    """What receives the rows.

    Attributes:
        name: destination and table, for messages.
        batch_rows: most rows of a `write`.
        errors: exceptions of the client library that mean a failed request.
    """

    @property
    def name(self) -> str: ...

    @property
    def batch_rows(self) -> int: ...

    @property
    def errors(self) -> tuple[type[BaseException], ...]: ...

    def open(self, rows: TargetRows) -> str | None:
        """Create the table where there is none; gives the run whose rows it holds, `OTHER_TOOL`, or None for no rows.

        Raises InputError where the table has other columns.
        """
        ...

    def ids(self) -> Iterator[np.ndarray]:
        """The ids of all rows that the target holds, int64, in any order."""
        ...

    def write(self, table: pa.Table) -> None:
        """Store rows durably; a row whose id is there replaces it, or is left out."""
        ...

    def finish(self) -> None:
        """Write what stands behind all rows."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A finished export into a target.

    Attributes:
        rows: that the target holds; their ids were compared with those of the run.
        written: by this call; the others were there.
        state: "complete" where every unit of the run was committed, else "incomplete".
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

    Ids never change, so a row that is there is the right one: the same call goes on behind one that was killed. Holds
    two bytes per row of the run, and one batch.

    Args:
        columns: to keep beside `ALWAYS` and the vectors; None for all but `PRIVATE`.
        ids, without: as in `embq.app.export.export.ExportOptions`.
        on_rows: called with (rows that the target has, all rows) after each batch.

    Raises InputError `empty_input` and `no_such_id`; `other_rows` where the target holds rows that are not exported,
    `other_columns` where it has another form; OutputError `target_failed` where it refuses or does not answer, and
    `target_differs` where it does not hold each row once at the end.
    """
    wanted, rows = _wanted(output, ids, without), _rows_of(output, columns)
    with closing(target), _translated(target):
        holder = target.open(rows)
        if holder is not None and holder != rows.run:
            held = "rows of another tool" if holder == OTHER_TOOL else f"rows of the run {holder[:500]}"
            raise _other_rows(target, held)
        present = np.zeros(len(wanted), np.bool_)
        for block in _ids(target, wanted):
            present[block] = True
        total, done = int(wanted.sum()), int(present.sum())
        before = done
        for table in _missing(output, rows, wanted & ~present, target.batch_rows):
            target.write(table)
            done += table.num_rows
            if on_rows is not None:
                on_rows(done, total)
        _prove(target, wanted)
        target.finish()
    state = "complete" if output.complete else "incomplete"
    return CopyResult(rows.run, rows.model, masked(target.name), total, done - before, state)


def _wanted(output: Output, ids: np.ndarray | None, without: np.ndarray | None) -> np.ndarray:
    """Whether each row of the run is exported: bool (rows,)."""
    if not len(output):
        raise InputError(f"{output.root} holds no committed rows", next_step="run it first", code="empty_input")
    if ids is not None:
        check_ids(ids, len(output))
    wanted = np.full(len(output), ids is None)
    for numbers, value in ((ids, True), (without, False)):
        if numbers is not None:
            wanted[numbers[numbers < len(wanted)]] = value
    return wanted


def _rows_of(output: Output, columns: Sequence[str] | None) -> TargetRows:
    schema, item = output.schema, ARROW_DTYPES["float16" if output.dtype == "float16" else "float32"]
    if absent := [name for name in columns or () if name not in schema.names]:
        known = ", ".join(schema.names)
        raise InputError(f"rows have no column {', '.join(absent)}", next_step=f"they have {known}", code="no_column")
    dims = output.dims
    fields = []
    for field in schema:
        kept = field.name not in PRIVATE if columns is None else field.name in (*ALWAYS, *columns)
        if field.name in dims:
            fields.append(pa.field(field.name, pa.list_(item, dims[field.name])))
        elif kept:
            fields.append(pa.field(field.name, _plain(field.type)))
    return TargetRows(
        run=output.run,
        model=output.model,
        schema=pa.schema(fields),
        dims=dims,
        json=output.json_columns & {field.name for field in fields},
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _missing(output: Output, rows: TargetRows, missing: np.ndarray, most: int) -> Iterator[pa.Table]:
    """The rows whose place in `missing` is True, at most so many at a time; parts without one are not read."""
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


def _ids(target: Target, wanted: np.ndarray) -> Iterator[np.ndarray]:
    """The ids that the target holds; InputError where one is not exported, or there are over twice as many."""
    left = int(wanted.sum())
    for ids in target.ids():
        known = (ids >= 0) & (ids < len(wanted))
        known[known] = wanted[ids[known]]
        if not known.all():
            raise _other_rows(target, f"rows that are not exported, such as the one with id {ids[~known][0]}")
        left -= len(ids)
        if left < -len(wanted):  # a server may give the same page without end
            raise _other_rows(target, "more rows than are exported")
        yield ids


def _other_rows(target: Target, held: str) -> InputError:
    return InputError(
        f"{target.name} holds {held}",
        next_step="export into another table or folder, or delete this one first",
        code="other_rows",
    )


def _prove(target: Target, wanted: np.ndarray) -> None:
    seen = np.zeros(len(wanted), np.bool_)
    twice = 0
    for block in _ids(target, wanted):
        kinds = np.unique(block)
        twice += len(block) - len(kinds) + int(seen[kinds].sum())
        seen[kinds] = True
    lost = int(wanted.sum()) - int(seen.sum())
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
    """The error for a target that refused a request, or did not answer."""
    message = str(error)
    for secret in filter(None, map(target_secret, TARGET_SECRETS)):  # a server or a proxy may repeat what it was sent
        message = message.replace(secret, HIDDEN)
    message = printable(masked(message).strip())[:500] or type(error).__name__
    return OutputError(
        f"{name}: {message}",
        next_step="repeat the command when the cause is mended: it goes on where it stopped",
        code="target_failed",
    )


def client_library(module: str, extra: str) -> Any:
    """Import the client library of a target; ConfigError where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--to {extra} needs the package {module.partition('.')[0]}", next_step=f"pip install 'embq[{extra}]'"
        ) from error


def json_value(text: str | None) -> Any:
    """A JSON text as a value that every client can send: without NUL, NaN and halves of surrogate pairs."""
    return None if text is None else _sendable(json.loads(text, parse_constant=lambda _: None))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return sendable_text(value)
    if isinstance(value, dict):
        return {sendable_text(name): _sendable(one) for name, one in value.items()}
    return [_sendable(one) for one in value] if isinstance(value, list) else value


def sendable_text(text: str) -> str:
    """The text with U+FFFD in place of NUL, which PostgreSQL refuses, and of halves of surrogate pairs."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def records(table: pa.Table, rows: TargetRows, *, json_as_text: bool = False) -> list[dict[str, Any]]:
    """The columns beside id and vectors as a dict per row: JSON parsed, or as its text; NaN as None."""
    found: list[dict[str, Any]] = table.select([field.name for field in rows.others]).to_pylist()
    for record in found:
        for name, value in record.items():
            if name in rows.json:
                parsed = json_value(value)
                record[name] = json.dumps(parsed) if json_as_text and value is not None else parsed
            elif isinstance(value, str):
                record[name] = sendable_text(value)
            elif value != value:  # NaN: JSON has none
                record[name] = None
    return found


def check_columns(name: str, held: Sequence[str], rows: TargetRows) -> None:
    """Raise InputError `other_columns` where a table that exists has not the columns of the export."""
    if sorted(held) != sorted(rows.schema.names):
        raise other_form(name, f"the columns {', '.join(sorted(held))}", ", ".join(sorted(rows.schema.names)))


def other_form(name: str, held: str, wanted: str) -> InputError:
    """The error for a table that exists in another form."""
    return InputError(
        f"{name} exists with {held[:500]}; the export has {wanted}",
        next_step="choose another --table, or the --columns that it was made with",
        code="other_columns",
    )
