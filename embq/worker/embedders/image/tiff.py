"""Header of the first page of a TIFF, read before anything is decoded.

TIFF 6.0, section 2, and BigTIFF. Pillow makes an object of each tile, and a number of each value of a tag, while it
opens a file; and it allocates a tile as large as the file says, however small the picture. So a file of a few megabytes
can take gigabytes, which its picture's size does not tell.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""First bytes, of both byte orders: TIFF and BigTIFF."""

COMPRESSIONS = {
    1: "none",
    2: "CCITT",
    3: "CCITT group 3",
    4: "CCITT group 4",
    5: "LZW",
    7: "JPEG",
    8: "deflate",
    32773: "PackBits",
    32946: "deflate",
}
"""Compressions that are decoded: those of cameras, scanners and common programs. The others are rare, and each is one
more decoder that hostile bytes can reach; that of LZMA takes as much memory as the file asks for."""

VALUES_MAX = 1_000_000
"""Numbers in all tags together, each of which takes 36 bytes in Python; a picture of 32 MP in tiles of 16x16 pixels
needs 250,000."""

WIDTH, HEIGHT, COMPRESSION, TILE_WIDTH, TILE_HEIGHT = 256, 257, 259, 322, 323
_SIZES = {WIDTH, HEIGHT, COMPRESSION, TILE_WIDTH, TILE_HEIGHT}
_FOLDERS = {0x8769, 0x8825, 0xA005}
"""Tags that point to further tags, which Pillow reads as well: EXIF, GPS, interoperability."""

_OF_THE_PICTURE = range(254, 533)
"""Tags without which a picture is another one; Pillow warns of those that are cut, and goes on."""

_BYTES = (1, 2, 6, 7)
"""Types of bytes and text, which stay one object however long they are."""

_NUMBERS = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q", 18: "Q"}
_LENGTHS = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}


class Page(NamedTuple):
    """First page of a TIFF: its size and that of its tiles in pixels, and its compression.

    Attributes:
        compression: the number of TIFF; 1 is none.
        values: numbers in all tags.
    """

    size: tuple[int, int]
    tile: tuple[int, int]
    compression: int
    values: int


def first_page(data: bytes) -> Page:
    """Header of the first page of a TIFF; EOFError if it ends before, ValueError if it is damaged."""
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    (at,) = _unpack(order + "Q", data, 8) if big else _unpack(order + "I", data, 4)
    tags: dict[int, int] = {}
    values, visited, folders = 0, {at}, [at]
    while folders:
        folder = folders.pop()
        for tag, kind, count, value in _entries(data, folder, order, big):
            values += 0 if kind in _BYTES else min(count, len(data) // _LENGTHS.get(kind, 1))
            if tag in _FOLDERS and value is not None and value not in visited:
                visited.add(value)
                folders.append(value)
            if folder == at and tag in _SIZES:
                if value is None or tag in tags:
                    # Pillow takes the last of two, and libtiff, which decodes, the first.
                    raise ValueError(f"tag {tag} of the TIFF has no value, or two")
                tags[tag] = value
    if WIDTH not in tags or HEIGHT not in tags:
        raise ValueError("the TIFF does not say its size")
    size = (tags[WIDTH], tags[HEIGHT])
    tile = (tags.get(TILE_WIDTH, 1), tags.get(TILE_HEIGHT, 1))
    return Page(size, tile, tags.get(COMPRESSION, 1), values)


def ends_behind(tags: Mapping[int, Any], length: int) -> bool:
    """Whether a strip or tile of a page with these tags ends behind `length` bytes."""
    for offsets, lengths in ((273, 279), (324, 325)):
        places = zip(tags.get(offsets, ()), tags.get(lengths, ()), strict=False)
        if any(start + size > length for start, size in places):
            return True
    return False


def _entries(data: bytes, at: int, order: str, big: bool) -> Iterator[tuple[int, int, int, int | None]]:
    """(tag, type, count, value) of each entry of a folder of tags; the value only of a single whole number."""
    (number,) = _unpack(order + ("Q" if big else "H"), data, at)
    at += 8 if big else 2
    if number > 65_535:
        raise ValueError("the TIFF has more tags than there are")
    room = 8 if big else 4
    for _ in range(number):
        tag, kind, count = _unpack(order + ("HHQ" if big else "HHI"), data, at)
        at += 4 + room
        form = _NUMBERS.get(kind, "")
        length = count * _LENGTHS.get(kind, 1)
        if length > room and tag in _OF_THE_PICTURE:
            (start,) = _unpack(order + ("Q" if big else "I"), data, at)
            if start + length > len(data):
                raise EOFError(f"the TIFF ends before the values of its tag {tag}")
        fits = form and count == 1 and struct.calcsize(order + form) <= room
        yield tag, kind, count, _unpack(order + form, data, at)[0] if fits else None
        at += room


def _unpack(form: str, data: bytes, at: int) -> tuple[int, ...]:
    try:
        return struct.unpack_from(form, data, at)
    except (struct.error, OverflowError) as error:
        raise EOFError("the TIFF ends before its first page is described") from error
