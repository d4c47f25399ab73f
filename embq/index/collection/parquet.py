"""Collections of parquet files with a column of vectors, in the order of their paths as for autofaiss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embq.core.errors import InputError
from embq.core.formats.base import FORMAT_ERRORS, READ_ROWS
from embq.core.formats.parquet import BUFFER_BYTES, LARGE_BYTES, batch_rows, rows_within
from embq.index.collection.columns import without_columns
from embq.index.collection.listing import Shape, Summary, choose_column, noted
from embq.index.collection.parts import PartRef, damaged
from embq.index.collection.remote import FilePath, readable

INFLATED_VALUES, INFLATED_TIMES = 1 << 26, 256
"""More values of lists than this, and than this many times their bytes in the file, are no vectors: those do not
shrink."""

SMALL_TEXT_BYTES = 1 << 14
"""Limit of a value that takes next to no bytes in the file."""

REPEATED_BYTES = SMALL_TEXT_BYTES * READ_ROWS
"""Limit of the texts of the rows that are read at once, where they are texts of other rows."""


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
    """An open file for the length of the block; InputError if it cannot be read, also in the block.

    Texts that the file tells by a dictionary are read as one, because a small file could become any size by it.
    """
    try:
        with readable(path) as source:
            footer = pq.read_metadata(source)
            texts = _told_by_dictionary(footer, (path.stat() if isinstance(path, Path) else path.status()).st_size)
            options = {"pre_buffer": False, "buffer_size": BUFFER_BYTES, "read_dictionary": texts}
            with pq.ParquetFile(source, metadata=footer, **options) as file:
                yield file
    except FORMAT_ERRORS as error:
        raise damaged(path, error) from error


def _told_by_dictionary(footer: pq.FileMetaData, file_bytes: int) -> list[str]:
    """Paths of the columns that have a dictionary; ValueError for what could become much larger than its bytes."""
    paths: dict[str, None] = {}
    for number in range(len(footer.schema)):
        leaf = footer.schema.column(number)
        is_list = leaf.max_repetition_level > 0
        for column in (footer.row_group(group).column(number) for group in range(footer.num_row_groups)):
            size = column.num_values * max(1, leaf.length)
            if (is_list or leaf.length > SMALL_TEXT_BYTES) and size > max(
                INFLATED_VALUES, INFLATED_TIMES * min(column.total_compressed_size, file_bytes)
            ):
                raise ValueError(f"column {leaf.path} has {size:,} values in {column.total_compressed_size:,} bytes")
            if is_list and "DELTA_BYTE_ARRAY" in column.encodings:
                raise ValueError(f"column {leaf.path} has lists of delta-encoded texts; write it with another encoding")
            if leaf.physical_type == "BYTE_ARRAY" and any("DICTIONARY" in encoding for encoding in column.encodings):
                paths[leaf.path] = None
    return list(paths)


def _delta_encoded(footer: pq.FileMetaData) -> dict[str, int]:
    """Delta-encoded column of texts -> most bytes that one of its texts can have."""
    largest: dict[str, int] = {}
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if "DELTA_BYTE_ARRAY" in column.encodings:
                name = column.path_in_schema
                largest[name] = max(largest.get(name, 1), column.total_uncompressed_size)
    return largest


def _refuse_repeated(table: pa.Table, delta_encoded: Iterable[str]) -> None:
    """ValueError if rows of a file share so much text that they would be much larger than it."""
    repeated = sum(_repeated_bytes(chunk) for column in table.columns for chunk in column.chunks)
    if repeated > REPEATED_BYTES:
        raise ValueError(f"{table.num_rows:,} rows of it have {repeated:,} bytes of repeated texts")
    for name in delta_encoded:
        if (pc.max(pc.binary_length(table[name])).as_py() or 0) > SMALL_TEXT_BYTES:
            raise ValueError(f"column {name} has long delta-encoded texts; write it with another encoding")


def _repeated_bytes(array: pa.Array) -> int:
    """Bytes of the texts of a column that are in its dictionaries, less those of the dictionaries."""
    type_ = array.type
    if pa.types.is_dictionary(type_):
        lengths = pc.binary_length(array.dictionary)
        own = pc.sum(lengths.take(array.indices).cast(pa.int64())).as_py() or 0
        return max(0, int(own - (pc.sum(lengths.cast(pa.int64())).as_py() or 0)))
    if pa.types.is_map(type_):
        return _repeated_bytes(array.keys) + _repeated_bytes(array.items)
    if pa.types.is_nested(type_):
        inner = array.flatten()
        return sum(map(_repeated_bytes, inner)) if pa.types.is_struct(type_) else _repeated_bytes(inner)
    return 0


def is_vectors(type_: pa.DataType) -> bool:
    """True for the type of a column of vectors: lists of floats."""
    lists = pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    return bool(lists and pa.types.is_floating(type_.value_type))


def vector_type(path: FilePath, schema: pa.Schema, column: str) -> Any:
    """The type of a column of vectors; InputError if there is no such column, or it has none."""
    if column not in schema.names:
        raise InputError(
            f"{path} has no column {column!r}",
            next_step=f"it has {', '.join(schema.names)}",
            code="no_column",
        )
    type_ = schema.field(column).type
    if not is_vectors(type_):
        raise InputError(
            f"{path}: its column {column!r} holds {type_}, and not lists of floats",
            next_step="name the column of vectors",
            code="not_vectors",
        )
    return type_


def _shape(path: FilePath, file: pq.ParquetFile, column: str) -> Shape:
    """Shape of the vectors of a file, from its first one."""
    type_ = vector_type(path, file.schema_arrow, column)
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
    for batch in file.iter_batches(batch_size=1, columns=[column]):  # a list may have all values of the file
        if length := pc.list_value_length(batch.column(0))[0].as_py():
            return int(length)
    return 0


def vectors(path: FilePath, part: PartRef, column: str, dim: int, start: int, stop: int) -> Iterator[np.ndarray]:
    """See `embq.index.collection.plain.PlainFormat`; the vector of a row that has none is NaN."""
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
        delta_encoded = {name: size for name, size in _delta_encoded(footer).items() if name in present}
        rows = min(rows, max(1, LARGE_BYTES // max(delta_encoded.values(), default=1)))
        for table in rows_within(file, present, start, stop, rows):
            _refuse_repeated(table, delta_encoded)
            yield table


def matrix_of(lists: pa.Array, dim: int, path: FilePath, row: int) -> np.ndarray:
    """float32 (n, dim) of a column of lists; NaN if there is no list, an empty one or no number.

    Args:
        path, row: where the first of them stands, for the error: InputError `mixed_embeddings` if one is longer or
            shorter.
    """
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    if len(other := np.flatnonzero((lengths != dim) & (lengths != 0))):
        raise InputError(
            f"{path}: the vector in row {row + int(other[0]):,} has {int(lengths[other[0]])} numbers, not {dim}",
            next_step="take such rows away",
            code="mixed_embeddings",
        )
    matrix = np.full((len(lists), dim), np.nan, np.float32)
    matrix[lengths == dim] = lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim)
    return matrix
