"""Policy of the feeder: number of hints that wait in a queue, and the run whose hint is next. No I/O, no clock."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from embq.core.queue.fair_queue import VirtualTimes

WINDOW_S = 5.0
"""Seconds of work that may wait. Long enough for a restart of the producer, short enough for a change of priority to
take effect soon."""
MIN_HINTS, MAX_HINTS = 16, 5_000
"""Bounds of the window. What is too little for fast units is taken within a tick, and the window grows fivefold or more
with each; the ceiling keeps RQ's jobs at about 5 MB."""
HINTS_PER_WORKER = 4
SHORTEST_S = 0.2
"""Shortest interval over which the rate is measured."""
DECAY = 0.95
"""Factor of the remembered rate at each look: half of it is left after about three seconds."""


class Window:
    """Measures how fast hints are taken, and allows `WINDOW_S` seconds of them."""

    def __init__(self) -> None:
        self._waiting: int | None = None
        self._at = 0.0
        self._per_s = 0.0

    def size(self, waiting: int, *, workers: int, now: float) -> int:
        """Hints that may wait, where `waiting` do at `now` (monotonic seconds)."""
        if self._waiting is not None:
            taken = max(0, self._waiting - waiting)
            self._per_s = max(taken / max(SHORTEST_S, now - self._at), self._per_s * DECAY)
        self._waiting, self._at = waiting, now
        return min(MAX_HINTS, max(MIN_HINTS, HINTS_PER_WORKER * workers, int(self._per_s * WINDOW_S)))

    def pushed(self, count: int) -> None:
        """Note hints that were added since."""
        self._waiting = (self._waiting or 0) + count


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """A run that can be given hints.

    Attributes:
        run: run id.
        weight: its priority.
        cost: samples of each of its next units.
        unhinted: units that it can still be given, at most.
    """

    run: str
    weight: int
    cost: float
    unhinted: int


class Shares:
    """The virtual times of the runs of one queue, and of the hints that wait in it.

    Work is counted in samples: a run with units of 1,000 samples gets one where another gets ten of 100.
    """

    def __init__(self) -> None:
        self._starts: deque[float] = deque()  # of the hints that wait
        self._times = VirtualTimes()

    def observe(self, waiting: int) -> None:
        """Note that `waiting` hints are left in the queue: those before them have been taken.

        Hints that were given before, such as those of lost leases, stand in front of all others and are not known.
        """
        while len(self._starts) > waiting:
            self._times = replace(self._times, now=max(self._times.now, self._starts.popleft()))

    def turns(self, claimants: Sequence[Claimant], *, room: int, ahead: int) -> list[str]:
        """The runs whose turn it is, one for each hint, in order.

        Args:
            room: most hints behind those that wait.
            ahead: most hints before them, for runs that are new and so behind.
        """
        last = self._last
        by_run = {claimant.run: claimant for claimant in claimants}
        remaining = {claimant.run: claimant.unhinted for claimant in claimants}
        heap = [(self._times.start(run), run) for run in by_run]
        heapq.heapify(heap)
        turns: list[str] = []
        while heap:
            start, run = heapq.heappop(heap)
            if start < last:
                if ahead <= 0:
                    continue
                ahead -= 1
            elif room > 0:
                room -= 1
            else:
                break
            turns.append(run)
            remaining[run] -= 1
            if remaining[run] > 0:
                heapq.heappush(heap, (start + by_run[run].cost / by_run[run].weight, run))
        return turns

    def give(self, given: Sequence[tuple[str, float]]) -> int:
        """Note the hints that are given, in their order: (run, samples divided by the run's weight) of each.

        Returns how many of them belong before those that wait; the others follow at the end.
        """
        last = self._last
        starts = []
        for run, work in given:
            starts.append(self._times.start(run))
            self._times = self._times.charge(run, work)
        ahead = 0
        while ahead < len(starts) and starts[ahead] < last:
            ahead += 1
        self._starts.extendleft(reversed(starts[:ahead]))
        self._starts.extend(starts[ahead:])
        return ahead

    def forget(self, runs: Sequence[str]) -> None:
        """Keep the times of these runs only."""
        self._times = replace(self._times, times={run: at for run, at in self._times.times.items() if run in runs})

    @property
    def _last(self) -> float:
        return self._starts[-1] if self._starts else self._times.now
