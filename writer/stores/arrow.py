"""Parts as Arrow IPC files, uncompressed, so that readers can map them into memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa

from core.run.commits import CommittedFile
from core.run.layout import Layout
from writer.hashing import HashingFile
from writer.stores.base import Draft, PartName, slices, whole_or_none
from writer.stores.parquet import with_notes

BATCH_ROWS = 16_384
"""Rows of one record batch: readers find a row by one division, and hold one batch at a time."""


class ArrowStore:
    """Rows as `parts/part-N.arrow`; see `writer.stores.base.Store`."""

    def write(self, table: pa.Table, name: PartName, notes: Mapping[str, str]) -> list[Draft]:
        """See `writer.stores.base.Store`."""
        temporary, path = name.unfinished("rows"), f"parts/part-{name.number:08d}.arrow"
        noted = with_notes(table, notes)
        with whole_or_none([temporary], name.layout.root / path), open(temporary, "wb") as raw:
            file = HashingFile(raw)
            with pa.ipc.new_file(pa.PythonFile(file, mode="w"), noted.schema) as writer:
                for piece in slices(noted, BATCH_ROWS):
                    writer.write_table(piece.combine_chunks())
        said = CommittedFile(
            path=path,
            kind="rows",
            rows=table.num_rows,
            bytes=file.size,
            sha256=file.hexdigest(),
            first_id=name.first_id,
        )
        return [Draft(temporary=temporary, file=said)]

    def join(self, layout: Layout, files: Iterable[CommittedFile]) -> None:
        """See `writer.stores.base.Store`; readers need nothing but the parts."""
