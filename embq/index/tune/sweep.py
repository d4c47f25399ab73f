"""Recall of settings on the tuned half of each query set.

One search per number of probes serves all factors of re-ranking: re-ranking is exact, so a true neighbour among the
first k * k_factor candidates is an answer, and one beyond them is none. So no candidate's vector is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from embq.index.tune.points import Goal, Point, Searches, Setting
from embq.index.tune.recall import which_right
from embq.index.tune.tuning_split import Half

K_FACTORS = (1, 2, 4, 8, 16, 32, 64)
"""Factors of k that give the number of re-ranked candidates; 1 re-ranks nothing."""
MOST_CANDIDATES = 2_000
FIRST_WIDTH = 3
WIDENED_FOR = 0.002
"""A search for more candidates takes longer, so more are looked at only while the last doubling of them brought more
recall than this."""
NO_GAIN = 0.0005
"""Twice the probes bring no more than this: what is missing, the codes have lost."""
COARSE_QUERIES, FEWEST_QUERIES = 120, 30
"""Queries of each set for the doubling of probes; fewer if that takes too long."""
PATIENCE = 4
"""Doubling goes on, with fewer and fewer queries, until this many times the time for the sweep is over."""
STEPS_UP = 4
CLOSE_LOOKS = 4
"""Number of closer looks that the remaining time is divided by, to choose the number of queries for one."""
LAST_DOUBLINGS = 4
"""Number of the last doublings that are measured with all queries if there is a latency target alone."""
HALF_STEP_DOWN = 2**-0.25


def sweep(searcher: Searches, halves: Mapping[str, Half], goal: Goal, *, seconds: float) -> tuple[list[Point], bool]:
    """Settings with their recall; and whether all were looked at that could be of use before the time was over.

    With some of the queries, probes are doubled until the goal is passed or nothing is gained any more. With all of
    them, the steps of sqrt 2 around what the goal needs are looked at.

    Args:
        seconds: of the processor for all of it, if that is enough to find anything. Of the processor, so that what
            else the machine does changes nothing about the setting.
    """
    work = Sweep(
        searcher=searcher,
        halves=halves,
        goal=goal,
        nlist=searcher.nlist,
        factors=k_factors(goal, searcher.refines, searcher.n),
        began=time.process_time(),
        seconds=seconds,
    )
    doubled = work.double()
    refined = work.measure_closer()
    return [point for nprobe in sorted(work.measured) for point in work.measured[nprobe]], doubled and refined


def k_factors(goal: Goal, refines: bool, rows: int) -> tuple[int, ...]:
    """Factors that make a difference for an index of `rows` rows."""
    if not refines:
        return (1,)
    return tuple(factor for factor in K_FACTORS if factor == 1 or factor * goal.k <= min(MOST_CANDIDATES, 2 * rows - 1))


@dataclass(slots=True, kw_only=True)
class Sweep:
    """A sweep under way.

    Attributes:
        factors: that there are.
        width: how many of them are looked at by now.
        measured: probes -> a point for each factor that was looked at with them.
        took_ms: probes -> time of one of the queries that were searched together.
    """

    searcher: Searches
    halves: Mapping[str, Half]
    goal: Goal
    nlist: int
    factors: tuple[int, ...]
    began: float
    seconds: float
    width: int = FIRST_WIDTH
    measured: dict[int, list[Point]] = field(default_factory=dict)
    took_ms: dict[int, float] = field(default_factory=dict)

    def double(self) -> bool:
        """Look at 1, 2, 4 probes and so on with some queries; False if the time was over before the end."""
        count, nprobe, beyond = COARSE_QUERIES, 1, False
        while True:
            spent = self._measure(nprobe, count)
            if nprobe >= self.nlist or beyond or self._ended() or self._too_slow(nprobe):
                return True
            # One step beyond what the goal needs: fewer candidates may be enough there.
            beyond = self._reached(nprobe, margin=True)
            nprobe = min(2 * nprobe, self.nlist)
            remaining_s = self.began + self.seconds / 2 - time.process_time()
            while 2.5 * spent > remaining_s and count > FEWEST_QUERIES:
                count, spent = count // 2, spent / 2
            if 2.5 * spent > remaining_s + PATIENCE * self.seconds:
                return False

    def measure_closer(self) -> bool:
        """Look with all queries at what may be chosen, with fewer where these take too long.

        False if the time was over before the end.
        """
        end = self.began + self.seconds
        for nprobe in self._candidates():
            remaining_s = end - time.process_time()
            if remaining_s <= 0.0:
                return False
            like = min(self.took_ms, key=lambda probes: abs(math.log(probes / nprobe)))
            share = remaining_s / CLOSE_LOOKS / (1e-3 * self.took_ms[like] * self._all)
            most = max(map(len, self.halves.values()))
            count = most if share >= 1.0 else max(COARSE_QUERIES // 2, int(share * most))
            if nprobe not in self.measured or self.measured[nprobe][0].queries < self._all:
                self._measure(nprobe, count)
        return True

    def _candidates(self) -> Iterator[int]:
        if self.nlist == 1:
            yield 1
        elif self.goal.recall is None:
            for nprobe in sorted(self.measured)[-LAST_DOUBLINGS:]:
                yield _rounded(nprobe / math.sqrt(2))
                yield nprobe
        else:
            yield from self._around_goal()

    def _around_goal(self) -> Iterator[int]:
        """One step down from the first probes that seem enough, or up until it is."""
        measured = sorted(self.measured)
        first = next((nprobe for nprobe in measured if self._reached(nprobe, margin=False)), measured[-1])
        self.width = self._narrowest(first)
        yield first
        enough = first
        if self._reached(first, margin=True):
            yield (lower := _rounded(first / math.sqrt(2)))
            enough = lower if self._reached(lower, margin=True) else first
        else:
            for step in range(1, STEPS_UP + 1):
                if enough == self.nlist:
                    return
                yield (enough := min(self.nlist, _rounded(first * math.sqrt(2) ** step)))
                if self._reached(enough, margin=True):
                    break
        yield _rounded(enough * HALF_STEP_DOWN)
        if len(self.factors) > 1 and self._reached(enough, margin=True):
            yield min(self.nlist, _rounded(enough * math.sqrt(2)))

    def _narrowest(self, nprobe: int) -> int:
        """Number of factors worth measuring with `nprobe` probes; `_measure` widens it where needed."""
        points = self.measured[nprobe]
        top = points[-1].recall
        for width, point in enumerate(points, start=1):
            if all(top[name] - value <= WIDENED_FOR for name, value in point.recall.items()):
                return width
        return len(points)

    def _measure(self, nprobe: int, count: int) -> float:
        """Search with the first queries of each set for as many candidates as bring anything; returns the seconds."""
        began = time.process_time()
        halves = {name: half.first(count) for name, half in self.halves.items()}
        while True:
            started = time.process_time()
            self.width = min(self.width, len(self.factors))
            points = self.measured[nprobe] = self._points(nprobe, halves)
            self.took_ms[nprobe] = 1e3 * (time.process_time() - started) / sum(map(len, halves.values()))
            if self.width == len(self.factors) or not self._widens(points):
                return time.process_time() - began
            self.width += 1

    def _widens(self, points: list[Point]) -> bool:
        if len(points) < 2:
            return True
        last, previous = points[-1].recall, points[-2].recall
        return any(last[name] - previous[name] > WIDENED_FOR for name in last)

    def _points(self, nprobe: int, halves: Mapping[str, Half]) -> list[Point]:
        """One point for each factor."""
        goal, factors = self.goal, self.factors[: self.width]
        recalls: list[dict[str, float]] = [{} for _ in factors]
        errors: list[dict[str, float]] = [{} for _ in factors]
        answered = 1.0
        for name, half in halves.items():
            ids = half.candidates(self.searcher, max(goal.k * factors[-1], goal.least_found), nprobe)
            available = (half.truth.ids >= 0).sum(axis=1)
            if goal.least_found:
                enough = (ids >= 0).sum(axis=1) >= np.minimum(available, goal.least_found)
                answered = min(answered, float(enough.mean()))
            possible = np.minimum(available, goal.k)
            hits = np.cumsum(which_right(ids, half.truth, goal.k), axis=1)
            for at, factor in enumerate(factors):
                each = np.minimum(hits[:, goal.k * factor - 1], possible) / possible
                recalls[at][name] = float(each.mean())
                errors[at][name] = float(each.std() / np.sqrt(len(each)))
        queries = sum(map(len, halves.values()))
        return [
            Point(
                setting=Setting(nprobe=nprobe, k_factor=factor),
                recall=recalls[at],
                errors=errors[at],
                found=answered,
                queries=queries,
            )
            for at, factor in enumerate(factors)
        ]

    @property
    def _all(self) -> int:
        return sum(map(len, self.halves.values()))

    def _reached(self, nprobe: int, *, margin: bool) -> bool:
        point = self.measured[nprobe][-1]
        return self.goal.recall is not None and point.reaches(self.goal.recall, margin=margin) and point.finds_enough

    def _ended(self) -> bool:
        """True after two doublings in a row that brought nothing."""
        if len(self.measured) < 5:
            return False
        first, middle, last = (self.measured[nprobe][-1].recall for nprobe in sorted(self.measured)[-3:])
        return all(last[name] - middle[name] < NO_GAIN and middle[name] - first[name] < NO_GAIN for name in last)

    def _too_slow(self, nprobe: int) -> bool:
        limit = self.goal.milliseconds
        return nprobe > 1 and limit is not None and self.goal.recall is None and self.took_ms[nprobe] > 4 * limit


def _rounded(probes: float) -> int:
    return max(1, round(probes))
