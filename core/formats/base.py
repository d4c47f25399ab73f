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

    def tables(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """These columns of the rows from `start` up to `stop` in order, a bounded number of rows at a time.

        Of the file only what holds these rows is read: a group of rows of it at least. None: up to the last row.
        """
        ...

    def ids(self) -> list[tuple[int, tuple[int, int]]]:
        """Rows, lowest and highest id of each of its groups; empty where it does not say so without being read."""
        ...

    def close(self) -> None:
        """Let the file go."""
        ...


def groups_within(rows: Sequence[int], start: int, stop: int | None) -> Iterator[tuple[int, int, int]]:
    """Which groups of a file hold some of its rows: (number of the group, first row in it, row after the last in it).

    Args:
        rows: how many rows each group has, in order.
        start, stop: the rows from `start` up to `stop` are wanted; None: up to the last one.

    All groups are given where all rows are wanted, also those without any.
    """
    before = 0
    for number, count in enumerate(rows):
        first, last = max(start - before, 0), count if stop is None else min(stop - before, count)
        if first < last or (start == 0 and stop is None):
            yield number, first, last
        before += count
