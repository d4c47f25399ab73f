"""Collections of HDF5 files: a dataset of vectors, (rows, numbers), and others with a value for each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from core.errors import InputError
from core.formats.base import FORMAT_ERRORS, READ_ROWS
from core.formats.hdf5 import h5py_module
from indexer.collection.columns import Columns, column_in_file, find_columns, identity
from indexer.collection.listing import Listing, Shape, choose_column, file_ref, files_below, noted, same_shape
from indexer.collection.parts import PartRef, Piece, damaged, no_embeddings

SUFFIXES = (".h5", ".hdf5")

GAP_ROWS = 1_024
"""Rows wanted of one file that are so close are read in one go."""


def describe_hdf5(root: Path, *, column: str | None, id_columns: Sequence[str]) -> dict[str, Any]:
    """The fields of the collection that the HDF5 files at or below a path are, see `Collection`.

    Raises InputError where there are no rows or no vectors, where two files hold different ones, or where a file lacks
    one of `id_columns`.
    """
    folder, files = files_below(root, SUFFIXES)
    listing = Listing()
    schemas: list[tuple[Path, pa.Schema]] = []
    shape: Shape | None = None
    for path in files:
        with opened(path) as file:
            if column is None:
                column = choose_column(path, [name for name in file if _is_vectors(file[name])], list(file))
            vectors = _vectors(path, file, column)
            rows = 0 if _shows(vectors, path, files) else len(vectors)
            listing.add(rows, file_ref(folder, path))
            if not rows:
                continue
            dim, dtype = vectors.shape[1], str(vectors.dtype)
            shape = same_shape(shape, Shape(path=path, dim=dim, dtype=dtype, **noted(file.attrs)))
            schemas.append((path, _schema(file, rows)))
    if shape is None:
        raise no_embeddings(f"{root} holds no rows: its {len(files)} HDF5 files are empty", "name another folder")
    columns = find_columns(schemas, id_columns, [str(column)])
    return {
        "kind": "hdf5",
        "column": column,
        "output": str(column).strip("/").replace("/", "_"),
        "dim": shape.dim,
        "fingerprint": shape.fingerprint or None,
        **columns.fields(),
        **listing.fields(),
    }


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An open file for the length of the block; InputError where it cannot be read, also in the block."""
    h5py = h5py_module()
    try:
        with h5py.File(path, "r") as file:
            yield file
    except FORMAT_ERRORS as error:
        raise damaged(path, error) from error


def _is_vectors(dataset: Any) -> bool:
    return getattr(dataset, "ndim", 0) == 2 and dataset.dtype.kind == "f"


def _shows(dataset: Any, path: Path, files: Sequence[Path]) -> bool:
    """Whether a dataset only shows the rows of others of the files, as the file does that joins those of an export."""
    if not dataset.is_virtual:
        return False
    return {path.parent / source.file_name for source in dataset.virtual_sources()} <= set(files) - {path}


def _vectors(path: Path, file: Any, column: str) -> Any:
    if column not in file:
        raise InputError(
            f"{path} has no dataset {column!r}", next_step=f"it has {', '.join(file) or 'none'}", code="no_column"
        )
    dataset = file[column]
    if not _is_vectors(dataset) or not dataset.shape[1]:
        shape, dtype = getattr(dataset, "shape", "a group"), getattr(dataset, "dtype", "datasets")
        raise InputError(
            f"{path}: {column!r} holds {shape} of {dtype}, and not rows of floats",
            next_step="name the dataset of vectors",
            code="not_vectors",
        )
    return dataset


def _schema(file: Any, rows: int) -> pa.Schema:
    """The datasets that have a value for each row."""
    found = []
    for name, dataset in file.items():
        if getattr(dataset, "ndim", 0) == 1 and len(dataset) == rows:
            text = dataset.dtype.kind not in "biuf"
            found.append(pa.field(name, pa.string() if text else pa.from_numpy_dtype(dataset.dtype)))
    return pa.schema(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hdf5Reader:
    """See `indexer.collection.parts.PartReader`."""

    root: Path
    dim: int
    columns: Columns

    def vectors(self, part: PartRef, column: str, start: int, stop: int) -> Iterator[np.ndarray]:
        """See `PartReader`."""
        path = self.root / part.files[0].path
        with opened(path) as file:
            dataset = _vectors(path, file, column)
            if dataset.shape != (part.rows, self.dim):
                raise damaged(path, f"it holds {dataset.shape}, and held {(part.rows, self.dim)}")
            for first in range(start, stop, READ_ROWS):
                yield dataset[first : min(first + READ_ROWS, stop)].astype(np.float32)

    def gap_rows(self, part: PartRef, column: str) -> int:
        """See `PartReader`."""
        return GAP_ROWS

    def identity(self, pieces: Sequence[Piece]) -> Iterator[pa.Table]:
        """See `PartReader`."""
        names = dict.fromkeys([*self.columns.named.values(), *map(column_in_file, self.columns.types)])
        for part, start, stop in pieces:
            (ref,) = part.files
            with opened(self.root / ref.path) as file:
                there = [name for name in names if name in file]
                for first in range(start, stop, READ_ROWS):
                    last = min(first + READ_ROWS, stop)
                    table = pa.table({name: _values(file[name][first:last]) for name in there})
                    rows = table if there else pa.table({"": pa.nulls(last - first)})
                    yield identity(ref, rows, first, self.columns)


def _values(values: np.ndarray) -> pa.Array:
    if values.dtype.kind in "biuf":
        return pa.array(values)
    texts = [value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value) for value in values]
    return pa.array(texts, pa.string())
