"""Collections of parquet files with a column of vectors, in the order of their paths as for autofaiss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from core.errors import InputError
from core.formats.base import FORMAT_ERRORS, READ_ROWS
from core.formats.parquet import BUFFER_BYTES, batch_rows, rows_within
from indexer.collection.columns import Columns, column_in_file, find_columns, identity
from indexer.collection.listing import Listing, Shape, choose_column, file_ref, files_below, noted, same_shape
from indexer.collection.parts import PartRef, Piece, damaged, no_embeddings

SUFFIXES = (".parquet",)

GROUP_ROWS = 65_536
"""Usual rows of one group."""


def describe_parquet(root: Path, *, column: str | None, id_columns: Sequence[str]) -> dict[str, Any]:
    """The fields of the collection that the parquet files at or below a path are, see `Collection`.

    Raises InputError where there are no rows or no vectors, where two files hold different ones, or where a file lacks
    one of `id_columns`.
    """
    folder, files = files_below(root, SUFFIXES)
    listing = Listing()
    schemas: list[tuple[Path, pa.Schema]] = []
    shape: Shape | None = None
    for path in files:
        with opened(path) as file:
            rows, schema = file.metadata.num_rows, file.schema_arrow
            listing.add(rows, file_ref(folder, path))
            if not rows:
                continue
            if column is None:
                column = choose_column(path, [one.name for one in schema if _is_vectors(one.type)], schema.names)
            shape = same_shape(shape, _shape(path, file, column))
        schemas.append((path, schema))
    if shape is None:
        raise no_embeddings(f"{root} holds no rows: its {len(files)} parquet files are empty", "name another folder")
    columns = find_columns(
        schemas, id_columns, [str(column), *(one.name for one in schemas[0][1] if _is_vectors(one.type))]
    )
    return {
        "kind": "parquet",
        "column": column,
        "output": column,
        "dim": shape.dim,
        "fingerprint": shape.fingerprint or None,
        **columns.fields(),
        **listing.fields(),
    }


def has_vectors(path: Path) -> bool:
    """Whether a file has a column of vectors; InputError where it cannot be read."""
    with opened(path) as file:
        return any(_is_vectors(one.type) for one in file.schema_arrow)


def opened(path: Path) -> pq.ParquetFile:
    """An open file; InputError where it cannot be read."""
    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES)
    except FORMAT_ERRORS as error:
        raise damaged(path, error) from error


def _is_vectors(type_: pa.DataType) -> bool:
    lists = pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    return bool(lists and pa.types.is_floating(type_.value_type))


def _shape(path: Path, file: pq.ParquetFile, column: str) -> Shape:
    """Shape of the vectors of a file, from its first one."""
    if column not in file.schema_arrow.names:
        raise InputError(
            f"{path} has no column {column!r}",
            next_step=f"it has {', '.join(file.schema_arrow.names)}",
            code="no_column",
        )
    type_ = file.schema_arrow.field(column).type
    if not _is_vectors(type_):
        raise InputError(
            f"{path}: its column {column!r} holds {type_}, and not lists of floats",
            next_step="name the column of vectors",
            code="not_vectors",
        )
    dim = type_.list_size if pa.types.is_fixed_size_list(type_) else _first_length(path, file, column)
    if not dim:
        raise InputError(
            f"{path}: the vectors in its column {column!r} have no numbers",
            next_step="take the file away",
            code="not_vectors",
        )
    dtype = str(np.dtype(type_.value_type.to_pandas_dtype()))
    return Shape(path=path, dim=dim, dtype=dtype, **noted(file.schema_arrow.metadata or {}))


def _first_length(path: Path, file: pq.ParquetFile, column: str) -> int:
    try:
        for batch in file.iter_batches(batch_size=64, columns=[column]):
            lengths = pc.list_value_length(batch.column(0)).drop_null()
            if len(lengths):
                return int(lengths[0].as_py())
    except FORMAT_ERRORS as error:
        raise damaged(path, error) from error
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetReader:
    """See `indexer.collection.parts.PartReader`."""

    root: Path
    dim: int
    columns: Columns

    def vectors(self, part: PartRef, column: str, start: int, stop: int) -> Iterator[np.ndarray]:
        """See `PartReader`; the vector of a row that has none is NaN."""
        path = self.root / part.files[0].path
        row = start
        for table in rows_of(path, part, [column], start, stop, batch_rows(self.dim)):
            for chunk in table[column].chunks:
                yield matrix_of(chunk, self.dim, path, row)
                row += len(chunk)

    def gap_rows(self, part: PartRef, column: str) -> int:
        """See `PartReader`: a group of rows can be read as a whole only."""
        return GROUP_ROWS

    def identity(self, pieces: Sequence[Piece]) -> Iterator[pa.Table]:
        """See `PartReader`."""
        for part, start, stop in pieces:
            yield from identity_rows(self.root, part, self.columns, start, stop)


def identity_rows(root: Path, part: PartRef, columns: Columns, start: int, stop: int) -> Iterator[pa.Table]:
    """Identity and metadata of rows of a part, from its last file."""
    path = root / part.files[-1].path
    wanted = list(dict.fromkeys([*columns.named.values(), *map(column_in_file, columns.types)]))
    for table in rows_of(path, part, wanted, start, stop):
        yield identity(part.files[0], table, start, columns)
        start += table.num_rows


def rows_of(
    path: Path, part: PartRef, columns: Sequence[str], start: int, stop: int, rows: int = READ_ROWS
) -> Iterator[pa.Table]:
    """Those of the columns that the file has, of the rows from `start` up to `stop`, at most `rows` of them at a time.

    InputError where the file cannot be read, or has another number of rows than the part.
    """
    with opened(path) as file:
        footer = file.metadata
        if footer.num_rows != part.rows:
            raise damaged(path, f"it has {footer.num_rows:,} rows, and had {part.rows:,}")
        there = [name for name in columns if name in file.schema_arrow.names]
        if not there:  # rows without columns
            for first in range(start, stop, READ_ROWS):
                yield pa.table({"": pa.nulls(min(READ_ROWS, stop - first))})
            return
        try:
            yield from rows_within(file, there, start, stop, rows)
        except FORMAT_ERRORS as error:
            raise damaged(path, error) from error


def matrix_of(lists: pa.Array, dim: int, path: Path, row: int) -> np.ndarray:
    """float32 (n, dim) of a column of lists; NaN where there is no list or no number.

    Args:
        path, row: where the first of them stands, for the error: InputError `mixed_embeddings` where one is longer or
            shorter.
    """
    lengths = pc.fill_null(pc.list_value_length(lists), dim).to_numpy(zero_copy_only=False)
    if len(other := np.flatnonzero(lengths != dim)):
        raise InputError(
            f"{path}: the vector in row {row + int(other[0]):,} has {int(lengths[other[0]])} numbers, not {dim}",
            next_step="take such rows away",
            code="mixed_embeddings",
        )
    found = np.full((len(lists), dim), np.nan, np.float32)
    there = lists.drop_null()
    found[lists.is_valid().to_numpy(zero_copy_only=False)] = (
        there.flatten().to_numpy(zero_copy_only=False).reshape(len(there), dim)
    )
    return found
