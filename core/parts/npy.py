"""Columns of vectors as .npy files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tokenize import TokenError

import numpy as np
import pyarrow as pa

from core.parts.base import READ_ROWS


class NpyPart:
    """See `core.parts.base.PartFile`; a matrix of shape (rows, dim) is one column of vectors.

    Args:
        column: its name, which is not in the file.
    """

    def __init__(self, path: Path, column: str) -> None:
        try:
            self._matrix = np.load(path, mmap_mode="r", allow_pickle=False)
        except TokenError as error:  # numpy reads the header with Python's own tokeniser
            raise ValueError(f"{path.name} has a damaged header: {error}") from error
        if self._matrix.ndim != 2 or np.isfortran(self._matrix):
            raise ValueError(f"{path.name} holds an array of shape {self._matrix.shape}, which is no list of vectors")
        self.rows = len(self._matrix)
        value = pa.from_numpy_dtype(self._matrix.dtype)
        self.schema = pa.schema([pa.field(column, pa.list_(value, self._matrix.shape[1]))])

    def tables(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """See `core.parts.base.PartFile`."""
        (field,) = [self.schema.field(name) for name in columns]
        end = self.rows if stop is None else min(stop, self.rows)
        for first in range(start, end, READ_ROWS):
            piece = np.array(self._matrix[first : min(first + READ_ROWS, end)])
            flat = pa.array(piece.reshape(-1), field.type.value_type)
            yield pa.Table.from_arrays([pa.FixedSizeListArray.from_arrays(flat, type=field.type)], schema=self.schema)

    def ids(self) -> list[tuple[int, tuple[int, int]]]:
        """See `core.parts.base.PartFile`; it has none."""
        return []

    def close(self) -> None:
        """See `core.parts.base.PartFile`."""
        del self._matrix
