"""What every kind of part file gives its readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import pyarrow as pa

READ_ROWS = 16_384
"""Most rows of one table where the file itself has no groups: 25 MB of 768-dimensional float16."""

FORMAT_ERRORS = (OSError, pa.ArrowException, KeyError, ValueError, TypeError, RuntimeError)
"""What the libraries raise for a file that is not what it should be."""


class PartFile(Protocol):
    """One open file.

    Attributes:
        rows: number of rows in it.
        schema: its columns as a table has them; its metadata has what the writer noted of the run, as text.

    Opening and reading raise one of `FORMAT_ERRORS` where the file is damaged.
    """

    rows: int
    schema: pa.Schema

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """These columns of all rows in order, a bounded number of rows at a time."""
        ...

    def ids(self) -> list[tuple[int, tuple[int, int]]]:
        """Rows, lowest and highest id of each of its groups; empty where it does not say so without being read."""
        ...

    def close(self) -> None:
        """Let the file go."""
        ...
