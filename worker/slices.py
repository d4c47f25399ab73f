"""The slices of one turn: how long a process goes on with a model or an index, and what it turns to then."""

from __future__ import annotations

import time
from collections.abc import Callable

from worker.scheduler import Scheduler, Turn


class Slices:
    """Slice follows slice until no run needs what is served, or until it is another one's turn.

    Args:
        turn: the right to serve; what is spent of it is told to the scheduler.
        stopped: whether the process is to end.

    Attributes:
        next: the turn of another one, for which the process must change; None as long as it stays.
    """

    def __init__(self, scheduler: Scheduler, turn: Turn, *, slice_s: float, stopped: Callable[[], bool]) -> None:
        self.next: Turn | None = None
        self._scheduler = scheduler
        self._turn = turn
        self._slice_s = slice_s
        self._stopped = stopped
        self._no_work_left = False
        self._began = self._ends = 0.0

    def begin(self) -> None:
        """The first slice begins now."""
        self._began = time.monotonic()
        self._ends = self._began + self._slice_s

    def over(self) -> bool:
        """Whether to take nothing more in hand. The scheduler is asked where a slice has just ended."""
        if self._stopped() or self._no_work_left or self.next is not None:
            return True
        now = time.monotonic()
        if now >= self._ends:
            self._look_for_another(idle=False)
            self._ends = now + self._slice_s
        return self.next is not None

    def idle(self) -> None:
        """Nothing is in hand and no hint has come for a while, so others may be served before the slice ends."""
        self._no_work_left = not self._scheduler.wanted(self._turn.model)
        if not self._no_work_left:
            self._look_for_another(idle=True)

    def end(self) -> None:
        """Let go of the turn, unless the process is to end: then what was booked for the turn stays."""
        if not self._stopped():
            self._scheduler.end(self._turn, spent_s=self._spent_s())

    def _look_for_another(self, *, idle: bool) -> None:
        self.next = self._scheduler.another(self._turn, spent_s=self._spent_s(), idle=idle)

    def _spent_s(self) -> float:
        return time.monotonic() - self._began
