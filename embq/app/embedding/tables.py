"""Tables of other packages: a column of one as items, and the same table with a column of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Table(Protocol):
    """A table of another package."""

    @property
    def names(self) -> list[str]:
        """Of its columns."""
        ...

    def column(self, name: str) -> Any:
        """The values of a column, an iterable with a length; null as None."""
        ...

    def with_vectors(self, name: str, vectors: np.ndarray, nulls: Sequence[int]) -> Any:
        """A table of the same type with one column more, or in the place of that name.

        Args:
            vectors: float32 of shape (rows, dim).
            nulls: positions of rows without a vector.
        """
        ...


def table_of(data: Any) -> Table | None:
    """The table that `data` is, if it is one; none of their packages is imported for it."""
    for base in type(data).__mro__:
        if kind := TABLES.get((base.__module__.partition(".")[0], base.__name__)):
            return kind(data)
    return None


class PandasTable:
    """A `pandas.DataFrame`; the column holds arrays of shape (dim,), or None."""

    def __init__(self, data: Any) -> None:
        self._data = data

    @property
    def names(self) -> list[str]:
        """See `Table`."""
        return list(self._data.columns)

    def column(self, name: str) -> Any:
        """See `Table`."""
        column = self._data[name]
        return column.astype(object).where(column.notna(), None).tolist()

    def with_vectors(self, name: str, vectors: np.ndarray, nulls: Sequence[int]) -> Any:
        """See `Table`."""
        import pandas as pd

        rows = pd.Series([*vectors], index=self._data.index, dtype=object)
        rows.iloc[list(nulls)] = None
        return self._data.assign(**{name: rows})


class ArrowTable:
    """A `pyarrow.Table`; the column has fixed-size lists of float32."""

    def __init__(self, data: Any) -> None:
        self._data = data

    @property
    def names(self) -> list[str]:
        """See `Table`."""
        return list(self._data.column_names)

    def column(self, name: str) -> Any:
        """See `Table`."""
        return self._data[name].to_pylist()

    def with_vectors(self, name: str, vectors: np.ndarray, nulls: Sequence[int]) -> Any:
        """See `Table`."""
        column = fixed_size_lists(vectors, nulls)
        if name in self.names:
            return self._data.set_column(self.names.index(name), name, column)
        return self._data.append_column(name, column)


class PolarsTable:
    """A `polars.DataFrame`; the column is of type Array(Float32, dim)."""

    def __init__(self, data: Any) -> None:
        self._data = data

    @property
    def names(self) -> list[str]:
        """See `Table`."""
        return list(self._data.columns)

    def column(self, name: str) -> Any:
        """See `Table`."""
        return self._data[name].to_list()

    def with_vectors(self, name: str, vectors: np.ndarray, nulls: Sequence[int]) -> Any:
        """See `Table`."""
        import polars as pl

        return self._data.with_columns(pl.Series(name, pl.from_arrow(fixed_size_lists(vectors, nulls))))


class HuggingFaceTable:
    """A `datasets.Dataset`; the column has lists of float32. Images are not decoded."""

    def __init__(self, data: Any) -> None:
        self._data = data

    @property
    def names(self) -> list[str]:
        """See `Table`."""
        return list(self._data.column_names)

    def column(self, name: str) -> Any:
        """See `Table`."""
        import datasets

        if isinstance(self._data.features[name], datasets.Image):
            return self._data.cast_column(name, datasets.Image(decode=False))[name]
        return self._data[name]

    def with_vectors(self, name: str, vectors: np.ndarray, nulls: Sequence[int]) -> Any:
        """See `Table`."""
        import datasets

        data = self._data.remove_columns(name) if name in self.names else self._data
        without = set(nulls)
        column = [None if row in without else vector for row, vector in enumerate(vectors)]
        features = datasets.Features({name: datasets.Sequence(datasets.Value("float32"), length=vectors.shape[1])})
        added = datasets.Dataset.from_dict({name: column}, features=features)
        return datasets.concatenate_datasets([data, added], axis=1)


TABLES: dict[tuple[str, str], type[PandasTable | ArrowTable | PolarsTable | HuggingFaceTable]] = {
    ("pandas", "DataFrame"): PandasTable,
    ("pyarrow", "Table"): ArrowTable,
    ("polars", "DataFrame"): PolarsTable,
    ("datasets", "Dataset"): HuggingFaceTable,
}
"""(package, class) -> the table that it is here."""


def fixed_size_lists(vectors: np.ndarray, nulls: Sequence[int]) -> Any:
    """Vectors of shape (n, dim) as an Arrow array of fixed-size lists, null at some positions."""
    import pyarrow as pa

    mask = np.zeros(len(vectors), bool)
    mask[list(nulls)] = True
    flat = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    type_ = pa.list_(flat.type, vectors.shape[1])
    return pa.FixedSizeListArray.from_arrays(flat, type=type_, mask=pa.array(mask))
