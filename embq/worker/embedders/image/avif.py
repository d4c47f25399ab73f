"""Coded frame sizes of an AVIF, read before anything is decoded.

An AVIF is an ISO box file around AV1. Its boxes say how large the picture is, and its AV1 sequence headers how large
the frames are that a decoder allocates; where the two differ, libavif scales. So a file that calls itself 10x10 may
hold a frame of 268 MP in a few kilobytes. Here all frames that a reader of the first picture may come to are looked
at: those of each coded item, and of the first sample of each track.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import NamedTuple

BRANDS = (b"avif", b"avis", b"mif1", b"msf1")
"""Brands in the "ftyp" box of files that are taken for AVIF."""

UNITS_MAX = 1_000
"""Open bitstream units of one coded item or sample that are looked at; an encoder writes 2 to 10."""

ITEMS_MAX = 5_000
"""Coded items that are looked at: a grid has a tile of 64x64 pixels at the least, or there are layers."""

SEQUENCE_HEADER = 1
"""Type of unit, AV1 specification 6.2.2."""


class Range(NamedTuple):
    """Bytes of the file."""

    start: int
    stop: int


def is_avif(data: bytes) -> bool:
    """Whether the first box says so."""
    return data[4:8] == b"ftyp" and data[8:12] in BRANDS


def coded_sizes(data: bytes) -> Iterator[tuple[int, int]]:
    """(width, height) of the largest frame that each coded item may hold, as its sequence header says.

    A header that allows frames of other sizes than its own counts as large as it allows, which with the headers that
    encoders write is less than twice as wide and high. Raises ValueError if the boxes or headers are damaged, or
    if there is nothing coded.
    """
    looked_at = 0
    number = 0
    for number, stream in enumerate(itertools.chain(_items(data), _samples(data)), 1):
        looked_at += len(stream)
        if number > ITEMS_MAX or looked_at > 2 * len(data):
            raise ValueError("the AVIF has very many coded pictures, or ones that overlap")
        sizes = list(_sequence_sizes(stream))
        if not sizes:
            raise ValueError("a coded picture of the AVIF does not say its size")
        yield from sizes
    if not number:
        raise ValueError("the AVIF holds no coded picture")


def is_cut(data: bytes) -> bool:
    """Whether one of the outer boxes goes on behind the end, or there are no pictures yet."""
    at, kinds = 0, set()
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if size == 1 and at + 16 <= len(data):
            (size,) = struct.unpack_from(">Q", data, at + 8)
        kinds.add(kind)
        at = len(data) if size < 8 else at + size
    return at != len(data) or not {b"meta", b"moov"} & kinds or b"mdat" not in kinds


# --- boxes, ISO/IEC 14496-12 ---


def _boxes(data: bytes, within: Range) -> Iterator[tuple[bytes, Range]]:
    """(type, content) of the boxes there."""
    at = within.start
    while at + 8 <= within.stop:
        size, kind = struct.unpack_from(">I4s", data, at)
        head = 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, at + 8)
            head = 16
        stop = within.stop if size == 0 else min(at + size, within.stop)
        if stop < at + head:
            raise ValueError("a box of the AVIF is damaged")
        yield kind, Range(at + head, stop)
        at = stop


def _inside(data: bytes, within: Range, *path: bytes) -> Iterator[Range]:
    """Contents of the boxes at a path of types."""
    if not path:
        yield within
        return
    for kind, content in _boxes(data, within):
        if kind == path[0]:
            # `meta` has a version and flags in front of its boxes.
            start = content.start + (4 if kind == b"meta" else 0)
            yield from _inside(data, Range(start, content.stop), *path[1:])


class _Reader:
    """Whole numbers, one after the other, big end first; ValueError behind the end."""

    def __init__(self, data: bytes, within: Range) -> None:
        self._data = data
        self._at, self._stop = within

    def read_int(self, length: int) -> int:
        value = self.take_bytes(length)
        return int.from_bytes(value, "big")

    def take_bytes(self, length: int) -> bytes:
        if self._at + length > self._stop:
            raise ValueError("a box of the AVIF is cut")
        self._at += length
        return self._data[self._at - length : self._at]


def _items(data: bytes) -> Iterator[bytes]:
    """The AV1 bytes of each coded item."""
    for meta in _inside(data, Range(0, len(data)), b"meta"):
        coded = {item for item, kind in _item_types(data, meta) if kind == b"av01"}
        idat = next(_inside(data, meta, b"idat"), Range(0, 0))
        for box in _inside(data, meta, b"iloc"):
            for item, in_idat, extents in _locations(_Reader(data, box)):
                if item in coded:
                    yield _joined(data, idat if in_idat else Range(0, len(data)), extents)


def _item_types(data: bytes, meta: Range) -> Iterator[tuple[int, bytes]]:
    for box in _inside(data, meta, b"iinf"):
        # Version and flags, and how many there are.
        entries = Range(box.start + (6 if data[box.start] == 0 else 8), box.stop)
        for entry in _inside(data, entries, b"infe"):
            reader = _Reader(data, entry)
            version = reader.read_int(4) >> 24
            item = reader.read_int(4 if version > 2 else 2)
            reader.read_int(2)
            yield item, reader.take_bytes(4)


def _locations(reader: _Reader) -> Iterator[tuple[int, bool, list[tuple[int, int]]]]:
    """(item, whether it is in the box `idat`, (offset, length) of each of its extents)."""
    version = reader.read_int(4) >> 24
    sizes = reader.read_int(2)
    offset_bytes, length_bytes, base_bytes = sizes >> 12, sizes >> 8 & 15, sizes >> 4 & 15
    index_bytes = sizes & 15 if version else 0
    for _ in range(reader.read_int(4 if version > 1 else 2)):
        item = reader.read_int(4 if version > 1 else 2)
        method = reader.read_int(2) & 15 if version else 0
        reader.read_int(2)
        base = reader.read_int(base_bytes)
        extents = []
        count = reader.read_int(2)
        if count > 1 and not index_bytes + offset_bytes + length_bytes:
            raise ValueError("the parts of a picture of the AVIF are all the same")
        for _ in range(count):
            reader.read_int(index_bytes)
            offset = reader.read_int(offset_bytes)
            extents.append((base + offset, reader.read_int(length_bytes)))
        yield item, method == 1, extents


def _joined(data: bytes, within: Range, extents: list[tuple[int, int]]) -> bytes:
    if sum(length for _, length in extents) > len(data):
        raise ValueError("the parts of a picture of the AVIF overlap")
    parts = []
    for offset, length in extents:
        start = within.start + offset
        parts.append(data[start : min(start + length, within.stop) if length else within.stop])
    return b"".join(parts)


def _samples(data: bytes) -> Iterator[bytes]:
    """The first sample of each track of an animation."""
    for table in _inside(data, Range(0, len(data)), b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        sizes = next(_inside(data, table, b"stsz"), Range(0, 0))
        for kind, length in ((b"stco", 4), (b"co64", 8)):
            for box in itertools.islice(_inside(data, table, kind), 1):
                start = _first(_Reader(data, box), length)
                yield data[start : start + _first_size(_Reader(data, sizes))]


def _first(reader: _Reader, length: int) -> int:
    """Entries of a list that begins with their number."""
    reader.read_int(4)
    if not reader.read_int(4):
        raise ValueError("a track of the AVIF is empty")
    return reader.read_int(length)


def _first_size(reader: _Reader) -> int:
    """Size in bytes of the first sample of a track; 0 if it has none."""
    reader.read_int(4)
    size, count = reader.read_int(4), reader.read_int(4)
    return size if size or not count else reader.read_int(4)


# --- AV1 ---


def _sequence_sizes(stream: bytes) -> Iterator[tuple[int, int]]:
    """The size in each sequence header of a stream."""
    at = 0
    for _ in range(UNITS_MAX):
        if at >= len(stream):
            return
        head = stream[at]
        at += 2 if head & 4 else 1
        length = len(stream) - at
        if head & 2:
            length, at = _leb128(stream, at)
        if head >> 3 & 15 == SEQUENCE_HEADER:
            yield _sequence_size(_Bits(stream[at : at + min(length, 256)]))
        at += length
    raise ValueError(f"a picture of the AVIF has more than {UNITS_MAX} parts")


def _leb128(stream: bytes, at: int) -> tuple[int, int]:
    """(value, place behind it) of a number in little groups of 7 bits."""
    value = 0
    for place in range(8):
        if at + place >= len(stream):
            break
        byte = stream[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if not byte & 0x80:
            return value, at + place + 1
    raise ValueError("a length in the AVIF is damaged")


class _Bits:
    """Whole numbers of any number of bits, one after the other; ValueError behind the end."""

    def __init__(self, data: bytes) -> None:
        self._value, self._remaining = int.from_bytes(data, "big"), 8 * len(data)

    def read_bits(self, bits: int) -> int:
        self._remaining -= bits
        if self._remaining < 0:
            raise ValueError("a sequence header of the AVIF is cut")
        return self._value >> self._remaining & ((1 << bits) - 1)


def _sequence_size(bits: _Bits) -> tuple[int, int]:
    """The largest frame that a sequence header allows: AV1 specification 5.5.1."""
    bits.read_bits(3 + 1)  # seq_profile, still_picture
    reduced = bits.read_bits(1)
    if reduced:
        bits.read_bits(5)  # seq_level_idx
    else:
        _skip_operating_points(bits)
    width_bits, height_bits = bits.read_bits(4) + 1, bits.read_bits(4) + 1
    width, height = bits.read_bits(width_bits) + 1, bits.read_bits(height_bits) + 1
    # Only in a reduced header no frame may say another size; decoders do not hold it to be the smaller one.
    return (width, height) if reduced else (1 << width_bits, 1 << height_bits)


def _skip_operating_points(bits: _Bits) -> None:
    decoder_model, delay_bits = 0, 0
    if bits.read_bits(1):  # timing_info
        bits.read_bits(32 + 32)
        if bits.read_bits(1):  # equal_picture_interval
            _skip_uvlc(bits)
        decoder_model = bits.read_bits(1)
        if decoder_model:
            delay_bits = bits.read_bits(5) + 1
            bits.read_bits(32 + 5 + 5)
    display_delay = bits.read_bits(1)
    for _ in range(bits.read_bits(5) + 1):
        bits.read_bits(12)  # operating_point_idc
        if bits.read_bits(5) > 7:  # seq_level_idx
            bits.read_bits(1)
        if decoder_model and bits.read_bits(1):
            bits.read_bits(2 * delay_bits + 1)
        if display_delay and bits.read_bits(1):
            bits.read_bits(4)


def _skip_uvlc(bits: _Bits) -> None:
    zeros = 0
    while not bits.read_bits(1):
        zeros += 1
    if zeros < 32:
        bits.read_bits(zeros)
