"""Compares stored metadata, columns and JSON text together, with the source."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from embq.core.rows.metadata import fill_columns
from embq.core.rows.spec import Column
from embq.core.run.run_info import RunInfo
from embq.core.units import json_value


class StoredMetadata:
    """The stored metadata of some rows.

    Attributes:
        beside: rows with values that are in no column.
    """

    def __init__(self, rows: pa.Table, columns: tuple[Column, ...]) -> None:
        self._columns = columns
        self._cells = [rows[column.name].to_pylist() for column in columns] if rows.num_rows else []
        self._texts: list[str | None] = rows["metadata"].to_pylist() if rows.num_rows else []
        self.beside = sum(text is not None for text in self._texts)

    def differs(self, position: int, source: str | None) -> str:
        """The first difference between a row and its sample in the source, or "".

        Args:
            source: the metadata of the sample, as `embq.core.units.Sample` has them.
        """
        cells, (rest,) = fill_columns([source], self._columns)
        for column, stored, (expected,) in zip(self._columns, self._cells, cells, strict=True):
            if type(stored[position]) is not type(expected) or stored[position] != expected:
                return f"{column.name!r} is {shown(stored[position])}, by the source {shown(expected)}"
        text = self._texts[position]
        return (
            ""
            if text == rest or _same(text, rest)
            else f"what has no column is {shown(text)}, in the source {shown(rest)}"
        )


def columns_of(info: RunInfo) -> dict[str, pa.DataType]:
    """The type of each column of metadata."""
    types = {"int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
    return {"metadata": pa.string(), **{field.name: types.get(field.type, pa.string()) for field in info.rows.columns}}


def _same(text: str | None, other: str | None) -> bool:
    """True for equal JSON; older versions wrote it in another form."""
    try:
        return text is not None and other is not None and bool(json_value(text) == json_value(other))
    except (ValueError, RecursionError):
        return False


def shown(value: Any) -> str:
    """A value in a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
