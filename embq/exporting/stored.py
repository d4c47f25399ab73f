"""What an export stores of a vector, from what the run stores of it."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from core.errors import InputError, UsageError
from core.rows.results import ARROW_DTYPES
from core.rows.spec import INT8_RANGE, RowSpec
from core.rows.vectors import restored, stored
from core.run.reader import vectors

SMALLER = {
    "float32": ("float32", "float16", "int8", "binary"),
    "float16": ("float16", "int8", "binary"),
    "int8": ("float32", "float16", "int8", "binary"),
    "binary": ("binary",),
}
"""What a run stores -> what an export of it can store: nothing finer, but for the numbers that int8 stands for."""


def wanted_rows(rows: RowSpec, dtype: str, int8_range: float | None) -> RowSpec:
    """What the rows of an export hold, where `dtype` is asked for; InputError where that cannot be made of `rows`."""
    if dtype == rows.dtype:
        return rows
    if dtype not in SMALLER[rows.dtype]:
        known = ", ".join(SMALLER[rows.dtype])
        raise InputError(
            f"the run stores {rows.dtype}, of which {dtype} cannot be made",
            next_step=f"use --dtype {known}" if known != rows.dtype else "leave out --dtype",
            code="dtype_lost",
        )
    # Vectors are cut already. Floats stay as long as they are; int8 has its own rule, and binary has only signs.
    normalize = rows.normalize if dtype == "int8" else None
    if dtype == "int8" and normalize is False and int8_range is None:
        raise UsageError(
            "--dtype int8 of vectors that are of any length needs --int8-range",
            next_step="add --int8-range with the largest number that they hold",
        )
    range_ = INT8_RANGE if int8_range is None else int8_range
    return replace(rows, dtype=dtype, truncate_dim=0, normalize=normalize, int8_range=range_)


def converted(table: pa.Table, have: RowSpec, want: RowSpec) -> pa.Table:
    """The table with its vectors as `want` stores them; InputError where one of them has no such form."""
    if have.dtype == want.dtype:
        return table
    for at, field in enumerate(table.schema):
        if not pa.types.is_fixed_size_list(field.type):
            continue
        values, faults = stored(restored(vectors(table, field.name), have), want)
        if faults:
            row = min(faults)
            raise InputError(
                f"row {table['id'][row].as_py()} ({table['key'][row].as_py()!r}) cannot be stored as {want.dtype}: "
                f"{faults[row].message}",
                next_step="export with the run's own --dtype",
                code=faults[row].code,
            )
        type_ = pa.list_(ARROW_DTYPES[want.dtype], values.shape[1])
        flat = pa.array(values.reshape(-1), type_.value_type)
        column = pa.FixedSizeListArray.from_arrays(flat, type=type_)
        table = table.set_column(at, pa.field(field.name, type_, field.nullable), column)
    return table
