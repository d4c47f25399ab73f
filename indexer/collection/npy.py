"""Collections of .npy files with a matrix each, in the order of their paths as for autofaiss."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from core.errors import InputError
from core.formats.npy import mapped, read_matrix
from indexer.collection.listing import EMBEDDING, FileLook, Shape
from indexer.collection.parts import PartRef, damaged


def look(path: Path, _column: str | None = None) -> FileLook:
    """Content of a .npy file; InputError where that is no list of vectors."""
    matrix = open_matrix(path)
    shape = Shape(path=path, dim=matrix.shape[1], dtype=str(matrix.dtype)) if len(matrix) else None
    return FileLook(rows=len(matrix), column=EMBEDDING, shape=shape)


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


def vectors(path: Path, part: PartRef, _column: str, dim: int, start: int, stop: int) -> Iterator[np.ndarray]:
    """See `indexer.collection.plain.PlainFormat`."""
    matrix = open_matrix(path)
    if matrix.shape != (part.rows, dim):
        raise damaged(path, f"it holds an array of shape {matrix.shape}, and held one of {(part.rows, dim)}")
    try:
        for rows in read_matrix(path, matrix, start, stop):
            yield rows.astype(np.float32, copy=False)
    except ValueError as error:
        raise damaged(path, error) from error
