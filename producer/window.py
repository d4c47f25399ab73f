"""How many hints may wait in one RQ queue."""

from __future__ import annotations

WINDOW_S = 5.0
"""Seconds of work that may wait. Long enough for the producer to be restarted, short enough for a change of priority to
be felt soon."""
MIN_HINTS, MAX_HINTS = 16, 5_000
"""Bounds of the window. What is too little for fast units is taken within a tick, and the window grows fivefold or more
with each; the ceiling keeps RQ's jobs at about 5 MB."""
HINTS_PER_WORKER = 4
SHORTEST_S = 0.2
"""Looks that follow each other faster say nothing of the speed."""
DECAY = 0.95
"""Of the speed that is remembered, for each look: half of it after about three seconds."""


class Window:
    """Measures how fast hints are taken, and allows `WINDOW_S` seconds of them."""

    def __init__(self) -> None:
        self._left: int | None = None
        self._at = 0.0
        self._per_s = 0.0

    def size(self, waiting: int, *, workers: int, now: float) -> int:
        """Hints that may wait, where `waiting` do at `now` (monotonic seconds)."""
        if self._left is not None:
            taken = max(0, self._left - waiting)
            self._per_s = max(taken / max(SHORTEST_S, now - self._at), self._per_s * DECAY)
        self._left, self._at = waiting, now
        return min(MAX_HINTS, max(MIN_HINTS, HINTS_PER_WORKER * workers, int(self._per_s * WINDOW_S)))

    def pushed(self, count: int) -> None:
        """Note hints that were added since."""
        self._left = (self._left or 0) + count
