"""Which run is next: the runs of one RQ queue share it by weight.

Start-time fair queueing (Goyal, Vin, Cheng 1996). Each run has a virtual time, the samples that it was given divided by
its weight, and the run that is furthest behind is next. So what is shared is work and not units: a run with units of
1,000 samples gets one where another gets ten of 100. A run that had nothing to do does not save up for later: it goes
on from where the queue is being worked on now.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """A run that wants hints to be given.

    Attributes:
        run: run id.
        weight: its priority.
        cost: samples of its next units, each.
        left: units that it can still be given, at most.
    """

    run: str
    weight: int
    cost: float
    left: int


class Shares:
    """The virtual times of the runs of one queue, and of the hints that wait in it."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque()
        self._next: dict[str, float] = {}
        self._now = 0.0

    def look(self, waiting: int) -> None:
        """Note that `waiting` hints are left in the queue: those before them have been taken.

        Hints that were given before, such as those of lost leases, stand in front of all others and are not known.
        """
        while len(self._starts) > waiting:
            self._now = max(self._now, self._starts.popleft())

    @property
    def _last(self) -> float:
        return self._starts[-1] if self._starts else self._now

    def _start(self, run: str) -> float:
        return max(self._next.get(run, 0.0), self._now)

    def turns(self, claimants: Sequence[Claimant], *, room: int, ahead: int) -> list[str]:
        """The runs whose turn it is, one for each hint, in order.

        Args:
            room: most hints behind those that wait.
            ahead: most hints before them, for runs that have come only now and are behind.
        """
        last = self._last
        by_run = {claimant.run: claimant for claimant in claimants}
        left = {claimant.run: claimant.left for claimant in claimants}
        heap = [(self._start(run), run) for run in by_run]
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
            left[run] -= 1
            if left[run] > 0:
                heapq.heappush(heap, (start + by_run[run].cost / by_run[run].weight, run))
        return turns

    def give(self, given: Sequence[tuple[str, float]]) -> int:
        """Note the hints that are given, in their order: (run, samples divided by the run's weight) of each.

        Gives how many of them belong before those that wait; the others follow at the end.
        """
        last = self._last
        starts = []
        for run, work in given:
            starts.append(self._start(run))
            self._next[run] = starts[-1] + work
        ahead = 0
        while ahead < len(starts) and starts[ahead] < last:
            ahead += 1
        self._starts.extendleft(reversed(starts[:ahead]))
        self._starts.extend(starts[ahead:])
        return ahead

    def forget(self, runs: Sequence[str]) -> None:
        """Keep only these runs in mind."""
        self._next = {run: start for run, start in self._next.items() if run in runs}
