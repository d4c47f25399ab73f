"""Parts and failures as parquet files, and the metadata of the npy format."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from embq.core.formats.base import READ_ROWS, Draft, PartName, groups_within, whole_or_none
from embq.core.run.commits import CommittedFile
from embq.core.storage.hashing import HashingFile
from embq.core.storage.paths import Place, opened

BUFFER_BYTES = 1 << 20
"""Buffer of each column that is being read. Without it a whole group of rows is in memory, however few are wanted."""

BATCH_NUMBERS = 2_000_000
"""Numbers of vectors that are decoded at once: pyarrow makes twelve bytes of levels and pointers for each."""

ROW_GROUP_ROWS = 65_536
"""Rows of one row group: 50 MB of 384-dimensional float16, enough to read fast and small enough to skip."""

LARGE_BYTES = 1 << 30
"""A larger group of rows is read in pieces of that size, and no piece has more bytes of repeated texts."""

MOST_FOOTER_BYTES = 1 << 22
"""Limit of the footer of a unit's part: it has a row group for every `ROW_GROUP_ROWS` rows."""

CHUNK_ROWS = 1_000
"""Rows that pyarrow is given at once: it makes twelve bytes of levels and pointers for each number of them."""


class ParquetPart:
    """See `embq.core.formats.base.PartFile`; tables are row groups, or pieces of them for a range of rows.

    Texts that the file tells by a dictionary are read as one, because a small file could become any size by it.
    """

    def __init__(self, path: Place) -> None:
        source, buffer = opened(path), BUFFER_BYTES if isinstance(path, Path) else 0
        peek = pq.ParquetFile(source)
        footer = peek.metadata
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        repeated = {name for group in groups for name in _repeated(group)}
        texts = [field.name for field in peek.schema_arrow if pa.types.is_string(field.type) and field.name in repeated]
        self._file = pq.ParquetFile(source, metadata=footer, buffer_size=buffer, read_dictionary=texts)
        self.rows = int(footer.num_rows)
        self.schema: pa.Schema = peek.schema_arrow
        large = [group for group in groups if group.total_byte_size > LARGE_BYTES]
        self._most_rows = min((max(1, LARGE_BYTES * big.num_rows // big.total_byte_size) for big in large), default=0)

    def tables(self, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """See `embq.core.formats.base.PartFile`."""
        if start == 0 and stop is None and not self._most_rows:
            for group in range(self._file.num_row_groups):
                yield self._decoded(self._file.read_row_group(group, columns=list(columns)), columns)
            return
        fields = [self.schema.field(name) for name in columns]
        width = sum(field.type.list_size for field in fields if pa.types.is_fixed_size_list(field.type))
        rows = batch_rows(width)
        for piece in rows_within(self._file, columns, start, stop, min(rows, self._most_rows or rows)):
            yield self._decoded(piece, columns)

    def _decoded(self, table: pa.Table, columns: Sequence[str]) -> pa.Table:
        """These columns of a table that was read, without dictionaries; ValueError if they would be too large."""
        chunks = [chunk for name in columns for chunk in table[name].chunks if pa.types.is_dictionary(chunk.type)]
        if not chunks:
            return table.select(list(columns))
        import pyarrow.compute as pc  # not above: workers, which only write, would start a tenth slower

        lengths = (pc.binary_length(chunk.dictionary).take(chunk.indices) for chunk in chunks)
        if sum(pc.sum(length).as_py() or 0 for length in lengths) > LARGE_BYTES:
            raise ValueError(f"{table.num_rows} rows of it would have more than {LARGE_BYTES} bytes of repeated texts")
        schema = pa.schema([self.schema.field(name) for name in columns], table.schema.metadata)
        return table.select(list(columns)).cast(schema)

    def ids(self) -> list[tuple[int, tuple[int, int]]]:
        """See `embq.core.formats.base.PartFile`."""
        id_ranges, footer = [], self._file.metadata
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            columns = (group.column(i) for i in range(group.num_columns))
            ids = next((column.statistics for column in columns if column.path_in_schema == "id"), None)
            if ids is None or not ids.has_min_max:
                return []
            id_ranges.append((group.num_rows, (ids.min, ids.max)))
        return id_ranges

    def close(self) -> None:
        """See `embq.core.formats.base.PartFile`."""
        self._file.close()


def _repeated(group: pq.RowGroupMetaData) -> Iterator[str]:
    """The columns of a group of rows that have a dictionary; ValueError if one is delta-encoded."""
    for column in map(group.column, range(group.num_columns)):
        encodings = " ".join(column.encodings)
        if "DELTA" in encodings:
            raise ValueError(
                f"column {column.path_in_schema} is encoded as {encodings}, and embq writes no such column"
            )
        if "DICTIONARY" in encodings:
            yield column.path_in_schema


def batch_rows(numbers: int) -> int:
    """Rows that are decoded at once, with `numbers` numbers of vectors in each."""
    return max(256, min(READ_ROWS, BATCH_NUMBERS // max(numbers, 1)))


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


def unit_of_parquet(file: IO[bytes], names: Sequence[str], most_rows: int) -> tuple[pa.Schema, pa.Table]:
    """See `embq.core.formats.part.read_unit`."""
    file.seek(-8, os.SEEK_END)
    end = file.read(8)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != b"PAR1" or length > MOST_FOOTER_BYTES:
        raise ValueError(f"its footer has {length} bytes, or is none")
    parquet = pq.ParquetFile(file)
    # Vectors are not compressed, so a small file cannot hold many: other columns may become many times as large.
    lists = [field.type for field in parquet.schema_arrow if pa.types.is_fixed_size_list(field.type)]
    row_bytes = max(1, sum(list_type.list_size * list_type.value_type.bit_width // 8 for list_type in lists))
    if (rows := parquet.metadata.num_rows) > min(most_rows, file.seek(0, os.SEEK_END) // row_bytes):
        raise ValueError(f"it has {rows} rows, and {most_rows} were announced, or more than its size can hold")
    return parquet.schema_arrow, parquet.read(columns=list(names), use_threads=False)


def write_rows(table: pa.Table, name: PartName, notes: Mapping[str, str]) -> list[Draft]:
    """Write rows as `parts/part-N.parquet`; see `embq.core.formats.part.write_part`."""
    temporary, path = name.unfinished("rows"), f"parts/part-{name.number:08d}.parquet"
    noted = with_notes(table, notes)
    with whole_or_none([temporary], name.layout.root / path):
        options = encoding(noted.schema)
        return [write_parquet(noted, temporary, options, path=path, kind="rows", first_id=name.first_id)]


def write_failures(table: pa.Table, name: PartName, notes: Mapping[str, str]) -> list[Draft]:
    """Failures as `failures/failures-N.parquet`, whatever the format of the rows; OutputError leaves nothing behind."""
    temporary, path = name.unfinished("failures"), f"failures/failures-{name.number:08d}.parquet"
    noted = with_notes(table, notes)
    with whole_or_none([temporary], name.layout.root / path):
        return [write_parquet(noted, temporary, encoding(noted.schema), path=path, kind="failures")]


def write_parquet(
    table: pa.Table, temporary: Path, options: Mapping[str, Any], *, path: str, kind: str, first_id: int = -1
) -> Draft:
    """Write a table as one closed parquet file, hashing what is written; OSError if that fails.

    Args:
        temporary: name to write under.
        options: of `pyarrow.parquet.write_table`.
        path, kind, first_id: what the record will say of it.
    """
    with open(temporary, "wb") as raw:
        file = HashingFile(raw)
        write_table(table, file, options)
    written = CommittedFile(
        path=path, kind=kind, rows=table.num_rows, bytes=file.size, sha256=file.hexdigest(), first_id=first_id
    )
    return Draft(temporary=temporary, file=written)


def write_table(table: pa.Table, file: HashingFile, options: Mapping[str, Any]) -> None:
    """Write a table as one parquet file; OSError if that fails. See `write_parquet`."""
    chunked = pa.Table.from_batches(table.to_batches(max_chunksize=CHUNK_ROWS), table.schema)
    pq.write_table(chunked, pa.PythonFile(file, mode="w"), **options)


def encoding(schema: pa.Schema) -> dict[str, Any]:
    """Options of `pyarrow.parquet.write_table`: embeddings plain, because they do not compress; the rest with zstd."""
    embeddings = {field.name for field in schema if pa.types.is_fixed_size_list(field.type)}
    other_columns = [field.name for field in schema if field.name not in embeddings]
    return {
        "row_group_size": ROW_GROUP_ROWS,
        "compression": {
            **dict.fromkeys(other_columns, "zstd"),
            **{f"{name}.list.element": "none" for name in embeddings},
        },
        "use_dictionary": [name for name in other_columns if name in ("unit_id", "code")],
        "write_statistics": other_columns,
    }


def with_notes(table: pa.Table, notes: Mapping[str, str]) -> pa.Table:
    """`table` with what its file is to say of the run."""
    return table.replace_schema_metadata({**(table.schema.metadata or {}), **notes})
