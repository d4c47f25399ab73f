"""Compressed inputs as the second reading opens them: by the standard library, to the end of the last member."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import IO, Any

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
    """How a file is compressed, by its first bytes; "" for a plain one."""
    with open(path, "rb") as file:
        head = file.read(6)
    # zstd's skippable frames, one of which may be the first, have 16 signatures.
    skippable = len(head) >= 4 and 0x50 <= head[0] <= 0x5F and head[1:4] == b"\x2a\x4d\x18"
    if skippable or head.startswith(b"\x28\xb5\x2f\xfd"):
        return "zstd"
    signatures = {"gzip": b"\x1f\x8b", "bzip2": b"BZh", "xz": b"\xfd7zXZ\0"}
    return next((name for name, signature in signatures.items() if head.startswith(signature)), "")
