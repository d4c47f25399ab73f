"""Progress of work over items that are counted, and sizes for people."""

from __future__ import annotations

import time

from embq.core.service.progress_line import ProgressLine, duration, size_text

SETTLED_S = 2.0
"""No end is predicted earlier."""


class Counter:
    """Shows how many items are done, with rate and time left.

    Args:
        what: the items, in the plural.
        total: number of items; 0 if it is not known, and no end is predicted.
        total_bytes: bytes of all items, by which the end is predicted; 0 if they are not known.
    """

    def __init__(self, what: str, total: int = 0, total_bytes: int = 0, *, quiet: bool = False) -> None:
        self._line = ProgressLine(quiet=quiet)
        self._what, self._total, self._total_bytes = what, total, total_bytes
        self._done = self._bytes = 0
        self._began = time.monotonic()

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def add(self, count: int, size: int) -> None:
        """Count items that are done, and their bytes."""
        self._done += count
        self._bytes += size
        if self._line.due:
            self._line.show(self.line(time.monotonic() - self._began))

    def skip(self, count: int, size: int) -> None:
        """Take out items that were done before, which say nothing of the speed."""
        self._total -= count
        self._total_bytes -= size

    def expect(self, total: int) -> None:
        """Set the number of items."""
        self._total = total

    def line(self, seconds: float) -> str:
        """The line after this many seconds."""
        if not self._total:
            return f"{self._done:,} {self._what}"
        speed = f"{self._done / seconds:,.0f}/s, {size_text(self._bytes / seconds)}/s" if seconds else ""
        text = f"{self._done:,} of {self._total:,} {self._what}, {speed}"
        if seconds < SETTLED_S or not self._bytes or not self._done or self._done >= self._total:
            return text
        share = self._bytes / self._total_bytes if self._total_bytes else self._done / self._total
        return f"{text}, about {duration(max(0.0, seconds * (1 - share) / share))} left"
