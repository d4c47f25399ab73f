"""Tables of other packages: a column of one as items, and the same table with a column of vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any, Protocol

import numpy as np

from embq.core.errors import UsageError


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
    """The table that `data` is, or streams, if it is one; none of their packages is imported for it."""
    for base in type(data).__mro__:
        if kind := TABLES.get((base.__module__.partition(".")[0], base.__name__)):
            return kind(data)
    if (type(data).__module__.partition(".")[0], type(data).__name__) == ("polars", "LazyFrame"):
        return PolarsTable(data.collect())
    if hasattr(data, "__arrow_c_stream__") and (read := _read_stream(data)) is not None:
        return ArrowTable(read)
    return DictTable(data) if isinstance(data, Mapping) else None


def _read_stream(data: Any) -> Any:
    """The `pyarrow.Table` of what streams tables, such as a relation of DuckDB; None for a column alone."""
    import pyarrow as pa

    try:
        return pa.RecordBatchReader.from_stream(data).read_all()
    except pa.ArrowInvalid:  # it is no stream of structs
        return None


class _OfPackage:
    names_in = "columns"
    """Attribute with the names of the columns."""

    def __init__(self, data: Any) -> None:
        self._data = data

    @property
    def names(self) -> list[str]:
        """See `Table`."""
        return list(getattr(self._data, self.names_in))


class PandasTable(_OfPackage):
    """A `pandas.DataFrame`; the column holds arrays of shape (dim,), or None."""

    def column(self, name: str) -> Any:
        """See `Table`."""
        return self._data[name].tolist()

    def with_vectors(self, name: str, vectors: np.ndarray, nulls: Sequence[int]) -> Any:
        """See `Table`."""
        import pandas as pd

        rows = pd.Series(with_nulls(vectors, nulls), index=self._data.index, dtype=object)
        return self._data.assign(**{name: rows})


class ArrowTable(_OfPackage):
    """A `pyarrow.Table` or `pyarrow.RecordBatch`; the column has fixed-size lists of float32."""

    names_in = "column_names"

    def column(self, name: str) -> Any:
        """See `Table`."""
        return self._data[name].to_pylist()

    def with_vectors(self, name: str, vectors: np.ndarray, nulls: Sequence[int]) -> Any:
        """See `Table`."""
        column = fixed_size_lists(vectors, nulls)
        if name in self.names:
            return self._data.set_column(self.names.index(name), name, column)
        return self._data.append_column(name, column)


class PolarsTable(_OfPackage):
    """A `polars.DataFrame`; the column is of type Array(Float32, dim)."""

    def column(self, name: str) -> Any:
        """See `Table`."""
        return self._data[name].to_list()

    def with_vectors(self, name: str, vectors: np.ndarray, nulls: Sequence[int]) -> Any:
        """See `Table`."""
        import polars as pl

        return self._data.with_columns(pl.Series(name, pl.from_arrow(fixed_size_lists(vectors, nulls))))


class HuggingFaceTable(_OfPackage):
    """A `datasets.Dataset`; the column has lists of float32. Images are not decoded."""

    names_in = "column_names"

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
        features = datasets.Features({name: datasets.Sequence(datasets.Value("float32"), length=vectors.shape[1])})
        added = datasets.Dataset.from_dict({name: with_nulls(vectors, nulls)}, features=features)
        return datasets.concatenate_datasets([data, added], axis=1)


class DictTable:
    """A dict of lists, one for each column, as `Dataset[:10]` and `to_dict("list")` return it; the column is a list.

    Raises UsageError for a dict of anything else.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data, self.names = data, list(data)
        sized = [items for items in data.values() if isinstance(items, Sized) and not isinstance(items, str | bytes)]
        if len(sized) < len(data) or len({*map(len, sized)}) > 1:
            raise UsageError(
                "data is a dict, and its values are not lists of one length",
                next_step="give a list of items, or a dict of columns: {'text': ['a', 'b']}",
            )

    def column(self, name: str) -> Any:
        """See `Table`."""
        return list(self._data[name])

    def with_vectors(self, name: str, vectors: np.ndarray, nulls: Sequence[int]) -> Any:
        """See `Table`."""
        return {**self._data, name: with_nulls(vectors, nulls)}


TABLES: dict[tuple[str, str], type[PandasTable | ArrowTable | PolarsTable | HuggingFaceTable]] = {
    ("pandas", "DataFrame"): PandasTable,
    ("pyarrow", "Table"): ArrowTable,
    ("pyarrow", "RecordBatch"): ArrowTable,
    ("polars", "DataFrame"): PolarsTable,
    ("datasets", "Dataset"): HuggingFaceTable,
}
"""(package, class) -> the table that it is here."""


def with_nulls(vectors: np.ndarray, nulls: Sequence[int]) -> list[np.ndarray | None]:
    """Vectors of shape (n, dim) as a list, None at some positions."""
    without = set(nulls)
    return [None if row in without else vector for row, vector in enumerate(vectors)]


def fixed_size_lists(vectors: np.ndarray, nulls: Sequence[int]) -> Any:
    """Vectors of shape (n, dim) as an Arrow array of fixed-size lists, null at some positions."""
    import pyarrow as pa

    mask = np.zeros(len(vectors), bool)
    mask[list(nulls)] = True
    flat = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    type_ = pa.list_(flat.type, vectors.shape[1])
    return pa.FixedSizeListArray.from_arrays(flat, type=type_, mask=pa.array(mask))
