"""Stop flag of resident services, set by SIGTERM and Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

REPEAT_S = 1.0
"""A signal this soon after another is the same request: service managers and terminals signal parent and child."""


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
        """Handle both signals."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
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
