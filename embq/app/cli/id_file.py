"""Files of row ids, as the map gives them: one id per line, or a table with a column `id`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from embq.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np

MOST_LINE = 1 << 16
"""Bytes of the first line: a header of many columns."""


def read_ids(path: str | Path) -> np.ndarray:
    """The ids in a file, each once: int64 (n,), ascending.

    The file is a text with one id on each line, or a CSV or parquet file with a column `id`. Raises InputError
    `bad_ids` if it cannot be read, or holds no id, or anything else.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    try:
        with open(path, "rb") as file:
            first = file.readline(MOST_LINE)
            file.seek(0)
            if first.startswith(b"PAR1"):
                column = pq.read_table(file, columns=["id"])["id"]
            else:
                plain = first.strip().isdigit()
                column = csv.read_csv(
                    file,
                    read_options=csv.ReadOptions(column_names=["id"] if plain else None),
                    parse_options=csv.ParseOptions(newlines_in_values=not plain),
                    convert_options=csv.ConvertOptions(include_columns=["id"], column_types={"id": pa.int64()}),
                )["id"]
        if not pa.types.is_int64(column.type):
            raise ValueError(f"its ids are of type {column.type}")
        if column.null_count:
            raise ValueError("there are lines without an id")
        ids = np.unique(column.to_numpy())
        if not len(ids):
            raise ValueError("it is empty")
        if ids[0] < 0:
            raise ValueError(f"{ids[0]} is no id: they begin with 0")
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise InputError(
            f"the ids in {path} cannot be read: {error}",
            next_step="give a text file with one id on each line, or a CSV or parquet file with a column id",
            code="bad_ids",
        ) from error
    return ids
