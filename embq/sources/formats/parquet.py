"""Kind "parquet": tables whose footer tells the rows, read group by group and page by page."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from embq.sources.formats.tables import TableSource

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".parquet", ".parq", ".pq")

BATCH_BYTES = 32_000_000
"""Target size of a batch in memory: a few images, or a thousand texts."""

BATCH_ROWS = 1024

_BUFFER_BYTES = 1 << 20
"""Bytes of a column that are read at a time; without a bound pyarrow reads a whole column of a row group."""


class ParquetTable:
    """A parquet file that is open."""

    def __init__(self, file: io.BufferedIOBase, path: str) -> None:
        import pyarrow.parquet as pq

        from embq.sources.formats.arrow_values import columns_of

        self._file = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
        self.columns = columns_of(self._file.schema_arrow)
        metadata = self._file.metadata
        self.rows: int = metadata.num_rows
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        # Of whole rows, as asking a damaged file for the size of its columns ends the process.
        self.groups = [(group.num_rows, group.total_byte_size) for group in groups]
        counted = sum(rows for rows, _ in self.groups)
        if counted != self.rows or self.rows < 0:
            raise ValueError(f"its footer says {self.rows} rows, its row groups have {counted}")

    def batches(self, row: int, names: list[str]) -> tuple[int, Iterator[pa.RecordBatch]]:
        """Batches from the row group that holds `row` on."""
        metadata = self._file.metadata
        start = group = 0
        while group < metadata.num_row_groups - 1 and start + metadata.row_group(group).num_rows <= row:
            start += metadata.row_group(group).num_rows
            group += 1
        return start, self._file.iter_batches(
            batch_size=self._batch_rows(group),
            row_groups=list(range(group, metadata.num_row_groups)),
            columns=names,
            use_threads=False,  # read in the calling thread, so that storage errors are raised there
        )

    def _batch_rows(self, group: int) -> int:
        """By the size of whole rows, as asking a damaged file for that of its columns ends the process."""
        if not self._file.metadata.num_row_groups:
            return BATCH_ROWS
        size: int = self._file.metadata.row_group(group).total_byte_size
        rows: int = self._file.metadata.row_group(group).num_rows
        return max(1, min(BATCH_ROWS, BATCH_BYTES * max(1, rows) // max(1, size)))


PARQUET = TableSource("parquet", ParquetTable)
