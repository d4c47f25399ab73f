"""What a row of a run holds, beside the model that made its vectors: how they are stored, and which metadata it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORMATS = ("parquet", "hdf5", "npy", "arrow")
"""Formats of parts."""

DTYPES = ("float16", "float32")
"""What is stored of a vector."""

COLUMN_TYPES = ("string", "int64", "float64", "bool")
"""Types that a column of metadata can have; every format and reader has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of metadata: its name, and one of `COLUMN_TYPES`."""

    name: str
    type: str


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
        return {"dtype": self.dtype, "columns": [[column.name, column.type] for column in self.columns]}

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> RowSpec:
        """The spec that `describe` gave; KeyError, TypeError or ValueError on any other shape."""
        columns = tuple(Column(name=str(name), type=str(type_)) for name, type_ in described["columns"])
        return cls(dtype=str(described["dtype"]), columns=columns)

    def identity(self) -> dict[str, Any]:
        """What makes two runs of one model different ones, by the words of the command line."""
        return {"dtype": self.dtype}
