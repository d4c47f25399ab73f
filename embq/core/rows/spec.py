"""Content of a run's rows: the form of their vectors and the columns of their metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from embq.core.errors import InputError
from embq.core.wire import convert, one_of, write

FORMATS = ("parquet", "hdf5", "npy", "arrow")
"""Formats of parts."""

DTYPES = ("float16", "float32", "int8", "binary")
"""Types of stored vectors."""

COLUMN_TYPES = ("string", "int64", "float64", "bool", "json")
"""Types of columns of metadata; every format and reader has them. "json" is stored as a string, the JSON text."""

SIMILARITY = "image_text_similarity"
"""Column of the cosine of a row's two vectors."""

INT8_RANGE = 1.0
"""No number of a vector of length 1 is larger."""

LEAST_RANGE, MOST_RANGE = 1e-6, 1e6
"""Limits of `int8_range`; beyond them a float32 cannot hold the steps."""


class Column(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A column of metadata; in JSON an array.

    Attributes:
        name: of the column.
        type: one of `COLUMN_TYPES`.
        path: the names that lead to the field in a sample's metadata, the outermost object's first.
    """

    name: Annotated[str, Meta(min_length=1, max_length=1_000)]
    type: Annotated[str, one_of(COLUMN_TYPES)]
    path: Annotated[tuple[str, ...], Meta(min_length=1, max_length=100)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpec:
    """Content of the rows of a run. Frozen when the run is made, and the same in all its parts.

    Attributes:
        dtype: one of `DTYPES`.
        truncate_dim: number of leading numbers of a vector that are kept; 0 for all.
        normalize: whether vectors are normalized to length 1 before they are stored; False also turns off the model's
            own normalization; None keeps them as the model returns them, but see `unit_length`.
        int8_range: the number that int8 stores as 127; larger ones are stored as 127, too.
        similarity: whether a row has the cosine of its image and its text, in the column `SIMILARITY`.
        columns: the columns of metadata, in order; found when the run is made, and no part of its identity.
    """

    dtype: Annotated[str, one_of(DTYPES)] = "float16"
    truncate_dim: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    normalize: bool | None = None
    int8_range: Annotated[float, Meta(ge=LEAST_RANGE, le=MOST_RANGE)] = INT8_RANGE
    similarity: bool = False
    columns: Annotated[tuple[Column, ...], Meta(max_length=10_000)] = ()

    @property
    def unit_length(self) -> bool:
        """True if vectors are stored from vectors of length 1.

        Truncated vectors are normalized again, and one range of int8 suits vectors of one length only: both imply it.
        """
        return self.normalize or (self.normalize is None and (self.dtype == "int8" or self.truncate_dim > 0))

    def kept_dim(self, dim: int) -> int:
        """Number of numbers that are kept of a vector of `dim`."""
        return min(dim, self.truncate_dim) if self.truncate_dim else dim

    def width(self, dim: int) -> int:
        """Length of the stored list for a vector of `dim` numbers; binary packs eight of them into a byte."""
        return self.kept_dim(dim) // 8 if self.dtype == "binary" else self.kept_dim(dim)

    def check(self, model: str, dim: int) -> None:
        """Raise InputError if vectors of `dim` numbers cannot be stored so.

        Args:
            model: its spec, for the message.
        """
        if self.truncate_dim > dim:
            raise InputError(
                f"--truncate-dim {self.truncate_dim}: the vectors of {model} have {dim} numbers",
                next_step=f"use --truncate-dim {dim} or less, or leave it out",
                code="wrong_dimension",
            )
        if self.dtype == "binary" and self.kept_dim(dim) % 8:
            fitting = self.kept_dim(dim) // 8 * 8
            raise InputError(
                f"--dtype binary stores 8 numbers in a byte: {self.kept_dim(dim)} of {model} do not fill theirs",
                next_step=f"use --truncate-dim {fitting}, or another --dtype" if fitting else "use another --dtype",
                code="wrong_dimension",
            )

    def describe(self) -> dict[str, Any]:
        """The spec as JSON-ready values; `from_description` is its inverse."""
        described: dict[str, Any] = json.loads(write(self))  # with lists where msgspec leaves tuples
        return described

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> RowSpec:
        """The inverse of `describe`; MalformedError for anything else."""
        return convert(cls, described, what="rows of a run")

    def identity(self) -> dict[str, Any]:
        """The values that distinguish runs of one model, by the names of their options."""
        values: dict[str, Any] = {"dtype": self.dtype}
        if self.truncate_dim:
            values["truncate dim"] = self.truncate_dim
        if self.unit_length or self.normalize is False:
            values["normalize"] = "yes" if self.unit_length else "no"
        if self.dtype == "int8":
            values["int8 range"] = self.int8_range
        if self.similarity:
            values["similarity"] = "yes"
        return values
