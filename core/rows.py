"""What a row of a run holds, beside the model that made its vectors: how they are stored, and which metadata it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FORMATS = ("parquet", "hdf5", "npy", "arrow")
"""Formats of parts."""

DTYPES = ("float16", "float32")
"""What is stored of a vector."""

COLUMN_TYPES = ("string", "int64", "float64", "bool", "json")
"""Types that a column of metadata can have; every format and reader has them. A value of "json" is stored as a string:
its JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of metadata.

    Attributes:
        name: of the column.
        type: one of `COLUMN_TYPES`.
        path: the names that lead to the field in a sample's metadata, the outermost object's first.
    """

    name: str
    type: str
    path: tuple[str, ...]

    def describe(self) -> list[Any]:
        """The column as JSON-ready values; `from_description` is its inverse."""
        return [self.name, self.type, list(self.path)]

    @classmethod
    def from_description(cls, described: Sequence[Any]) -> Column:
        """The column that `describe` gave; TypeError or ValueError on any other shape."""
        name, type_, path = described
        if type_ not in COLUMN_TYPES:
            raise ValueError(f"no type of a column: {type_!r}")
        return cls(name=str(name), type=type_, path=tuple(str(one) for one in path))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpec:
    """What the rows of a run hold. Frozen when the run is made, and the same in all its parts.

    Attributes:
        dtype: one of `DTYPES`.
        columns: the columns of metadata, in order; found when the run is made, so they are no part of what it is.
    """

    dtype: str = "float16"
    columns: tuple[Column, ...] = ()

    def describe(self) -> dict[str, Any]:
        """The spec as JSON-ready values; `from_description` is its inverse."""
        return {"dtype": self.dtype, "columns": [column.describe() for column in self.columns]}

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> RowSpec:
        """The spec that `describe` gave; KeyError, TypeError or ValueError on any other shape."""
        columns = tuple(Column.from_description(one) for one in described["columns"])
        return cls(dtype=str(described["dtype"]), columns=columns)

    def identity(self) -> dict[str, Any]:
        """What makes two runs of one model different ones, by the words of the command line."""
        return {"dtype": self.dtype}
