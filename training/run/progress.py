"""How far long work over pictures or shards is, on a terminal or in a log."""

from __future__ import annotations

import time

from core.service.progress_line import ProgressLine, duration
from training.shards.shard_set import size_of

SETTLED_S = 2.0
"""Before it an end is not predicted."""


class Course:
    """Counts what is done on stderr: one line that is redrawn on a terminal, one every 30 seconds elsewhere.

    Args:
        what: is counted, in the plural.
        total: of them; 0 where that is not known, and no end is predicted.
        total_bytes: of them together, by which the end is predicted; 0 where that is not known.
        quiet: say nothing.
    """

    def __init__(self, what: str, total: int = 0, total_bytes: int = 0, *, quiet: bool) -> None:
        self._what, self._total, self._total_bytes = what, total, total_bytes
        self._done = self._bytes = 0
        self._line = ProgressLine(quiet=quiet)
        self._began = time.monotonic()

    def add(self, count: int, size: int) -> None:
        """So many more are done, of so many bytes."""
        self._done += count
        self._bytes += size
        if self._line.due:
            self._line.show(self.line(time.monotonic() - self._began))

    def skip(self, count: int, size: int) -> None:
        """So many were done before, and do not count for the speed."""
        self._total -= count
        self._total_bytes -= size

    def expect(self, total: int) -> None:
        """There are so many."""
        self._total = total

    def line(self, seconds: float) -> str:
        """What is done after so many seconds, and when the rest will be."""
        if not self._total:
            return f"{self._done:,} {self._what}"
        speed = f"{self._done / seconds:,.0f}/s, {size_of(self._bytes / seconds)}/s" if seconds else ""
        said = f"{self._done:,} of {self._total:,} {self._what}, {speed}"
        if seconds < SETTLED_S or not self._bytes or not self._done or self._done >= self._total:
            return said
        share = self._bytes / self._total_bytes if self._total_bytes else self._done / self._total
        left = seconds * (1 - share) / share
        return f"{said}, about {duration(max(0.0, left))} left"

    def __enter__(self) -> Course:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
