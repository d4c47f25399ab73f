"""What is read in ranges, as a file."""

from __future__ import annotations

import io
from typing import Any, Protocol


class Ranges(Protocol):
    """What can be read in ranges."""

    def read_range(self, start: int, stop: int) -> bytes | memoryview:
        """The bytes from `start` on, at least one and none from `stop` on; `start` is below `stop`."""
        ...


class RangedFile(io.RawIOBase):
    """A file for reading, which can seek; each read asks for a range."""

    def __init__(self, ranges: Ranges, size: int) -> None:
        super().__init__()
        self._ranges, self._size, self._at = ranges, size, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As every file does."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As every file does; the number of bytes read."""
        view = memoryview(buffer).cast("B")
        stop = min(self._size, self._at + len(view))
        if stop <= self._at:
            return 0
        piece = self._ranges.read_range(self._at, stop)
        view[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
