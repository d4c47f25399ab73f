"""Compressed texts: .gz, .zst, .bz2 and .xz, known by their first bytes, read forwards in bounded memory.

Offsets count the bytes that come out. A file that is cut, damaged, or has something behind its end is an error, never a
short text; planning reads it to the end, checksums and all.
"""

from __future__ import annotations

import bz2
import codecs
import io
import lzma
import re
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

from core.errors import SourceError
from core.units import Unit
from sources.base import Memory, Moved, unwatched
from sources.cursors import LastCursor
from sources.storage import base_name, open_unchanged

SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
"""What may follow the name of a text file; what counts is how the file begins."""

OPTION = "compression"
"""The option by which a unit says how its file is compressed; units of plain files have none."""

DAMAGE_CODES = ("source_truncated", "source_damaged")
"""What a compressed file that is not whole is called."""

_MAGICS = {"gzip": b"\x1f\x8b\x08", "zstd": b"\x28\xb5\x2f\xfd", "bzip2": b"BZh", "xz": b"\xfd7zXZ\0"}
_PADDED = ("gzip", "xz")
"""Formats whose files may end in zeros."""

_INPUT_BYTES = 1 << 18
_OUTPUT_BYTES = 1 << 20
_XZ_MEMORY_BYTES = 256 << 20
"""What decompressing may take: a header can ask for 4 GB."""


Cut = tuple[int, int, int]
"""First byte, byte after the last, and samples of a slice."""


class _Decoder(Protocol):
    """One member of a compressed file, as the standard library's decompressors have it."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gzip:
    """zlib's decompressor in the form of the others."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)
        self._tail = b""
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        out = self._inner.decompress(self._tail + data, max_length)
        self._tail = self._inner.unconsumed_tail
        self.needs_input = not self._tail and len(out) < max_length
        return out


def _zstd() -> _Decoder:
    decoder: _Decoder
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    decoder = zstd.ZstdDecompressor()
    return decoder


def _xz() -> _Decoder:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)


_DECODERS: dict[str, Callable[[], _Decoder]] = {"gzip": _Gzip, "zstd": _zstd, "bzip2": bz2.BZ2Decompressor, "xz": _xz}


def compression_of(head: bytes) -> str:
    """The format of a file that begins with `head` (8 bytes or more, if it has them); "" for a plain one."""
    found = next((name for name, magic in _MAGICS.items() if head.startswith(magic)), "")
    # A text may begin with BZh as well.
    return "" if found == "bzip2" and head[4:8] not in (b"1AY&", b"\x17rE8") else found


_HEAD_BYTES = 1024
_TEXT = re.compile(rb"[^\0-\x08\x0e-\x1f\x7f]*")


def _refuse_lost_head(path: str, head: bytes) -> None:
    """Raise SourceError for a file that is compressed by its name, and neither that nor a text by how it begins."""
    said = next((name for suffix, name in SUFFIXES.items() if base_name(path).lower().endswith(suffix)), "")
    if (
        said
        and head
        and (head[:2] == _MAGICS[said][: len(head)][:2] or not _TEXT.fullmatch(head) or not _is_utf8(head))
    ):
        raise SourceError(
            f"{path}: does not begin as a file compressed with {said} does: it is cut or damaged",
            code="source_damaged",
            next_step="copy or write the file again",
        )


def _is_utf8(head: bytes) -> bool:
    """Whether a file that begins with `head` may be UTF-8; its last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


class _Members(io.RawIOBase):
    """The content of all members of a compressed file, one behind the other."""

    def __init__(self, file: io.BufferedIOBase, compression: str, path: str) -> None:
        super().__init__()
        self._file = file
        self._path = path
        self._compression = compression
        self._decoder = _DECODERS[compression]()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer) as view:
            out = self._more(len(view))
            view[: len(out)] = out
        return len(out)

    def _more(self, most: int) -> bytes:
        while True:
            data = b""
            if self._decoder.eof:
                data = self._next_member(self._decoder.unused_data)
                if not data:
                    return b""
                self._decoder = _DECODERS[self._compression]()
            elif self._decoder.needs_input:
                data = self._file.read(_INPUT_BYTES)
                if not data:
                    raise self._damage("it ends too early: it is cut", "source_truncated")
            try:
                out = self._decoder.decompress(data, most)
            except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
                raise self._damage(f"it is damaged: {error}") from error
            except Exception as error:
                if type(error).__name__ != "ZstdError":  # its module is imported only where it is needed
                    raise
                raise self._damage(f"it is damaged: {error}") from error
            if out:
                return out

    def _next_member(self, data: bytes) -> bytes:
        """The beginning of the next member; b"" at the end of the file."""
        while True:
            if self._compression in _PADDED:
                data = data.lstrip(b"\0")
            if len(data) >= 8 or not (fresh := self._file.read(_INPUT_BYTES)):
                break
            data += fresh
        if data and not data.startswith(_MAGICS[self._compression]):
            raise self._damage("there is something else behind its end")
        return data

    def _damage(self, what: str, code: str = "source_damaged") -> SourceError:
        return SourceError(
            f"{self._path}: as {self._compression}, {what}", code=code, next_step="copy or write the file again"
        )


def unpack(data: Memory, path: str, moved: Moved, most: int) -> Memory:
    """A file that is in memory, decompressed if it is compressed.

    Args:
        most: bytes that may come out; a small file can hold very much.

    Raises SourceError `source_truncated`, `source_damaged`, or `too_large`.
    """
    compression = compression_of(data[:8])
    if not compression:
        return data
    whole = io.BytesIO()
    with memoryview(data) as view, io.BufferedReader(_Members(_InMemory(view), compression, path)) as text:
        while piece := text.read(_OUTPUT_BYTES):
            moved()
            if whole.tell() + len(piece) > most:
                raise SourceError(
                    f"{path}: holds more than {most} bytes when it is decompressed",
                    code="too_large",
                    next_step="split it into smaller files",
                )
            whole.write(piece)
    return whole.getvalue()


def beginning(unit: Unit, most: int) -> bytes:
    """The first bytes, at most `most`, of what the file of a whole unit holds, decompressed if it is compressed.

    Raises SourceError as `open_unchanged` does, and for damage in so much of it.
    """
    few = replace(unit, start=0, stop=min(most, unit.stop))
    with open_unchanged(few, "source_changed", unwatched) as file:
        compression = compression_of(file.peek(8)[:8])
        if not compression:
            return bytes(file.read(most))
        with io.BufferedReader(_Members(file, compression, unit.source)) as text:
            return text.read(most)


class _InMemory(io.BufferedIOBase):
    """A file in memory, read forwards without a copy of it."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def read(self, size: int | None = -1) -> bytes:
        piece = bytes(self._view[self._at : self._at + (size or 0)])
        self._at += len(piece)
        return piece


class TextCursor:
    """A place in a decompressed text; a file that can be read and sought forwards only."""

    def __init__(self, unit: Unit, compression: str) -> None:
        self.moved: Moved = unwatched
        self.position = 0
        with ExitStack() as stack:
            whole = replace(unit, start=0, stop=0)
            file = stack.enter_context(open_unchanged(whole, "source_changed", lambda: self.moved()))
            self._text = stack.enter_context(io.BufferedReader(_Members(file, compression, unit.source), _OUTPUT_BYTES))
            self._stack = stack.pop_all()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        data = self._text.read(size)
        self.position += len(data)
        return data

    def readline(self, limit: int = -1) -> bytes:
        """A line with its end, or its first `limit` bytes."""
        line = self._text.readline(limit)
        self.position += len(line)
        return line

    def seek(self, offset: int) -> int:
        """Go forwards to `offset`."""
        while self.position < offset and self.read(min(_OUTPUT_BYTES, offset - self.position)):
            pass
        return self.position

    def close(self) -> None:
        """Let go of the file."""
        self._stack.close()


def whole_first(unit: Unit, cuts: Iterator[Cut]) -> Iterable[Cut]:
    """The cuts (start, stop, samples) of a unit's file: where it is compressed, after all of it has been read.

    Nothing of a file that turns out to be damaged may stand in the manifest, as only its end tells whether what came
    out of it was right. Held until then are 24 bytes for each cut.
    """
    if OPTION not in dict(unit.options):
        return cuts
    flat = array("q", chain.from_iterable(cuts))
    return zip(flat[::3], flat[1::3], flat[2::3], strict=True)


def damage_of(file: Text, unit: Unit) -> SourceError:
    """What is wrong with a file that was damaged when it was planned: found by reading it, or that it is whole now."""
    if OPTION not in dict(unit.options):
        file.seek(0)
        _refuse_lost_head(unit.source, file.read(_HEAD_BYTES))
    while file.read(_OUTPUT_BYTES):
        pass
    return SourceError(
        f"{unit.source}: could not be read when the run was planned, and can be now",
        code="source_changed",
        next_step="make a new run of it",
    )


class Text(Protocol):
    """What reading lines needs of a file."""

    def read(self, size: int, /) -> bytes: ...
    def readline(self, limit: int, /) -> bytes: ...
    def seek(self, offset: int, /) -> int: ...


_LAST: LastCursor[TextCursor] = LastCursor()


@contextmanager
def open_text(unit: Unit, moved: Moved) -> Iterator[Text]:
    """The unit's text, at its first byte or before its slice; the file is the version that was planned.

    Raises SourceError `source_changed`, `source_truncated`, `source_damaged`, or as `open_unchanged` does.
    """
    compression = dict(unit.options).get(OPTION, "")
    if not compression:
        with open_unchanged(unit, "source_changed", moved) as file:
            yield file
    elif compression not in _DECODERS:
        raise SourceError(
            f"{unit.source}: is compressed as {compression!r}, which this worker does not know",
            code="unknown_kind",
            next_step="is this worker older than the run?",
        )
    else:
        with _LAST.at(unit, unit.start, moved, lambda: TextCursor(unit, compression)) as cursor:
            yield cursor


@contextmanager
def open_planned(unit: Unit) -> Iterator[tuple[Unit, Text]]:
    """The whole text of a file that is being planned, and the unit, which now says how the file is compressed."""
    with open_unchanged(unit, "source_changed", unwatched) as file:
        head = file.peek(_HEAD_BYTES)[:_HEAD_BYTES]
        compression = compression_of(head[:8])
        if not compression:
            _refuse_lost_head(unit.source, head)
            yield unit, file
            return
        unit = replace(unit, options=tuple(sorted((*unit.options, (OPTION, compression)))))
        cursor = TextCursor(unit, compression)
        try:
            yield unit, cursor
        finally:
            cursor.close()
