"""Reads of Arrow messages what pyarrow does not expose: compression, and the batches that a file's footer lists.

They are FlatBuffers tables of Arrow's Message.fbs and File.fbs.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from pyarrow import NativeFile

Block = tuple[int, int, int]
"""A batch in a footer: offset, length of the header with its prefix, length of the body."""

CONTINUATION = b"\xff\xff\xff\xff"
DICTIONARY_BATCH = 2
MOST_BYTES = 64 << 20
"""Of a footer, or of the header of a batch, in a file that embq reads as its own."""

_BLOCK = struct.Struct("<qi4xq")
_TAIL = struct.Struct("<i6s")


def refuse_compressed(file: NativeFile, blocks: Iterable[Block]) -> None:
    """ValueError if one of the batches of a file is compressed: pyarrow decompresses to any size as it reads."""
    for at, length, _ in blocks:
        if length > MOST_BYTES:
            raise ValueError(f"the header of the batch at byte {at} has {length:,} bytes")
        header = file.read_at(length, at)
        try:
            compressed = is_compressed(header[8 if header.startswith(CONTINUATION) else 4 :])
        except struct.error as error:
            raise ValueError(f"the header of the batch at byte {at} is broken") from error
        if compressed:
            raise ValueError(f"the batch at byte {at} is compressed, and embq reads none; write it uncompressed")


def listed_blocks(
    file: IO[bytes] | NativeFile, *, most_bytes: int = MOST_BYTES
) -> tuple[list[Block], list[Block], int]:
    """(dictionary batches, record batches, offset of the footer that lists them).

    Raises ValueError if there is none, or it is larger than `most_bytes`.
    """
    stop = file.seek(0, os.SEEK_END) - _TAIL.size
    file.seek(max(0, stop))
    tail = file.read(_TAIL.size)
    length, magic = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, b"")
    if magic != b"ARROW1" or not 0 < length <= stop:
        raise ValueError("it has no footer, so it may be cut")
    if length > most_bytes:
        raise ValueError(f"its footer has {length:,} bytes, more than {most_bytes:,}")
    file.seek(stop - length)
    footer = file.read(length)
    try:
        dictionaries, batches = _blocks(footer, 2), _blocks(footer, 3)
    except struct.error as error:
        raise ValueError("its footer is broken") from error
    if any(min(block) < 0 or sum(block) > stop - length for block in (*dictionaries, *batches)):
        raise ValueError("its footer lists a batch that is not in the file")
    return dictionaries, batches, stop - length


def is_compressed(metadata: bytes | memoryview) -> bool:
    """True if the header of a record batch or dictionary batch, without its prefix, names a compression.

    Raises ValueError or struct.error if it is damaged.
    """
    message = struct.unpack_from("<I", metadata)[0]
    at, kind = offset(metadata, message, 2), scalar(metadata, message, 1, "<B")
    if at and kind == DICTIONARY_BATCH:
        at = offset(metadata, at + struct.unpack_from("<I", metadata, at)[0], 1)
    if not at:
        raise ValueError("a message without its batch")
    return offset(metadata, at + struct.unpack_from("<I", metadata, at)[0], 3) != 0


def _blocks(footer: bytes, number: int) -> list[Block]:
    at = offset(footer, struct.unpack_from("<I", footer)[0], number)
    if not at:
        return []
    at += struct.unpack_from("<I", footer, at)[0]
    stop = at + 4 + _BLOCK.size * struct.unpack_from("<I", footer, at)[0]
    if stop > len(footer):
        raise ValueError("a list does not fit into the footer")
    return list(_BLOCK.iter_unpack(footer[at + 4 : stop]))


def scalar(data: bytes | memoryview, table: int, number: int, form: str) -> int:
    """A scalar field of a table; 0 if it is left out."""
    at = offset(data, table, number)
    return int(struct.unpack_from(form, data, at)[0]) if at else 0


def offset(data: bytes | memoryview, table: int, number: int) -> int:
    """Offset of a field of a table; 0 if it is left out."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise ValueError("a table's description lies before the message")
    length = struct.unpack_from("<H", data, vtable)[0]
    place = 4 + 2 * number
    entry = struct.unpack_from("<H", data, vtable + place)[0] if place + 2 <= length else 0
    return table + entry if entry else 0
