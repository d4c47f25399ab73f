"""Collections of parquet files with a column of vectors, in the order of their paths as for autofaiss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embq.core.errors import InputError
from embq.core.formats.base import FORMAT_ERRORS, READ_ROWS
from embq.core.formats.parquet import BUFFER_BYTES, batch_rows, rows_within
from embq.indexer.collection.columns import without_columns
from embq.indexer.collection.listing import Shape, Summary, choose_column, noted
from embq.indexer.collection.parts import PartRef, damaged
from embq.indexer.collection.remote import FilePath, readable


def inspect_file(path: FilePath, column: str | None) -> Summary:
    """Content of a parquet file; InputError if it has no column of vectors, or not the one that is named."""
    with opened(path) as file:
        rows, schema = file.metadata.num_rows, file.schema_arrow
        if not rows:
            return Summary(rows=0, column=column)
        if column is None:
            column = choose_column(path, [field.name for field in schema if is_vectors(field.type)], schema.names)
        return Summary(rows=rows, column=column, shape=_shape(path, file, column), schema=schema)


def has_vectors(path: FilePath) -> bool:
    """True for a file with a column of vectors; InputError if it cannot be read."""
    with opened(path) as file:
        return any(is_vectors(field.type) for field in file.schema_arrow)


@contextmanager
def opened(path: FilePath) -> Iterator[pq.ParquetFile]:
    """An open file for the length of the block; InputError if it cannot be read, also in the block."""
    try:
        with readable(path) as source, pq.ParquetFile(source, pre_buffer=False, buffer_size=BUFFER_BYTES) as file:
            yield file
    except FORMAT_ERRORS as error:
        raise damaged(path, error) from error


def is_vectors(type_: pa.DataType) -> bool:
    """True for the type of a column of vectors: lists of floats."""
    lists = pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    return bool(lists and pa.types.is_floating(type_.value_type))


def _shape(path: FilePath, file: pq.ParquetFile, column: str) -> Shape:
    """Shape of the vectors of a file, from its first one."""
    if column not in file.schema_arrow.names:
        raise InputError(
            f"{path} has no column {column!r}",
            next_step=f"it has {', '.join(file.schema_arrow.names)}",
            code="no_column",
        )
    type_ = file.schema_arrow.field(column).type
    if not is_vectors(type_):
        raise InputError(
            f"{path}: its column {column!r} holds {type_}, and not lists of floats",
            next_step="name the column of vectors",
            code="not_vectors",
        )
    dim = type_.list_size if pa.types.is_fixed_size_list(type_) else _first_length(file, column)
    if not dim:
        raise InputError(
            f"{path}: the vectors in its column {column!r} have no numbers",
            next_step="take the file away",
            code="not_vectors",
        )
    dtype = str(np.dtype(type_.value_type.to_pandas_dtype()))
    return Shape(path=path, dim=dim, dtype=dtype, **noted(file.schema_arrow.metadata or {}))


def _first_length(file: pq.ParquetFile, column: str) -> int:
    for batch in file.iter_batches(batch_size=64, columns=[column]):
        lengths = pc.list_value_length(batch.column(0)).drop_null()
        if len(lengths):
            return int(lengths[0].as_py())
    return 0


def vectors(path: FilePath, part: PartRef, column: str, dim: int, start: int, stop: int) -> Iterator[np.ndarray]:
    """See `embq.indexer.collection.plain.PlainFormat`; the vector of a row that has none is NaN."""
    for table in rows_of(path, part, [column], start, stop, batch_rows(dim)):
        for chunk in table[column].chunks:
            yield matrix_of(chunk, dim, path, start)
            start += len(chunk)


def rows_of(
    path: FilePath, part: PartRef, columns: Sequence[str], start: int, stop: int, rows: int = READ_ROWS
) -> Iterator[pa.Table]:
    """The rows from `start` up to `stop` of those columns that the file has, at most `rows` of them at a time.

    InputError if the file cannot be read, or has another number of rows than the part.
    """
    with opened(path) as file:
        footer = file.metadata
        if footer.num_rows != part.rows:
            raise damaged(path, f"it has {footer.num_rows:,} rows, and had {part.rows:,}")
        present = [name for name in columns if name in file.schema_arrow.names]
        if not present:
            yield from without_columns(start, stop)
            return
        yield from rows_within(file, present, start, stop, rows)


def matrix_of(lists: pa.Array, dim: int, path: FilePath, row: int) -> np.ndarray:
    """float32 (n, dim) of a column of lists; NaN if there is no list or no number.

    Args:
        path, row: where the first of them stands, for the error: InputError `mixed_embeddings` if one is longer or
            shorter.
    """
    lengths = pc.fill_null(pc.list_value_length(lists), dim).to_numpy(zero_copy_only=False)
    if len(other := np.flatnonzero(lengths != dim)):
        raise InputError(
            f"{path}: the vector in row {row + int(other[0]):,} has {int(lengths[other[0]])} numbers, not {dim}",
            next_step="take such rows away",
            code="mixed_embeddings",
        )
    matrix = np.full((len(lists), dim), np.nan, np.float32)
    valid = lists.drop_null()
    matrix[lists.is_valid().to_numpy(zero_copy_only=False)] = (
        valid.flatten().to_numpy(zero_copy_only=False).reshape(len(valid), dim)
    )
    return matrix
