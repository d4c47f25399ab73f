"""How resident services end: SIGTERM or Ctrl-C sets a flag that their loops ask."""

from __future__ import annotations

import signal
from types import FrameType


class StopFlag:
    """Counts SIGTERM and SIGINT; false until the first."""

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        """Take over both signals."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1

    def __call__(self) -> bool:
        return self.count > 0
