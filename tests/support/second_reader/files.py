"""Opens input files for the second reading: local copies of remote files, decompression.

Decompression uses the standard library and reads to the end of the last member.
"""

from __future__ import annotations

import atexit
import bz2
import gzip
import io
import lzma
import os
import posixpath
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import IO, Any

from embq.core.units import Unit


class Copies:
    """Local copies of remote inputs, one plain download each; only the last is kept, for its next slice."""

    def __init__(self) -> None:
        self._kept = ExitStack()
        self._of: tuple[str, str] | None = None
        self._folder = ""
        atexit.register(self._kept.close)

    def of(self, unit: Unit) -> Unit:
        """The unit with a local copy as its source. The copy is deleted when that of another file is made.

        Raises OSError where it cannot be fetched. Images of a folder that are gone are left out.
        """
        name = posixpath.basename(unit.source.partition("?")[0])
        if unit.kind == "files":
            self._begin()
            for relative, _ in unit.items:
                self._fetch(unit.source, relative)
                self._fetch(unit.source, os.path.splitext(relative)[0] + ".txt")
            return replace(unit, source=self._folder)
        if self._of != (unit.source, unit.etag):
            self._begin()
            self._fetch(unit.source, name, url=unit.source)
            self._of = (unit.source, unit.etag)
        return replace(unit, source=os.path.join(self._folder, name))

    def _begin(self) -> None:
        self._of = None
        self._kept.close()
        self._folder = self._kept.enter_context(tempfile.TemporaryDirectory(prefix="embq-verify-"))

    def _fetch(self, folder: str, relative: str, *, url: str = "") -> None:
        import fsspec

        path = os.path.join(self._folder, relative)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with fsspec.open(url or f"{folder}/{relative}", "rb") as source, open(path, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        except FileNotFoundError:
            if os.path.exists(path):
                os.unlink(path)


COPIES = Copies()


if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ERRORS: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zstd.ZstdError)
"""Raised for a file that is damaged, or cannot be read."""

PIECE_BYTES = 1 << 18


class XzFile(io.RawIOBase):
    """All streams of an .xz file. lzma.LZMAFile takes the padding that may stand between two of them for the end."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - `close` does it
        self._at = 0
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes; backwards from the beginning of the file."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset in the content, from its beginning or from here."""
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the length of the content is not known")
        offset += self._at if whence == io.SEEK_CUR else 0
        if offset < self._at:
            self._file.seek(0)
            self._at = 0
            self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        while self._at < offset and self.read(min(PIECE_BYTES, offset - self._at)):
            pass
        return self._at

    def readinto(self, buffer: Any) -> int:
        """The next bytes of the content; 0 at its end."""
        with memoryview(buffer) as view:
            out = self._more(len(view))
            view[: len(out)] = out
        self._at += len(out)
        return len(out)

    def _more(self, most: int) -> bytes:
        while True:
            data = b""
            if self._decoder.eof:
                if not (data := self._next_stream()):
                    return b""
                self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            elif self._decoder.needs_input and not (data := self._file.read(PIECE_BYTES)):
                raise EOFError("the file ends in the middle of a stream")
            if out := self._decoder.decompress(data, most):
                return out

    def _next_stream(self) -> bytes:
        data = self._decoder.unused_data.lstrip(b"\0")
        while not data and (fresh := self._file.read(PIECE_BYTES)):
            data = fresh.lstrip(b"\0")
        return data


def opened(path: str, compression: str) -> IO[bytes]:
    """The content of a file, which can be sought in; "" stands for a plain file. Raises one of `ERRORS`."""
    readers: dict[str, Callable[[str], Any]] = {
        "gzip": gzip.open,
        "bzip2": bz2.open,
        "xz": lambda path: io.BufferedReader(XzFile(path), PIECE_BYTES),
        "zstd": zstd.ZstdFile,
    }
    reader: Callable[[str], IO[bytes]] = readers.get(compression, partial(open, mode="rb"))
    return reader(path)


def compression_of(path: str) -> str:
    """The compression of a file by its first bytes; "" for none."""
    with open(path, "rb") as file:
        head = file.read(6)
    # zstd's skippable frames, one of which may be the first, have 16 signatures.
    skippable = len(head) >= 4 and 0x50 <= head[0] <= 0x5F and head[1:4] == b"\x2a\x4d\x18"
    if skippable or head.startswith(b"\x28\xb5\x2f\xfd"):
        return "zstd"
    signatures = {"gzip": b"\x1f\x8b", "bzip2": b"BZh", "xz": b"\xfd7zXZ\0"}
    return next((name for name, signature in signatures.items() if head.startswith(signature)), "")


class _Kept:
    """The decompressed file that was read last, so that each slice does not start from its beginning."""

    def __init__(self) -> None:
        self._key: tuple[str, str] | None = None
        self._file: IO[bytes] | None = None
        self.rows: tuple[int, Iterator[list[str] | None], list[str]] | None = None
        atexit.register(self.close)

    def open(self, unit: Unit) -> IO[bytes]:
        """The decompressed text, at any position."""
        key = (unit.source, unit.etag)
        if self._file is None or self._key != key:
            self.close()
            self._key, self._file = key, opened(unit.source, dict(unit.options).get("compression", ""))
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = self._key = self.rows = None


KEPT = _Kept()
