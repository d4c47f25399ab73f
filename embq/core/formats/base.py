"""Interface of part files for reading, names of new ones, and what the formats share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from embq.core.errors import OutputError
from embq.core.run.commits import CommittedFile
from embq.core.run.layout import Layout
from embq.core.storage.durable import drop, output_error
from embq.core.storage.paths import Place

READ_ROWS = 16_384
"""Limit of rows of one table where the file itself has no groups: 25 MB of 768-dimensional float16."""

COLUMNS = "embq.columns"
"""Note in a part's file of kind "rows" or in an HDF5 file: its columns in order, as JSON."""

FORMAT_ERRORS = (OSError, pa.ArrowException, KeyError, ValueError, TypeError, RuntimeError)
"""Errors that the libraries raise for a damaged file."""


class PartFile(Protocol):
    """One open file.

    Attributes:
        rows: number of rows in it.
        schema: its columns as a table has them; its metadata has what the writer noted of the run, as text.

    Opening and reading raise one of `FORMAT_ERRORS` if the file is damaged.
    """

    rows: int
    schema: pa.Schema

    def tables(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """These columns of the rows from `start` up to `stop` in order, a bounded number of rows at a time.

        Of the file only what holds these rows is read: a group of rows of it at least. None: up to the last row.
        """
        ...

    def ids(self) -> list[tuple[int, tuple[int, int]]]:
        """Rows, lowest and highest id of each of its groups; empty if it does not say so without being read."""
        ...

    def close(self) -> None:
        """Let the file go."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A finished, closed file under a temporary name, and its entry in the commit record."""

    temporary: Path
    file: CommittedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class PartName:
    """Names of the files of one part.

    Attributes:
        number: that of the record that will name them, so two writers never share a name and no clock or host is in it.
        first_id: id of the first row.
        epoch: of the writer.
        layout: of the output folder.
    """

    number: int
    first_id: int
    epoch: int
    layout: Layout

    def unfinished(self, what: str) -> Path:
        """Path of the unfinished file for `what`. Its suffix is that of no format, so that no reader opens it."""
        return self.layout.temporary / f"part-{self.number:08d}.{self.epoch}.{what}.unfinished"


@contextmanager
def whole_or_none(drafts: Sequence[Path], path: Place) -> Iterator[None]:
    """Remove the unfinished files if the block fails; an OSError becomes the OutputError for `path`."""
    try:
        yield
    except BaseException as error:
        for draft in drafts:
            drop(draft)
        if isinstance(error, OSError):
            raise output_error(error, path) from error
        raise


def slices(table: pa.Table, rows: int) -> Iterator[pa.Table]:
    """`table` in slices of `rows` rows, the last of which may have fewer; nothing is copied."""
    return (table.slice(start, rows) for start in range(0, table.num_rows, rows))


def groups_within(rows: Sequence[int], start: int, stop: int | None) -> Iterator[tuple[int, int, int]]:
    """Groups of a file that hold some of its rows: (number of the group, first row in it, row after the last in it).

    Args:
        rows: how many rows each group has, in order.
        start, stop: the rows from `start` up to `stop` are wanted; None: up to the last one.

    All groups are given where all rows are wanted, also those without any.
    """
    group_start = 0
    for number, count in enumerate(rows):
        first, last = max(start - group_start, 0), count if stop is None else min(stop - group_start, count)
        if first < last or (start == 0 and stop is None):
            yield number, first, last
        group_start += count


def vectors(table: pa.Table, column: str = "embedding") -> np.ndarray:
    """A column of embeddings as stored, an array of shape (rows, width); see `embq.core.rows.vectors.restored`.

    Raises OutputError if a row has no vector: every committed row has one.
    """
    chunks = table[column].chunks or [pa.array([], table[column].type)]
    array = pa.concat_arrays(chunks) if len(chunks) > 1 else chunks[0]  # of one chunk it would be a copy as well
    values = array.flatten()
    dim = array.type.list_size
    if len(values) != dim * len(array) or values.null_count:
        raise OutputError(f"a row without a vector in column {column!r}", code="part_damaged")
    matrix: np.ndarray = values.to_numpy(zero_copy_only=False).reshape(len(array), dim)
    return matrix
