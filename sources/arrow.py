"""Kind "arrow": IPC files and streams, as .arrow, .feather and the `datasets` library's folders have them.

The headers of the messages tell how many rows each batch has, so planning reads no batch.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from core.errors import SourceError
from sources.tables import TableSource

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".arrow", ".feather", ".ipc", ".arrows")

_MAGIC = b"ARROW1"
_FILE_START = 8
_CONTINUATION = b"\xff\xff\xff\xff"
_SCHEMA, _DICTIONARY_BATCH, _RECORD_BATCH = 1, 2, 3
_HEADER_MAX_BYTES = 256_000_000
"""A longer header is taken for damage; headers grow with the columns, not with the rows."""


class ArrowTable:
    """An IPC file or stream that is open."""

    def __init__(self, file: io.BufferedIOBase, path: str) -> None:
        from pyarrow import ipc

        from sources.batches import columns_of

        self._file = file
        self._path = path
        self._is_file = file.read(len(_MAGIC)) == _MAGIC
        self._batches, self._has_dictionaries = walk(file, _FILE_START if self._is_file else 0, path, self._is_file)
        self.rows = sum(rows for _, rows in self._batches)
        ends = [at for at, _ in self._batches[1:]] + [file.seek(0, os.SEEK_END)]
        self.groups = [(rows, end - at) for (at, rows), end in zip(self._batches, ends, strict=False)]
        file.seek(0)
        self._reader = ipc.open_file(file) if self._is_file else ipc.open_stream(file)
        self._schema: pa.Schema = self._reader.schema
        self.columns = columns_of(self._schema)
        if self._is_file and self._reader.num_record_batches != len(self._batches):
            raise ValueError(
                f"{self._reader.num_record_batches} batches in the footer, {len(self._batches)} in the file"
            )

    def batches(self, row: int, names: list[str]) -> tuple[int, Iterator[pa.RecordBatch]]:
        """Batches from the one that holds `row` on; a batch is the least that can be read."""
        start = number = 0
        while number < len(self._batches) - 1 and start + self._batches[number][1] <= row:
            start += self._batches[number][1]
            number += 1
        if not self._is_file and self._has_dictionaries:
            return 0, _checked(self._reader)  # dictionaries may change on the way
        return start, _checked(self._from(number, names))

    def _from(self, number: int, names: list[str]) -> Iterator[pa.RecordBatch]:
        from pyarrow import ipc

        if self._is_file:
            fields = [self._schema.get_field_index(name) for name in names]
            options = ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            self._file.seek(0)
            reader = ipc.open_file(self._file, options=options)
            for i in range(number, len(self._batches)):
                yield reader.get_batch(i)
            return
        for at, _ in self._batches[number:]:
            self._file.seek(at)
            yield ipc.read_record_batch(ipc.read_message(self._file), self._schema)


def _checked(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches, none of which leads out of itself."""
    from sources.batches import check

    for batch in batches:
        check(batch)
        yield batch


def walk(file: io.BufferedIOBase, at: int, path: str, is_file: bool) -> tuple[list[tuple[int, int]], bool]:
    """(offset, rows) of each record batch, and whether there are dictionaries.

    Raises SourceError `table_damaged` where a message does not fit into the file, or a stream has no end marker: it
    may be cut between two batches.
    """
    size = file.seek(0, os.SEEK_END)
    found: list[tuple[int, int]] = []
    dictionaries = False
    while True:
        file.seek(at)
        prefix = file.read(4)
        start = at + 4
        if prefix == _CONTINUATION:  # what is older than 2019 has none
            prefix = file.read(4)
            start = at + 8
        if len(prefix) < 4:
            raise _damaged(path, "it has no end marker, so it may be cut", at)
        length = int.from_bytes(prefix, "little", signed=True)
        if length == 0:
            if not is_file and start != size:
                raise _damaged(path, "there is data behind its end", start)
            return found, dictionaries
        if not 0 < length <= min(_HEADER_MAX_BYTES, size - start):
            raise _damaged(path, "a message does not fit into it", at)
        try:
            kind, rows, body = _header(file.read(length))
        except (struct.error, ValueError) as error:
            raise _damaged(path, "a message has a broken header", at) from error
        if body < 0 or rows < 0 or start + length + body > size:
            raise _damaged(path, "it is cut inside a message", at)
        if kind == _RECORD_BATCH:
            found.append((at, rows))
        dictionaries = dictionaries or kind == _DICTIONARY_BATCH
        at = start + length + body


def _header(data: bytes) -> tuple[int, int, int]:
    """Type, rows (of a record batch) and body length of a message: a FlatBuffers table of Arrow's Message.fbs."""
    message = struct.unpack_from("<I", data)[0]
    kind = _field(data, message, 1, "<B")
    if kind not in (_SCHEMA, _DICTIONARY_BATCH, _RECORD_BATCH):
        raise ValueError(f"a message of type {kind}")
    rows = 0
    if kind == _RECORD_BATCH:
        at = _offset(data, message, 2)
        if not at:
            raise ValueError("a batch without description")
        batch = at + struct.unpack_from("<I", data, at)[0]
        rows = _field(data, batch, 0, "<q")
        nodes = _offset(data, batch, 1)
        count, first = struct.unpack_from("<Iq", data, nodes + struct.unpack_from("<I", data, nodes)[0])
        if not nodes or not count or first != rows:
            raise ValueError("a batch and its first column differ in length")
    return kind, rows, _field(data, message, 3, "<q")


def _field(data: bytes, table: int, number: int, form: str) -> int:
    """A scalar field of a FlatBuffers table; 0 where it is left out."""
    at = _offset(data, table, number)
    return int(struct.unpack_from(form, data, at)[0]) if at else 0


def _offset(data: bytes, table: int, number: int) -> int:
    """Where a field of a table stands, or 0."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise ValueError("a table's description lies before the message")
    length = struct.unpack_from("<H", data, vtable)[0]
    place = 4 + 2 * number
    entry = struct.unpack_from("<H", data, vtable + place)[0] if place + 2 <= length else 0
    return table + entry if entry else 0


def _damaged(path: str, what: str, at: int) -> SourceError:
    return SourceError(f"{path}: {what} (at byte {at})", code="table_damaged", next_step="copy or write the file again")


ARROW = TableSource("arrow", ArrowTable)
