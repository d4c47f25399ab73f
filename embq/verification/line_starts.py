"""Where lines begin in a text file that was mended after it was planned, so that its slices have moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import IO

from core.units import Unit
from embq.verification.copying import COPIES
from embq.verification.decompression import ERRORS
from embq.verification.rereading_csv import KEPT
from sources.access.urls import is_url

LINES = ("jsonl", "lines")
EVERY = 1_000
"""Lines between two places that are kept."""


class SourceLines:
    """The starts of lines of the one source that was asked for last."""

    def __init__(self) -> None:
        self._of: tuple[str, str] | None = None
        self._starts: list[int] = []

    def placed(self, unit: Unit) -> Unit:
        """A unit of lines with the bytes that its lines take now; as it is where the source cannot be read."""
        assert unit.samples is not None
        try:
            with _opened(unit) as file:
                if self._of != (unit.source, unit.etag):
                    self._of, self._starts = (unit.source, unit.etag), list(_starts(file))
                start = self._at(file, unit.first)
                return replace(unit, start=start, stop=self._at(file, unit.first + unit.samples))
        except ERRORS:
            return unit  # reading it says why

    def _at(self, file: IO[bytes], line: int) -> int:
        """The offset of the first byte of a line, counted from 0."""
        kept = min(line // EVERY, len(self._starts) - 1)
        at = self._starts[kept]
        file.seek(at)
        left = line - kept * EVERY
        while left > 0 and (piece := file.readline(1 << 20)):
            at += len(piece)
            left -= piece.endswith(b"\n")
        return at


def _starts(file: IO[bytes]) -> Iterator[int]:
    file.seek(0)
    at = lines = 0
    yield at
    read: Callable[[], bytes] = lambda: file.readline(1 << 20)  # noqa: E731 - a line may be longer than memory
    for piece in iter(read, b""):
        at += len(piece)
        if piece.endswith(b"\n"):
            lines += 1
            if lines % EVERY == 0:
                yield at


def _opened(unit: Unit) -> AbstractContextManager[IO[bytes]]:
    local = COPIES.of(unit) if is_url(unit.source) else unit
    return _kept(local) if "compression" in dict(unit.options) else open(local.source, "rb")


@contextmanager
def _kept(unit: Unit) -> Iterator[IO[bytes]]:
    yield KEPT.open(unit)
