"""Stop flag of resident services, set by SIGTERM, SIGHUP and Ctrl-C."""

from __future__ import annotations

import errno
import io
import os
import signal
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

REPEAT_S = 1.0
"""A signal this soon after another is the same request: service managers and terminals signal parent and child."""


def leave_closed_terminal() -> None:
    """Discard what goes to a terminal that is closed: writing there is an error, which would end the process."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


class Terminal(io.FileIO):
    """The raw stream of a terminal, which discards what is written after it closed; SIGHUP may arrive later."""

    def write(self, data: Buffer, /) -> int:
        """Write to the terminal."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            leave_closed_terminal()
            return memoryview(data).nbytes


def discard_after_close(stream: TextIO) -> TextIO:
    """Return a stream to the same terminal, with `Terminal` below it; `stream` itself if it is no terminal."""
    if not stream.isatty():
        return stream
    stream.flush()
    raw = io.BufferedWriter(Terminal(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)


class StopFlag:
    """Counts requests to stop; false until the first.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._clock = clock
        self._first = self._last = float("-inf")

    def install(self) -> None:
        """Handle these signals; SIGHUP, which a terminal sends when it closes, unless `nohup` has it ignored."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        now = self._clock()
        if now - self._last >= REPEAT_S:
            self._first = self._first if self.count else now
            self.count += 1
            self._last = now

    def __call__(self) -> bool:
        return self.count > 0

    def longer_than(self, seconds: float) -> bool:
        """True if the first request is older than that, or was repeated."""
        return self.count > 1 or (self.count > 0 and self._clock() - self._first > seconds)
