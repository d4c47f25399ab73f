"""Collections of plain files: .npy, parquet or an export in HDF5, in the order of their paths as for autofaiss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embq.core.errors import InputError
from embq.index.collection import hdf5, npy, parquet
from embq.index.collection.columns import Columns, find_columns, identity, without_columns
from embq.index.collection.listing import Listing, Shape, Summary, all_below, file_ref, files_below, same_shape
from embq.index.collection.parts import PartRef, Piece, no_embeddings, path_of
from embq.index.collection.remote import FilePath, each


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFormat:
    """A format of plain files.

    Attributes:
        name: for messages.
        suffixes: endings of the names of its files.
        gap_rows: rows of one file that are at most so far apart are read in one go.
        inspect_file: (path, column of vectors or None) -> what the file holds.
        vectors: (path, part, column, dim, start, stop) -> float32 (m, dim) of the rows from `start` up to `stop`;
            InputError if the file has another shape than it had.
        rows: (path, part, names, start, stop) -> tables of those of the columns that a file of metadata has.
    """

    name: str
    suffixes: tuple[str, ...]
    gap_rows: int
    inspect_file: Callable[[FilePath, str | None], Summary]
    vectors: Callable[[FilePath, PartRef, str, int, int, int], Iterator[np.ndarray]]
    rows: Callable[[FilePath, PartRef, Sequence[str], int, int], Iterator[pa.Table]]


FORMATS = {
    "npy": PlainFormat(
        name=".npy",
        suffixes=(".npy",),
        gap_rows=64,
        inspect_file=npy.inspect_file,
        vectors=npy.vectors,
        rows=parquet.rows_of,  # metadata of .npy files stands in parquet files, if there is any
    ),
    "parquet": PlainFormat(
        name="parquet",
        suffixes=(".parquet",),
        gap_rows=65_536,  # a group of rows can be read as a whole only; this is a usual one
        inspect_file=parquet.inspect_file,
        vectors=parquet.vectors,
        rows=parquet.rows_of,
    ),
    "hdf5": PlainFormat(
        name="HDF5",
        suffixes=(".h5", ".hdf5"),
        gap_rows=1_024,
        inspect_file=hdf5.inspect_file,
        vectors=hdf5.vectors,
        rows=hdf5.rows_of,
    ),
}


def describe_files(
    folder: FilePath, roots: Sequence[FilePath], kind: str, *, column: str | None, id_columns: Sequence[str]
) -> dict[str, Any]:
    """The fields of the collection that the files of one format at or below some paths are, see `Collection`.

    Args:
        folder: that the paths of the parts' files are relative to.

    Raises InputError if there are no rows or no vectors, where two files hold different ones, or where a file lacks
    one of `id_columns`.
    """
    format_ = FORMATS[kind]
    # One of several folders may have nothing yet.
    full = [root for root in roots if root.is_file() or next(iter(all_below(root)), None)] if len(roots) > 1 else roots
    files = [path for root in full or roots for path in files_below(root, format_.suffixes)]
    listing = Listing()
    schemas: list[tuple[FilePath, pa.Schema]] = []
    shape: Shape | None = None
    for path, summary in _inspect(files, format_, column):
        column = summary.column
        if summary.shows_others and len(files) == 1:
            raise InputError(
                f"{path} shows the rows of other files, which are not among these",
                next_step="name the folder with the files that hold the vectors",
                code="not_vectors",
            )
        listing.add(summary.rows, file_ref(folder, path, kind="vectors" if kind == "npy" else "rows"))
        if summary.shape is not None:
            shape = same_shape(shape, summary.shape)
            schemas.append((path, summary.schema))
    if shape is None or column is None:
        raise no_embeddings(
            f"{roots[0]} holds no rows: its {len(files)} {format_.name} files are empty", "name another folder"
        )
    vectors = [column, *(field.name for field in schemas[0][1] if parquet.is_vectors(field.type))]
    return {
        "kind": kind,
        "column": column,
        "output": column.strip("/").replace("/", "_"),
        "dim": shape.dim,
        "fingerprint": shape.fingerprint or None,
        **find_columns(schemas, id_columns, vectors).fields(),
        **listing.fields(),
    }


def _inspect(files: Sequence[FilePath], format_: PlainFormat, column: str | None) -> Iterator[tuple[FilePath, Summary]]:
    """The content of each file; of remote files several at a time, once the column is known."""
    for number, path in enumerate(files):
        if column is not None and not isinstance(path, Path):
            rest = files[number:]
            yield from zip(rest, each(partial(_inspect_file, format_, column), rest, remote=True), strict=True)
            return
        summary = format_.inspect_file(path, column)
        column = summary.column
        yield path, summary


def _inspect_file(format_: PlainFormat, column: str | None, path: FilePath) -> Summary:
    return format_.inspect_file(path, column)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainReader:
    """Reads plain files and the folders of clip-retrieval; see `embq.index.collection.parts.PartReader`."""

    format: PlainFormat
    root: str
    dim: int
    columns: Columns

    def vectors(self, part: PartRef, column: str, start: int, stop: int) -> Iterator[np.ndarray]:
        """See `PartReader`. InputError if the file has another shape than it had."""
        files = [file for file in part.files if file.kind == "vectors"] or part.files
        (file,) = [file for file in files if file.column in ("", column)]
        return self.format.vectors(path_of(self.root, file), part, column, self.dim, start, stop)

    def gap_rows(self, part: PartRef, column: str) -> int:
        """See `PartReader`."""
        return self.format.gap_rows

    def identity(self, pieces: Sequence[Piece]) -> Iterator[pa.Table]:
        """See `PartReader`; keys are FILE:ROW where no column of metadata gives them."""
        names = self.columns.in_files
        for part, start, stop in pieces:
            file, row = part.files[-1], start
            if file.kind == "vectors":
                tables = without_columns(start, stop)
            else:
                tables = self.format.rows(path_of(self.root, file), part, names, start, stop)
            for table in tables:
                yield identity(part.files[0], table, row, self.columns)
                row += table.num_rows
