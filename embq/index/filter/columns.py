"""Columns that a filter can be about, with the values of those that have few."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embq.index.filter.selection import columns_of
from embq.index.index_files.identity import Identity
from embq.index.index_files.lists import is_set

MOST_VALUES = 50
"""Different values up to which a column's values are listed."""

MOST_CHARACTERS = 200
"""Length of a value up to which it is offered as a choice."""

MOST_ROWS = 200_000
"""Rows that are looked at, so that it takes less than a second however large the index is."""

_PIECE_ROWS = 4_096
"""Rows that are counted together; most columns with many values show that in the first piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnValues:
    """A column of rows.

    Attributes:
        name: as conditions name it.
        type: "string", "int64", "float64" or "bool".
        values: (value, rows with it), the most frequent first; None if more than `MOST_VALUES` are different. Nulls
            are left out.
        rows: that were looked at: all, or pieces from everywhere in the index. Values that are only elsewhere are
            missing.
    """

    name: str
    type: str
    values: tuple[tuple[str | int | float | bool, int], ...] | None
    rows: int


def column_values(identity: Identity, deleted: np.ndarray | None) -> tuple[ColumnValues, ...]:
    """The columns that conditions may be about.

    Args:
        deleted: as `embq.index.filter.selection.Selections` takes it.

    Raises InputError `index_damaged` if a file cannot be read.
    """
    types = columns_of(identity)
    counts: dict[str, Counter[Any]] = {name: Counter() for name in types}
    rows = 0
    for first_id, batch in identity.sample(MOST_ROWS):
        if deleted is not None:
            batch = batch.filter(pa.array(~is_set(deleted, first_id + np.arange(batch.num_rows))))
        rows += batch.num_rows
        for name, counter in list(counts.items()):
            if not _count(batch.column(name), counter):
                del counts[name]
    return tuple(
        ColumnValues(
            name=name,
            type="float64" if pa.types.is_floating(type_) else str(type_),
            values=tuple(sorted(counts[name].items(), key=lambda kv: (-kv[1], kv[0]))) if name in counts else None,
            rows=rows,
        )
        for name, type_ in types.items()
    )


def _count(column: pa.Array, counter: Counter[Any]) -> bool:
    """Add the values of a column to those seen; False once they are too many, or too long, to choose from."""
    for start in range(0, len(column), _PIECE_ROWS):
        counted = pc.value_counts(column.slice(start, _PIECE_ROWS))
        if len(counted) > MOST_VALUES + 2:  # null and NaN are none
            return False
        for entry in counted:
            value = entry["values"].as_py()
            if value is not None and value == value:
                counter[value] += entry["counts"].as_py()
        if len(counter) > MOST_VALUES or any(isinstance(text, str) and len(text) > MOST_CHARACTERS for text in counter):
            return False
    return True
