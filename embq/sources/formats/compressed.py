"""Compressed files: .gz, .zst, .bz2 and .xz, known by their first bytes, read forwards in bounded memory.

A file that is cut, damaged, or has something behind its end is an error, never a short text.
"""

from __future__ import annotations

import bz2
import io
import lzma
import sys
import zlib
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

from embq.core.errors import SourceError
from embq.core.units import Unit
from embq.sources.access.files import open_unchanged
from embq.sources.interface import Memory, Moved, unwatched

SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
"""Extensions of compressed text files -> format. The format is decided by the first bytes, not by the extension."""

HEAD_BYTES = 13
"""First bytes that tell the format: the longest header is that of LZMA-alone."""

MAGICS: dict[str, tuple[bytes, ...]] = {
    "gzip": (b"\x1f\x8b\x08",),
    # A skippable frame (RFC 8878, 3.1.2) may be the first: pzstd writes one before each frame.
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))),
    "bzip2": (b"BZh",),
    "xz": (b"\xfd7zXZ\0",),
}
"""The bytes that a member of each format begins with."""
_PADDED = ("gzip", "xz")
"""Formats whose files may end in zeros."""

_INPUT_BYTES = 1 << 18
OUTPUT_BYTES = 1 << 20
_XZ_MEMORY_BYTES = 256 << 20
"""Memory limit of decompression: a header can ask for 4 GB. zstd's own limit is a window of 128 MiB."""
_BEYOND_WINDOW = ("Memory usage limit exceeded", "requires too much memory for decoding")
"""Ends of the messages of xz and zstd about a header that asks for more."""


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


DECODERS: dict[str, Callable[[], _Decoder]] = {"gzip": _Gzip, "zstd": _zstd, "bzip2": bz2.BZ2Decompressor, "xz": _xz}


def compression_of(head: bytes, path: str) -> str:
    """The format of a file that begins with `head` (`HEAD_BYTES` or more, if it has them); "" for a plain one.

    Raises SourceError `unsupported_compression` for LZMA-alone, which has neither a signature nor a checksum.
    """
    if _is_lzma_alone(head[:HEAD_BYTES]):
        raise SourceError(
            f"{path}: is compressed as LZMA-alone (.lzma), a format without a checksum, which is not read",
            code="unsupported_compression",
            next_step="write it as .xz: lzma -dc OLD | xz > NEW",
        )
    compression = next((name for name, magic in MAGICS.items() if head.startswith(magic)), "")
    # A text may begin with BZh as well.
    return "" if compression == "bzip2" and head[4:8] not in (b"1AY&", b"\x17rE8") else compression


def _is_lzma_alone(head: bytes) -> bool:
    """True if a file begins as `lzma` writes it: the usual properties, a dictionary's size, and the content's.

    The sizes are those that xz takes for the format's: 2^n or 2^n + 2^(n-1), and below 256 GiB or not known.
    """
    if len(head) < HEAD_BYTES or head[0] != 0x5D:
        return False
    dictionary, content = int.from_bytes(head[1:5], "little"), int.from_bytes(head[5:13], "little")
    return f"{dictionary:b}".strip("0") in ("1", "11") and (content < 1 << 38 or content == (1 << 64) - 1)


class Members(io.RawIOBase):
    """The content of all members of a compressed file, one behind the other."""

    def __init__(self, file: io.BufferedIOBase, compression: str, path: str) -> None:
        super().__init__()
        self._file = file
        self._path = path
        self._compression = compression
        self._decoder = DECODERS[compression]()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer) as view:
            out = self._decompress(len(view))
            view[: len(out)] = out
        return len(out)

    def _decompress(self, most: int) -> bytes:
        while True:
            data = b""
            if self._decoder.eof:
                data = self._next_member(self._decoder.unused_data)
                if not data:
                    return b""
                self._decoder = DECODERS[self._compression]()
            elif self._decoder.needs_input:
                data = self._file.read(_INPUT_BYTES)
                if not data:
                    raise self._damage("it ends too early: it is cut", "source_truncated")
            try:
                out = self._decoder.decompress(data, most)
            except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
                raise self._refused(error) from error
            except Exception as error:
                if type(error).__name__ != "ZstdError":  # its module is imported only if it is needed
                    raise
                raise self._refused(error) from error
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
        if data and not data.startswith(MAGICS[self._compression]):
            raise self._damage("there is something else behind its end")
        return data

    def _refused(self, error: Exception) -> SourceError:
        """The error for a library's complaint about the content."""
        if not str(error).endswith(_BEYOND_WINDOW):
            return self._damage(f"it is damaged: {error}")
        return SourceError(
            f"{self._path}: as {self._compression}, its window is larger than what readers have memory for",
            code="too_large",
            next_step="compress it again with a smaller one: zstd without --ultra and --long, xz -6",
        )

    def _damage(self, what: str, code: str = "source_damaged") -> SourceError:
        return SourceError(
            f"{self._path}: as {self._compression}, {what}", code=code, next_step="copy or write the file again"
        )


def unpack(data: Memory, path: str, on_progress: Moved, most: int) -> Memory:
    """A file that is in memory, decompressed if it is compressed.

    Args:
        most: bytes that may come out; a small file can hold very much.

    Raises SourceError `source_truncated`, `source_damaged`, `unsupported_compression`, or `too_large`.
    """
    content, cut = unpack_to_cut(data, path, on_progress, most)
    if cut is not None:
        raise copy(cut)
    return content


def unpack_to_cut(data: Memory, path: str, on_progress: Moved, most: int) -> tuple[Memory, SourceError | None]:
    """As `unpack`; of a file that is cut, what comes out before the cut, and the error `source_truncated`.

    An error that was raised holds the frames that it passed, and they all data: what is kept of one is a copy.
    """
    compression = compression_of(data[:HEAD_BYTES], path)
    if not compression:
        return data, None
    buffer = io.BytesIO()
    with memoryview(data) as view, Members(_InMemory(view), compression, path) as text:
        while True:
            try:
                piece = text.read(OUTPUT_BYTES)
            except SourceError as error:
                if error.code != "source_truncated":
                    raise
                return buffer.getvalue(), copy(error)
            if not piece:
                return buffer.getvalue(), None
            on_progress()
            if buffer.tell() + len(piece) > most:
                raise SourceError(
                    f"{path}: holds more than the {max(0, most):,} bytes that a reader may have here when it is "
                    "decompressed",
                    code="too_large",
                    next_step="split it into smaller files, or give the worker more memory; then embq retry",
                )
            buffer.write(piece)


def beginning(unit: Unit, most: int) -> bytes:
    """The first bytes, at most `most`, of what the file of a whole unit holds, decompressed if it is compressed.

    Raises SourceError as `open_unchanged` does, and for damage in so much of it.
    """
    few = replace(unit, start=0, stop=min(most, unit.stop))
    with open_unchanged(few, "source_changed", unwatched) as file:
        compression = compression_of(file.peek(HEAD_BYTES)[:HEAD_BYTES], unit.source)
        if not compression:
            return bytes(file.read(most))
        with io.BufferedReader(Members(file, compression, unit.source)) as text:
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
