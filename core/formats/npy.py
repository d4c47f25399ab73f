"""Columns of vectors as .npy files. They are read and not mapped: mapped pages would count as memory of the process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tokenize import TokenError

import numpy as np
import pyarrow as pa

from core.formats.base import READ_ROWS


class NpyPart:
    """See `core.formats.base.PartFile`; a matrix of shape (rows, dim) is one column of vectors.

    Args:
        column: its name, which is not in the file.
    """

    def __init__(self, path: Path, column: str) -> None:
        self._path = path
        try:
            matrix = np.load(path, mmap_mode="r", allow_pickle=False)
        except TokenError as error:  # numpy reads the header with Python's own tokeniser
            raise ValueError(f"{path.name} has a damaged header: {error}") from error
        if matrix.ndim != 2 or np.isfortran(matrix):
            raise ValueError(f"{path.name} holds an array of shape {matrix.shape}, which is no list of vectors")
        self.rows, self._dim = matrix.shape
        self._dtype, self._begin = matrix.dtype, int(matrix.offset) if self.rows else 0
        self.schema = pa.schema([pa.field(column, pa.list_(pa.from_numpy_dtype(matrix.dtype), self._dim))])

    def tables(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """See `core.formats.base.PartFile`."""
        (field,) = [self.schema.field(name) for name in columns]
        end = self.rows if stop is None else min(stop, self.rows)
        with open(self._path, "rb") as file:
            file.seek(self._begin + start * self._dim * self._dtype.itemsize)
            for first in range(start, end, READ_ROWS):
                count = min(READ_ROWS, end - first) * self._dim
                numbers = np.fromfile(file, self._dtype, count)
                if len(numbers) != count:
                    raise ValueError(f"{self._path.name} ends too early")
                flat = pa.array(numbers, field.type.value_type)
                lists = pa.FixedSizeListArray.from_arrays(flat, type=field.type)
                yield pa.Table.from_arrays([lists], schema=self.schema)

    def ids(self) -> list[tuple[int, tuple[int, int]]]:
        """See `core.formats.base.PartFile`; it has none."""
        return []

    def close(self) -> None:
        """See `core.formats.base.PartFile`; each reading opens the file for itself."""
