"""What Ray prints while a training runs, less what says nothing of it."""

from __future__ import annotations

import io
from typing import TextIO

NOISE = (
    "(PlacementGroupCleaner ",
    "has constructor arguments in the object store and max_restarts > 0",
    "A worker died or was killed while executing a task",
)
"""Lines with one of these are dropped. The first one's process asks every second for the API of Ray's dashboard, and
complains where that is not installed; the second one is about an actor of Ray's own; the third is told by us."""


class Screen(io.TextIOBase):
    """Writes whole lines to another stream, without the noise."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""

    def write(self, text: str) -> int:
        """Take text; what is no whole line yet waits."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if not any(noise in line for noise in NOISE):
                self._stream.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        """Write what is whole."""
        self._stream.flush()

    def fileno(self) -> int:
        """The descriptor of the stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()
