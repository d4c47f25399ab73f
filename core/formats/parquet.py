"""Parquet files: whole parts, failures, and what is not a vector of the npy format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from core.formats.base import READ_ROWS, groups_within
from core.storage.paths import Place, opened

BUFFER_BYTES = 1 << 20
"""Of each column that is being read. Without it a whole group of rows is in memory, however few of them are wanted."""

BATCH_NUMBERS = 2_000_000
"""Numbers of vectors that are decoded at once: pyarrow makes twelve bytes of levels and pointers for each."""


def batch_rows(numbers: int) -> int:
    """Rows that are decoded at once, with so many numbers of vectors in each."""
    return max(256, min(READ_ROWS, BATCH_NUMBERS // max(numbers, 1)))


class ParquetPart:
    """See `core.formats.base.PartFile`; tables are row groups, or pieces of them where a range of rows is wanted."""

    def __init__(self, path: Place) -> None:
        self._file = pq.ParquetFile(opened(path), buffer_size=BUFFER_BYTES if isinstance(path, Path) else 0)
        self.rows = int(self._file.metadata.num_rows)
        self.schema: pa.Schema = self._file.schema_arrow

    def tables(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """See `core.formats.base.PartFile`."""
        if start == 0 and stop is None:
            for group in range(self._file.num_row_groups):
                yield self._file.read_row_group(group, columns=list(columns)).select(list(columns))
            return
        fields = [self.schema.field(name) for name in columns]
        width = sum(one.type.list_size for one in fields if pa.types.is_fixed_size_list(one.type))
        for piece in rows_within(self._file, columns, start, stop, batch_rows(width)):
            yield piece.select(list(columns))

    def ids(self) -> list[tuple[int, tuple[int, int]]]:
        """See `core.formats.base.PartFile`."""
        found, footer = [], self._file.metadata
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            columns = (group.column(i) for i in range(group.num_columns))
            ids = next((column.statistics for column in columns if column.path_in_schema == "id"), None)
            if ids is None or not ids.has_min_max:
                return []
            found.append((group.num_rows, (ids.min, ids.max)))
        return found

    def close(self) -> None:
        """See `core.formats.base.PartFile`."""
        self._file.close()


def rows_within(
    file: pq.ParquetFile, columns: Sequence[str], start: int, stop: int | None, rows: int
) -> Iterator[pa.Table]:
    """These columns of the rows of a file from `start` up to `stop`, at most `rows` of them at a time.

    Of a group of rows, what is behind the last wanted one is not read.
    """
    footer = file.metadata
    groups = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
    for group, first, last in groups_within(groups, start, stop):
        at = 0
        for batch in file.iter_batches(rows, row_groups=[group], columns=list(columns)):
            a, b = max(first - at, 0), min(last - at, len(batch))
            if a < b:
                yield pa.Table.from_batches([batch.slice(a, b - a)])
            at += len(batch)
            if at >= last:
                break
