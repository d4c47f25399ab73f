"""Parquet files: whole parts, failures, and what is not a vector of the npy format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from core.objects import Place, opened
from core.parts.base import groups_within


class ParquetPart:
    """See `core.parts.base.PartFile`; tables are row groups."""

    def __init__(self, path: Place) -> None:
        self._file = pq.ParquetFile(opened(path))
        self.rows = int(self._file.metadata.num_rows)
        self.schema: pa.Schema = self._file.schema_arrow

    def tables(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """See `core.parts.base.PartFile`."""
        footer = self._file.metadata
        rows = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
        for group, first, last in groups_within(rows, start, stop):
            table = self._file.read_row_group(group, columns=list(columns)).select(list(columns))
            yield table.slice(first, last - first)

    def ids(self) -> list[tuple[int, tuple[int, int]]]:
        """See `core.parts.base.PartFile`."""
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
        """See `core.parts.base.PartFile`."""
        self._file.close()
