"""Rows files: the vectors of rows as float16, found by id, in files that are mapped into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from indexer.version import Version


class RowsFiles:
    """The rows files of a version.

    Args:
        dim: numbers of a vector.
    """

    def __init__(self, version: Version, dim: int) -> None:
        spans = sorted(version.rows, key=lambda span: span.first_id)
        self._firsts = np.array([span.first_id for span in spans], np.int64)
        self._maps = [
            np.memmap(span.file.check(version.index), np.float16, "r", shape=(span.rows, dim)) for span in spans
        ]
        self._dim = dim

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Vectors of some rows: float32 (n, dim), in their order. IndexError where an id has none."""
        if len(self._maps) == 1:
            return np.asarray(self._maps[0][ids - self._firsts[0]], dtype=np.float32)
        found = np.empty((len(ids), self._dim), np.float32)
        places = np.searchsorted(self._firsts, ids, side="right") - 1
        for place in np.unique(places).tolist():
            mine = places == place
            found[mine] = self._maps[place][ids[mine] - self._firsts[place]]
        return found
