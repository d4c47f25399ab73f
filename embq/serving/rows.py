"""Rows as clip-retrieval's back end gives them: one flat JSON object each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import OutputError

if TYPE_CHECKING:
    import pyarrow as pa

    from embq.serving.served_index import Open


_OWN = ("id", "unit_id")


def rows_of(held: Open, ids: Sequence[int], modality: str) -> list[dict[str, Any]]:
    """The columns of rows, in the order of their ids, without the id itself and without what is embq's own business.

    Rows of images have their key as `image_path` too: so the field is called in clip-retrieval's metadata, whose
    page and users look for it.
    """
    if not ids:
        return []
    table: pa.Table = held.searchable.rows(np.asarray(ids, np.int64))
    if table.num_rows != len(ids):
        raise OutputError(
            f"the index has no record of {len(ids) - table.num_rows} of {len(ids)} rows that it found",
            next_step="build it again: embq index OUT --rebuild",
            code="index_damaged",
        )
    names = [name for name in table.column_names if name not in _OWN]
    columns = [[json_value(value) for value in table.column(name).to_pylist()] for name in names]
    rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    if modality == "image" and "image_path" not in names and "key" in names:
        rows = [{"image_path": row["key"], **row} for row in rows]
    return rows


def json_value(value: object) -> object:
    """A value that JSON can hold: NaN and infinities become null, what JSON has no type for becomes text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list | tuple):
        return [json_value(one) for one in value]
    if isinstance(value, dict):
        return {str(name): json_value(one) for name, one in value.items()}
    return str(value)
