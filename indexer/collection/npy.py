"""Collections of .npy files with a matrix each, in the order of their paths as for autofaiss."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from core.errors import InputError
from core.formats.base import READ_ROWS
from core.formats.npy import mapped, read_matrix
from indexer.collection.columns import Columns
from indexer.collection.listing import Listing, Shape, file_ref, files_below, rows_of_file, same_shape
from indexer.collection.parquet import identity_rows
from indexer.collection.parts import PartRef, Piece, damaged, no_embeddings

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
        array = mapped(path)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NpyReader:
    """Reads plain .npy files and the folders of clip-retrieval; see `indexer.collection.parts.PartReader`."""

    root: Path
    dim: int
    columns: Columns

    def vectors(self, part: PartRef, column: str, start: int, stop: int) -> Iterator[np.ndarray]:
        """See `PartReader`. InputError where the file holds an array of another shape than it did."""
        (file,) = [file for file in part.files if file.kind == "vectors" and file.column in ("", column)]
        path = self.root / file.path
        matrix = open_matrix(path)
        if matrix.shape != (part.rows, self.dim):
            raise damaged(path, f"it holds an array of shape {matrix.shape}, and held one of {(part.rows, self.dim)}")
        try:
            for rows in read_matrix(path, matrix, start, stop):
                yield rows.astype(np.float32, copy=False)
        except ValueError as error:
            raise damaged(path, error) from error

    def gap_rows(self, part: PartRef, column: str) -> int:
        """See `PartReader`."""
        return GAP_ROWS

    def identity(self, pieces: Sequence[Piece]) -> Iterator[pa.Table]:
        """See `PartReader`; keys are FILE:ROW where no metadata file gives them."""
        for part, start, stop in pieces:
            if part.files[-1].kind == "rows":
                yield from identity_rows(self.root, part, self.columns, start, stop)
                continue
            for first in range(start, stop, READ_ROWS):
                yield rows_of_file(part.files[0], first, min(first + READ_ROWS, stop))
