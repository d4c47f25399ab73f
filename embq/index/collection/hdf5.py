"""HDF5 files of an export: parts as runs have them, and `dataset.h5`, which shows the rows of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from embq.core.errors import InputError
from embq.core.formats.base import COLUMNS, FORMAT_ERRORS
from embq.core.formats.base import vectors as matrix_of
from embq.core.formats.hdf5 import Hdf5Part, columns_of, linked_dataset
from embq.core.formats.hdf5 import opened as open_hdf5
from embq.index.collection.columns import without_columns
from embq.index.collection.listing import Shape, Summary, choose_column, noted
from embq.index.collection.parquet import is_vectors, vector_type
from embq.index.collection.parts import PartRef, damaged
from embq.index.collection.remote import FilePath


def inspect_file(path: FilePath, column: str | None) -> Summary:
    """Content of an HDF5 file of an export; InputError if it is another one, or has no such vectors."""
    if _shows_others(path):
        return Summary(rows=0, column=column, shows_others=True)
    with opened(path) as part:
        if column is None:
            column = choose_column(
                path, [field.name for field in part.schema if is_vectors(field.type)], part.schema.names
            )
        type_ = vector_type(path, part.schema, column)
        if not part.rows:
            return Summary(rows=0, column=column)
        dtype = str(np.dtype(type_.value_type.to_pandas_dtype()))
        shape = Shape(path=path, dim=type_.list_size, dtype=dtype, **noted(part.schema.metadata))
        return Summary(rows=part.rows, column=column, shape=shape, schema=part.schema.remove_metadata())


def _shows_others(path: FilePath) -> bool:
    """Whether a file is `dataset.h5`; InputError for one that embq did not write."""
    assert isinstance(path, Path), "remote files are refused when they are listed"
    try:
        with open_hdf5(path) as file:
            if COLUMNS in file.attrs:
                first = linked_dataset(file, columns_of(file)[0].path)
                return first is not None and bool(first.is_virtual)
    except (*FORMAT_ERRORS, IndexError) as error:
        raise damaged(path, error) from error
    raise InputError(
        f"{path} was not written by embq, and other HDF5 files are not indexed",
        next_step="write its vectors as .npy or .parquet files",
        code="not_vectors",
    )


@contextmanager
def opened(path: FilePath) -> Iterator[Hdf5Part]:
    """An open file for the length of the block; InputError if it cannot be read, also in the block."""
    assert isinstance(path, Path), "remote files are refused when they are listed"
    try:
        with closing(Hdf5Part(path)) as part:
            yield part
    except FORMAT_ERRORS as error:
        raise damaged(path, error) from error


def vectors(path: FilePath, part: PartRef, column: str, dim: int, start: int, stop: int) -> Iterator[np.ndarray]:
    """See `embq.index.collection.plain.PlainFormat`."""
    for table in rows_of(path, part, [column], start, stop):
        matrix = matrix_of(table, column)
        if matrix.shape[1] != dim:
            raise damaged(path, f"it holds vectors of {matrix.shape[1]} numbers, and held some of {dim}")
        yield matrix.astype(np.float32, copy=False)


def rows_of(path: FilePath, part: PartRef, columns: Sequence[str], start: int, stop: int) -> Iterator[pa.Table]:
    """The rows from `start` up to `stop` of those columns that the file has, a bounded number at a time."""
    with opened(path) as file:
        if file.rows != part.rows:
            raise damaged(path, f"it has {file.rows:,} rows, and had {part.rows:,}")
        present = [name for name in columns if name in file.schema.names]
        yield from file.tables(present, start, stop) if present else without_columns(start, stop)
