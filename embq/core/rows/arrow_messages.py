"""Which messages of Arrow's IPC formats are compressed, by their flatbuffers (Arrow's Message.fbs and File.fbs).

pyarrow does not expose it, and decompresses as it reads: a few kB can become gigabytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import IO

END = struct.Struct("<i6s")
"""Length of the footer, and the mark, at the end of a file."""
BLOCK = struct.Struct("<qi4xq")
"""Offset of a message, length of its metadata, and of its body."""
MARK = b"\xff" * 4
"""Before the length of a message's metadata, in files since Arrow 0.15."""
DICTIONARY = 2
"""Type of a message that holds the record batch of a dictionary."""
MOST_BYTES = 64 << 20
"""Of a footer, or of the metadata of a message."""


def is_compressed(metadata: memoryview) -> bool:
    """True if the message of a record batch, or of a dictionary, names a compression."""
    message = _table(metadata, 0)
    header = _table(metadata, _field(metadata, message, 2))
    if metadata[_field(metadata, message, 1)] == DICTIONARY:
        header = _table(metadata, _field(metadata, header, 1))
    return _field(metadata, header, 3) != 0


def refuse_compressed(file: IO[bytes]) -> None:
    """Raise ValueError for an Arrow file of which a message is compressed, or is not where the footer says."""
    try:
        if any(is_compressed(metadata) for metadata in _messages(file)):
            raise ValueError("its record batches are compressed; write it without compression")
    except (struct.error, IndexError) as error:
        raise ValueError(f"its footer is damaged: {error}") from error


def _messages(file: IO[bytes]) -> Iterator[memoryview]:
    """The metadata of the messages that the footer of a file lists."""
    size = file.seek(0, os.SEEK_END)
    length, _ = END.unpack(_part(file, size - END.size, END.size))
    footer = _part(file, size - END.size - length, length)
    for field in (_field(footer, _table(footer, 0), number) for number in (2, 3)):
        vector = _table(footer, field) if field else 0
        for at in range(struct.unpack_from("<I", footer, vector)[0] if field else 0):
            metadata = _part(file, *BLOCK.unpack_from(footer, vector + 4 + at * BLOCK.size)[:2])
            yield metadata[8 if bytes(metadata[:4]) == MARK else 4 :]


def _part(file: IO[bytes], offset: int, size: int) -> memoryview:
    if offset < 0 or not 0 < size <= MOST_BYTES:
        raise ValueError(f"its footer is damaged: {size} bytes at {offset}")
    file.seek(offset)
    return memoryview(file.read(size))


def _table(data: memoryview, at: int) -> int:
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field(data: memoryview, table: int, number: int) -> int:
    """Offset of a field of a flatbuffer's table; 0 where the table lacks it."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    slot = 4 + 2 * number
    if slot + 2 > struct.unpack_from("<H", data, vtable)[0]:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + slot)
    return table + int(offset) if offset else 0
