"""Collections of .npy files with a matrix each, in the order of their paths as for autofaiss."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embq.core.errors import InputError
from embq.core.formats.base import READ_ROWS
from embq.core.formats.npy import mapped, read_header, read_matrix
from embq.index.collection.listing import EMBEDDING, Shape, Summary
from embq.index.collection.parts import PartRef, damaged
from embq.index.collection.remote import FilePath, RemotePath, require_same

HEADER_BYTES = 4_096
"""Bytes of the request for a header, which has 128 as numpy writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMatrix:
    """The shape of the matrix in a remote file, and the offset of its first number."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    def __len__(self) -> int:
        return self.shape[0]


def inspect_file(path: FilePath, _column: str | None = None) -> Summary:
    """Content of a .npy file; InputError if that is no list of vectors."""
    matrix = open_matrix(path)
    shape = Shape(path=path, dim=matrix.shape[1], dtype=str(matrix.dtype)) if len(matrix) else None
    return Summary(rows=len(matrix), column=EMBEDDING, shape=shape)


def open_matrix(path: FilePath) -> np.ndarray | RemoteMatrix:
    """The matrix in a file, mapped into memory, or its header where the file is remote.

    Raises InputError if the file holds anything else than rows of floats.
    """
    why = ""
    try:
        if (os.path.getsize(path) if isinstance(path, Path) else path.status().st_size) == 0:
            return np.empty((0, 0), np.float32)
        array, fortran = (mapped(path), None) if isinstance(path, Path) else _header(path)
    except (OSError, ValueError, SyntaxError, TypeError, EOFError) as error:
        raise damaged(path, error) from error
    if fortran is None:
        fortran = isinstance(array, np.ndarray) and np.isfortran(array)
    if not isinstance(array, np.ndarray | RemoteMatrix):
        why = "it is an archive of several arrays"
    elif array.shape[:1] == (0,):  # what numpy writes of an empty list is (0,)
        return np.empty((0, 0), np.float32)
    elif len(array.shape) != 2:
        why = f"it holds an array of shape {array.shape}, and not one of rows and numbers"
    elif array.dtype.kind != "f":
        why = f"it holds {array.dtype}, and not floats"
    elif fortran:
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


def _header(path: RemotePath) -> tuple[RemoteMatrix, bool]:
    """The shape of the array in a remote file, and whether it is in Fortran order; ValueError if it is damaged."""
    size = path.status().st_size
    with path.open(0, 0, HEADER_BYTES) as file:
        shape, fortran, dtype = read_header(file)
        matrix = RemoteMatrix(shape=shape, dtype=dtype, offset=file.tell())
    if (needed := matrix.offset + math.prod(shape) * dtype.itemsize) > size:
        raise ValueError(f"it has {size:,} bytes, and its header describes {needed:,}")
    return matrix, fortran


def vectors(path: FilePath, part: PartRef, _column: str, dim: int, start: int, stop: int) -> Iterator[np.ndarray]:
    """See `embq.index.collection.plain.PlainFormat`."""
    matrix = open_matrix(path)
    if matrix.shape != (part.rows, dim):
        raise damaged(path, f"it holds an array of shape {matrix.shape}, and held one of {(part.rows, dim)}")
    try:
        if isinstance(matrix, RemoteMatrix):
            assert isinstance(path, RemotePath)
            batches = _read_rows(path, matrix, start, stop)
        else:
            assert isinstance(path, Path)
            batches = read_matrix(path, matrix, start, stop)
        for rows in batches:
            yield rows.astype(np.float32, copy=False)
    except (ValueError, OSError) as error:
        raise damaged(path, error) from error


def _read_rows(path: RemotePath, matrix: RemoteMatrix, start: int, stop: int) -> Iterator[np.ndarray]:
    """As `embq.core.formats.npy.read_matrix`, of a remote file."""
    dim, width = matrix.shape[1], matrix.shape[1] * matrix.dtype.itemsize
    first, last = matrix.offset + start * width, matrix.offset + stop * width
    with path.open(first, last) as file:
        file.seek(first)
        for row in range(start, stop, READ_ROWS):
            numbers = np.empty((min(READ_ROWS, stop - row), dim), matrix.dtype)
            if file.readinto(numbers.view(np.uint8).data) != numbers.nbytes:
                raise ValueError("it ends too early")
            yield numbers
    require_same(path)
