"""Parts as uncompressed Arrow IPC files, which readers can map into memory.

Here they are read and not mapped: mapped pages would count as memory of the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pyarrow as pa

from embq.core.formats.base import Draft, PartName, groups_within, slices, whole_or_none
from embq.core.formats.parquet import with_notes
from embq.core.rows.arrow_messages import listed_blocks, refuse_compressed
from embq.core.run.commits import CommittedFile
from embq.core.storage.hashing import HashingFile

BATCH_ROWS = 16_384
"""Rows of one record batch: readers find a row by one division, and hold one batch at a time."""


class ArrowPart:
    """See `embq.core.formats.base.PartFile`; tables are record batches.

    Each batch is validated before it is handed out: offsets of a damaged file would lead out of its memory. ValueError
    if one is compressed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with pa.OSFile(str(path)) as file:
            _check_uncompressed(file)
        with self._open() as reader:
            self.schema: pa.Schema = reader.schema
        with self._open(self.schema.names[:1]) as reader:  # with all columns, it would read the whole file
            self._batches = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
        self.rows = sum(self._batches)

    def _open(self, columns: Sequence[str] | None = None) -> pa.ipc.RecordBatchFileReader:
        if columns is None:
            return pa.ipc.open_file(pa.OSFile(str(self._path)))
        fields = [self.schema.get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=sorted(fields))
        return pa.ipc.open_file(pa.OSFile(str(self._path)), options=options)

    def tables(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """See `embq.core.formats.base.PartFile`."""
        with self._open(columns) as reader:
            for number, first, last in groups_within(self._batches, start, stop):
                batch = reader.get_batch(number)
                batch.validate(full=True)
                yield pa.Table.from_batches([batch.select(list(columns)).slice(first, last - first)])

    def ids(self) -> list[tuple[int, tuple[int, int]]]:
        """See `embq.core.formats.base.PartFile`; the first and the last id of each batch."""
        with self._open(["id"]) as reader:
            ids = [reader.get_batch(number)["id"] for number in range(reader.num_record_batches)]
            return [(len(column), (column[0].as_py(), column[-1].as_py())) for column in ids]

    def close(self) -> None:
        """See `embq.core.formats.base.PartFile`; each reading opens the file for itself."""


def write_arrow(table: pa.Table, name: PartName, notes: Mapping[str, str]) -> list[Draft]:
    """Write rows as `parts/part-N.arrow`; see `embq.core.formats.part.write_part`."""
    temporary, path = name.unfinished("rows"), f"parts/part-{name.number:08d}.arrow"
    noted = with_notes(table, notes)
    with whole_or_none([temporary], name.layout.root / path), open(temporary, "wb") as raw:
        file = HashingFile(raw)
        write_batches(noted, file)
    written = CommittedFile(
        path=path,
        kind="rows",
        rows=table.num_rows,
        bytes=file.size,
        sha256=file.hexdigest(),
        first_id=name.first_id,
    )
    return [Draft(temporary=temporary, file=written)]


def unit_of_arrow(file: IO[bytes], names: Sequence[str], most_rows: int) -> tuple[pa.Schema, pa.Table]:
    """See `embq.core.formats.part.read_unit`."""
    _check_uncompressed(pa.PythonFile(file, mode="r"))
    schema = pa.ipc.open_file(file).schema
    options = pa.ipc.IpcReadOptions(included_fields=sorted(schema.get_field_index(name) for name in names))
    reader, batches, rows = pa.ipc.open_file(file, options=options), [], 0
    for number in range(reader.num_record_batches):
        batches.append(reader.get_batch(number))
        if (rows := rows + len(batches[-1])) > most_rows or len(batches[-1]) > BATCH_ROWS:
            raise ValueError(f"it has {rows} rows, and {most_rows} were announced, or too many in one batch")
    return schema, pa.Table.from_batches(batches, reader.schema).select(list(names))


def _check_uncompressed(file: pa.NativeFile) -> None:
    dictionaries, batches, _ = listed_blocks(file)
    refuse_compressed(file, [*dictionaries, *batches])


def write_batches(table: pa.Table, file: HashingFile) -> None:
    """Write a table as one Arrow IPC file; OSError if that fails."""
    with pa.ipc.new_file(pa.PythonFile(file, mode="w"), table.schema) as writer:
        for piece in slices(table, BATCH_ROWS):
            writer.write_table(piece.combine_chunks())
