"""Strict parser of tar archives in memory: all members, or an error with a byte offset.

`tarfile` and webdataset take a damaged header after the first member for the end of the archive, so a cut shard
passes as a small one. Here every header is checked, and the end-of-archive marker is required.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from copy import copy
from itertools import repeat
from typing import Any, NamedTuple
from zlib import adler32

from embq.core.errors import SourceError
from embq.core.native import library
from embq.sources.interface import Memory

BLOCK = 512
NAME_MAX_BYTES = 4096
"""PATH_MAX on Linux; a longer name is damage or an attack."""
EXTENSION_MAX_BYTES = 1 << 20
"""Largest PAX or GNU header extension; real ones are below 10 kB."""
RECORDS_MAX = 1_000
"""PAX records of one member; real ones have below 30. Those of all members are copied for each."""

DAMAGE_CODES = frozenset({"shard_truncated", "shard_bad_header", "shard_no_end_marker", "shard_trailing_data"})
"""Codes of an archive that is not whole."""

_ZERO = bytes(BLOCK)
_PIECE_BYTES = 1 << 20
_REGULAR = b"0\x007"
_FOLDER = ord("5")
_SPARSE = ord("S")
_WITHOUT_DATA = b"123456"
"""Links, devices, folders and pipes: the next header follows at once, whatever their size field holds."""
_EXTENSIONS = b"xgLK"
_GNU_NAME = {ord("L"): "path", ord("K"): "linkpath"}


class TarMember(NamedTuple):
    """One file of an archive. A tuple because a shard has ten thousands, and frozen dataclasses are built 3x slower.

    Attributes:
        name: as stored, with bytes that are not UTF-8 as surrogate escapes; an identifier, never a path to open.
        at: byte offset of the header.
        start: first byte of the content.
        stop: byte after the content.
        regular: False for links, devices, sparse files and unknown types: the content is not that of a plain file.
    """

    name: str
    at: int
    start: int
    stop: int
    regular: bool


class Archive(NamedTuple):
    """An archive as far as it could be walked.

    Attributes:
        members: those that are there with all of their bytes, without folders.
        at: byte at which the walk ended.
        damage: why it ended there; None at the end of a whole archive.
        cut: the member whose header is there, and not all of its bytes; else None.
        ended: the end-of-archive marker was reached: no member is missing.
    """

    members: list[TarMember]
    at: int
    damage: SourceError | None
    cut: TarMember | None
    ended: bool


class _DamageError(Exception):
    """Damage of the current header; `walk` adds path and offset. `ended`: it is behind all members."""

    def __init__(self, what: str, code: str = "shard_bad_header", *, ended: bool = False) -> None:
        super().__init__(what)
        self.code = code
        self.ended = ended


def parse_members(data: Memory, path: str, most: int = sys.maxsize) -> list[TarMember]:
    """All members of the archive `data` in order, without folders. `path` is named in errors.

    Args:
        most: members that may be there.

    Raises SourceError `shard_truncated`, `shard_bad_header`, `shard_no_end_marker`, `shard_trailing_data` or
    `too_large`.
    """
    archive = walk(data, path, most)
    if archive.damage is not None:
        raise copy(archive.damage)
    return archive.members


def walk(data: Memory, path: str, most: int = sys.maxsize) -> Archive:
    """The archive `data` up to its end or its damage; arguments as for `parse_members`. Raises SourceError `too_large`.

    The code of the damage is one of `DAMAGE_CODES`.
    """
    members, at, damage = _walk(data, most)
    if damage is None:
        return Archive(members, at, None, None, True)
    error = SourceError(
        f"{path}: {damage} (at byte {at} of {len(data)}, after {len(members)} whole members)",
        code=damage.code,
        next_step="copy or write the shard again; no row of it is written",
    )
    if damage.code not in DAMAGE_CODES:
        raise copy(error)  # one that this frame holds would keep the frame, and the data
    cut = members.pop() if members and members[-1].at == at else None
    return Archive(members, at, error, cut, damage.ended)


def parse_first_members(data: Memory) -> list[TarMember]:
    """The members that the first bytes of an archive hold as a whole."""
    return [member for member in _walk(data)[0] if member.stop <= len(data)]


def _walk(data: Memory, most: int = sys.maxsize) -> tuple[list[TarMember], int, _DamageError | None]:
    """The members, the byte at which the walk ended, and the damage there."""
    members: list[TarMember] = []
    shared: dict[str, bytes] = {}  # PAX records of all members that follow
    pending: dict[str, bytes] = {}  # PAX records and GNU names of the next member
    at = 0
    plain = _PlainMembers(data)
    try:
        while True:
            if not shared and not pending:
                at = plain.read(at, members, most)
            header = data[at : at + BLOCK]
            if header == _ZERO:
                break
            _check_header(header)
            if header[156] in _EXTENSIONS:
                at = _read_extension(data, at, header, shared, pending)
                continue
            records = {**shared, **pending} if shared else pending
            # POSIX: an empty value withdraws the header's, or that of a record before it.
            member = _member(data, at, header, {keyword: value for keyword, value in records.items() if value})
            pending.clear()
            if member is None:  # a folder
                at += BLOCK
                continue
            members.append(member)
            if len(members) > most:
                raise _DamageError(f"a reader has memory for {most:,} members here, and there are more", "too_large")
            at = _end_of(data, member.stop)
        if pending:
            raise _DamageError("the archive ends between a header extension and its member")
        _check_end(data, at)
    except _DamageError as damage:
        return members, at, damage
    return members, at, None


class _PlainMembers:
    """Parses headers of plain files by the native library, twenty times as fast; nothing if that is not here.

    It stops at the first header that is anything else, or damaged.
    """

    def __init__(self, data: Memory) -> None:
        self._data = data
        self._address: Any = None
        if isinstance(data, bytes):
            self._address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p)
        elif isinstance(data, mmap.mmap):
            with suppress(TypeError):  # memory that cannot be written to has no address for ctypes
                self._address = (ctypes.c_char * len(data)).from_buffer(data)
        self._library = library() if self._address is not None else None
        if self._library is not None:
            self._library.embq_members.restype = ctypes.c_int64
            self._numbers = (ctypes.c_int64 * (3 * _AT_ONCE))()
            self._names = ctypes.create_string_buffer(_NAME_BYTES * _AT_ONCE)

    def read(self, at: int, members: list[TarMember], most: int) -> int:
        """Append members from byte `at` on, `most` in all; returns the byte behind them."""
        if self._library is None:
            return at
        size, after, used = ctypes.c_int64(len(self._data)), ctypes.c_int64(at), ctypes.c_int64()
        by = ctypes.byref
        while (room := min(_AT_ONCE, most - len(members))) > 0:
            count = self._library.embq_members(
                self._address, size, by(after), ctypes.c_int64(room), self._numbers, self._names, by(used)
            )
            numbers = iter(self._numbers[: 3 * count])
            names = ctypes.string_at(self._names, used.value).decode("utf-8", "surrogateescape").split("\0")
            # Ends with the numbers.
            members += map(TarMember._make, zip(names, numbers, numbers, numbers, repeat(True)))
            if count < room:
                break
        return after.value


_AT_ONCE, _NAME_BYTES = 1024, 101
"""Headers that the native library parses in one call, and the longest name in one with the zero behind it."""


def _check_header(header: bytes) -> None:
    """A header block must be complete and have the right checksum."""
    if not header:
        raise _DamageError("the end-of-archive marker is missing: the shard may be cut", "shard_no_end_marker")
    if len(header) < BLOCK:
        raise _DamageError("the shard ends inside a header", "shard_truncated")
    stored = _number(header[148:156])
    # The low half of Adler-32 is 1 + the sum of the bytes, modulo 65521, and no piece of 256 bytes reaches that:
    # an exact sum, and ten times faster than sum(). The checksum's own field counts as eight spaces.
    total = (
        (adler32(header[:148]) & 0xFFFF)
        + (adler32(header[156:412]) & 0xFFFF)
        + (adler32(header[412:]) & 0xFFFF)
        - 3
        + 8 * 32
    )
    if stored != total:
        # Some old writers summed signed characters.
        signed = total - 256 * sum(byte >= 128 for byte in header[:148] + header[156:])
        if stored != signed:
            raise _DamageError(f"not a tar header: its checksum is {total}, and it says {stored}")


def _member(data: Memory, at: int, header: bytes, records: dict[str, bytes]) -> TarMember | None:
    """The member of a header with its PAX `records`; None for a folder."""
    flag = header[156]
    start = at + BLOCK
    regular = flag in _REGULAR
    if records:
        name = records.get("GNU.sparse.name") or records.get("path") or _stored_name(header)
        size = _decimal(records["size"]) if "size" in records else _number(header[124:136])
        regular = regular and not any(keyword.startswith("GNU.sparse.") for keyword in records)
    else:
        name = _stored_name(header)
        size = _number(header[124:136])
    if len(name) > NAME_MAX_BYTES or b"\0" in name:
        raise _DamageError(f"a name of {len(name)} bytes, or with a zero byte in it")
    if flag == _FOLDER or (flag == 0 and name.endswith(b"/")):
        return None
    if flag in _WITHOUT_DATA:
        size = 0
    elif flag == _SPARSE:
        start = _skip_sparse_map(data, start, header)
    return TarMember(name.decode("utf-8", "surrogateescape"), at, start, start + size, regular)


def _stored_name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[345] and header[257:263] == b"ustar\0":  # GNU tar keeps other things in the prefix
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _read_extension(data: Memory, at: int, header: bytes, shared: dict[str, bytes], pending: dict[str, bytes]) -> int:
    """Put a PAX or GNU extension into `shared` or `pending`; the offset of the header that follows."""
    size = _number(header[124:136])
    if size > EXTENSION_MAX_BYTES:
        raise _DamageError(f"a header extension of {size} bytes")
    start = at + BLOCK
    after = _end_of(data, start + size)
    content = data[start : start + size]
    flag = header[156]
    if flag in _GNU_NAME:
        name, _, rest = content.partition(b"\0")
        if not name or rest.strip(b"\0"):
            raise _DamageError("a long name that is empty, or has a zero byte in it")
        pending[_GNU_NAME[flag]] = name
        return after
    target = shared if flag == ord("g") else pending
    target.update(_pax_records(content))
    if len(target) > RECORDS_MAX:
        raise _DamageError(f"more than {RECORDS_MAX:,} PAX records for one member")
    return after


def _pax_records(content: bytes) -> list[tuple[str, bytes]]:
    """The records "length keyword=value newline"; only the length delimits, a value may hold newlines."""
    records = []
    at = 0
    while at < len(content):
        digits, space, _ = content[at : at + 20].partition(b" ")
        stop = at + (int(digits) if digits.isdigit() else 0)
        keyword, equals, value = content[at + len(digits) + 1 : stop - 1].partition(b"=")
        if not (space and equals and keyword) or content[stop - 1 : stop] != b"\n":
            raise _DamageError("a PAX record that cannot be parsed")
        records.append((keyword.decode("utf-8", "surrogateescape"), value))
        at = stop
    return records


def _skip_sparse_map(data: Memory, start: int, header: bytes) -> int:
    """First byte of an old GNU sparse file's content, behind the blocks that continue its map."""
    continued = header[482]
    while continued:
        if start + BLOCK > len(data):
            raise _DamageError("the shard ends inside a sparse map", "shard_truncated")
        continued = data[start + 504]
        start += BLOCK
    return start


def _end_of(data: Memory, stop: int) -> int:
    """`stop` rounded up to whole blocks, which the archive must have."""
    end = stop + -stop % BLOCK
    if end > len(data):
        raise _DamageError(f"the member needs {end - len(data)} bytes more than the shard has", "shard_truncated")
    return end


def _check_end(data: Memory, at: int) -> None:
    """From the first zero block on there must be nothing but whole zero blocks.

    One zero block instead of two is accepted: every member is there.
    """
    for start in range(at, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        if piece.count(0) != len(piece):
            raise _DamageError(
                "data behind the end-of-archive marker: two archives in one file, or a lost header",
                "shard_trailing_data",
            )
    zeros = len(data) - at
    odd = zeros % BLOCK
    if odd and zeros < 2 * BLOCK:
        raise _DamageError("the shard ends inside its end-of-archive marker", "shard_truncated", ended=True)
    if odd:
        raise _DamageError(
            f"the last {odd} of {zeros} zero bytes are no whole block of {BLOCK}: all members are there, and bytes "
            "were added behind the end-of-archive marker, or cut off",
            "shard_trailing_data",
            ended=True,
        )


def _number(field: bytes) -> int:
    """A header's number: octal digits, or base-256 where the first bit is set."""
    if field[0] & 0x80:
        if field[0] != 0x80:
            raise _DamageError("a negative number")
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    if digits.strip(b"01234567"):  # int() alone would also take signs, underscores and prefixes
        raise _DamageError(f"{digits!r} where an octal number belongs")
    return int(digits, 8)


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 20:
        raise _DamageError(f"{digits[:40]!r} where a PAX size belongs")
    return int(digits)
