"""Folders of .npy files as autofaiss takes them: a matrix in each, in the order of their paths."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from core.errors import InputError
from core.formats.base import READ_ROWS
from indexer.collection.listing import Listing, Shape, file_ref, files_below, rows_of_file, same_shape
from indexer.collection.parts import PartRef, damaged, no_embeddings, span_rows

if TYPE_CHECKING:
    from indexer.collection.collection import Collection

SUFFIXES = (".npy",)

GAP_ROWS = 64
"""Rows wanted of one file that are so close are read in one go."""


def describe_npy(root: Path) -> dict[str, Any]:
    """The fields of the collection that the .npy files at or below a path are, see `Collection`.

    Raises InputError where there are no rows, where a file holds no vectors, or where two hold different ones.
    """
    folder, files = files_below(root, SUFFIXES)
    listing = Listing()
    shape: Shape | None = None
    for path in files:
        matrix = open_matrix(path)
        if len(matrix):
            shape = same_shape(shape, Shape(path=path, dim=matrix.shape[1], dtype=str(matrix.dtype)))
        listing.add(len(matrix), file_ref(folder, path, kind="vectors"))
    if shape is None:
        raise no_embeddings(f"{root} holds no rows: its {len(files)} .npy files are empty", "name another folder")
    return {
        "kind": "npy",
        "column": "embedding",
        "output": "embedding",
        "dim": shape.dim,
        **listing.fields(),
    }


def open_matrix(path: Path) -> np.ndarray:
    """The matrix in a file, mapped into memory; InputError where it holds anything else than rows of floats."""
    try:
        if os.path.getsize(path) == 0:
            return np.empty((0, 0), np.float32)
        # numpy's own parser; nothing that a file says is executed.
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except TokenError as error:  # numpy reads the header with Python's own tokeniser
        raise damaged(path, f"its header is damaged: {error}") from error
    except (OSError, ValueError, SyntaxError, TypeError, EOFError) as error:
        raise damaged(path, error) from error
    why = ""
    if not isinstance(array, np.ndarray):
        why = "it is an archive of several arrays"
    elif array.ndim != 2:
        why = f"it holds an array of shape {array.shape}, and not one of rows and numbers"
    elif array.dtype.kind != "f":
        why = f"it holds {array.dtype}, and not floats"
    elif np.isfortran(array):
        why = "its numbers are in Fortran order, column by column"
    elif len(array) and not array.shape[1]:
        why = "its vectors have no numbers"
    if why:
        raise InputError(
            f"{path} is no list of vectors: {why}",
            next_step="write it as a C-ordered matrix of float16 or float32, or take it away",
            code="not_vectors",
        )
    return array


@dataclass(slots=True)
class NpyReader:
    """See `indexer.collection.parts.PartReader`."""

    collection: Collection

    def vectors(self, part: PartRef, column: str, start: int, stop: int) -> Iterator[np.ndarray]:
        """See `PartReader`."""
        (file,) = part.files
        yield from matrix_rows(Path(self.collection.root) / file.path, part, self.collection.dim, start, stop)

    def rows_at(self, part: PartRef, column: str, rows: np.ndarray) -> np.ndarray:
        """See `PartReader`."""
        return span_rows(self, part, column, rows, self.collection.dim, GAP_ROWS)

    def prepare(self, pieces: Sequence[tuple[PartRef, int, int]]) -> None:
        """See `PartReader`; there is nothing to do."""

    def identity(self, part: PartRef, start: int, stop: int) -> Iterator[pa.Table]:
        """See `PartReader`; keys are FILE:ROW."""
        (file,) = part.files
        for first in range(start, stop, READ_ROWS):
            yield rows_of_file(file, first, min(first + READ_ROWS, stop))


def matrix_rows(path: Path, part: PartRef, dim: int, start: int, stop: int) -> Iterator[np.ndarray]:
    """float32 (m, dim) of the rows from `start` up to `stop` of a file, a bounded number at a time.

    They are read, not mapped: pages of a file that is mapped count as memory of the process while it is read.
    InputError where the file holds an array of another shape than it did.
    """
    matrix = open_matrix(path)
    if matrix.shape != (part.rows, dim):
        raise damaged(path, f"it holds an array of shape {matrix.shape}, and held one of {(part.rows, dim)}")
    dtype, begin = matrix.dtype, int(getattr(matrix, "offset", 0))
    del matrix
    with open(path, "rb") as file:
        file.seek(begin + start * dim * dtype.itemsize)
        for first in range(start, stop, READ_ROWS):
            rows = min(READ_ROWS, stop - first)
            numbers = np.fromfile(file, dtype, rows * dim)
            if len(numbers) != rows * dim:
                raise damaged(path, "it ends too early")
            yield numbers.reshape(rows, dim).astype(np.float32, copy=False)
