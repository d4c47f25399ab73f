"""The recall of all settings, on the half of each query set that is tuned on.

One search per number of probes serves all factors of re-ranking: re-ranking is exact, so a true neighbour among the
first k * k_factor candidates is an answer, and one beyond them is none. So the candidates need not be read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from indexer.points import Goal, Point, Searches, Setting
from indexer.recall import Truth, which_right

K_FACTORS = (1, 2, 4, 8, 16, 32, 64)
"""How many times k candidates are re-ranked; 1 re-ranks nothing."""
MOST_CANDIDATES = 2_000
BEYOND = 4
"""So many times the probes that are needed at the least are looked at: fewer candidates may then be enough."""
NO_GAIN = 0.0005
"""Twice the probes bring no more than this: what is missing, the codes have lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One half of a query set.

    Attributes:
        vectors: float32 (q, d).
        own: int64 (q,), see `indexer.queries.QuerySet`.
    """

    vectors: np.ndarray
    own: np.ndarray
    truth: Truth

    def first(self, count: int) -> Half:
        """The half's first queries."""
        some = slice(0, count)
        return Half(vectors=self.vectors[some], own=self.own[some], truth=self.truth.of(some))

    def search(self, searcher: Searches, k: int, setting: Setting) -> np.ndarray:
        """int64 (q, k): the answers without each query's own row."""
        return self._without_own(
            searcher.search(self.vectors, self._with_own(k), nprobe=setting.nprobe, k_factor=setting.k_factor).ids, k
        )

    def candidates(self, searcher: Searches, k: int, nprobe: int) -> np.ndarray:
        """int64 (q, k): the best by their codes alone."""
        return self._without_own(searcher.search(self.vectors, self._with_own(k), nprobe=nprobe, refine=False).ids, k)

    def _with_own(self, k: int) -> int:
        return k + bool((self.own >= 0).any())

    def _without_own(self, ids: np.ndarray, k: int) -> np.ndarray:
        others = ids != np.where(self.own < 0, -2, self.own)[:, None]
        order = np.argsort(~others, axis=1, kind="stable")
        kept: np.ndarray = np.where(
            np.take_along_axis(others, order, axis=1), np.take_along_axis(ids, order, axis=1), -1
        )
        return kept[:, :k]


def k_factors(goal: Goal, refines: bool, rows: int) -> tuple[int, ...]:
    """Factors that make a difference for an index of so many rows."""
    if not refines:
        return (1,)
    return tuple(one for one in K_FACTORS if one == 1 or (one * goal.k <= MOST_CANDIDATES and one * goal.k < 2 * rows))


def sweep(
    searcher: Searches, halves: Mapping[str, Half], goal: Goal, *, nlist: int, refines: bool, rows: int, deadline: float
) -> tuple[list[Point], bool]:
    """Settings with their recall; and whether all were looked at that could be of use before the deadline.

    Probes are doubled until the goal is passed or nothing is gained any more; then the steps of sqrt 2 between those
    where it is reached.

    Args:
        nlist: lists of the index; 1 of a flat one.
        deadline: of `time.monotonic`.
    """
    factors = k_factors(goal, refines, rows)
    by_probes: dict[int, list[Point]] = {}
    nprobe, reached, spent = 1, 0, 0.0
    while True:
        before = time.monotonic()
        if by_probes and before + 2.2 * spent > deadline:
            return _flat(by_probes), False
        by_probes[nprobe] = points = _points(searcher, halves, goal, nprobe, factors)
        spent = time.monotonic() - before
        if not reached and goal.recall is not None and points[-1].reaches(goal.recall, margin=True):
            reached = nprobe
        per_query_ms = 1e3 * spent / sum(len(one.vectors) for one in halves.values())
        too_slow = goal.milliseconds is not None and goal.recall is None and per_query_ms > 2 * goal.milliseconds
        enough = reached and nprobe >= BEYOND * reached and points[-1].found >= 0.99
        if nprobe >= nlist or enough or too_slow or _ended(by_probes):
            break
        nprobe = min(2 * nprobe, nlist)
    for between in _between(by_probes, goal, factors):
        if time.monotonic() + spent > deadline:
            return _flat(by_probes), False
        by_probes[between] = _points(searcher, halves, goal, between, factors)
    return _flat(by_probes), True


def _points(
    searcher: Searches, halves: Mapping[str, Half], goal: Goal, nprobe: int, factors: tuple[int, ...]
) -> list[Point]:
    """One point for each factor."""
    recalls: list[dict[str, float]] = [{} for _ in factors]
    errors: list[dict[str, float]] = [{} for _ in factors]
    found = 1.0
    for name, half in halves.items():
        width = max(goal.k * factors[-1], goal.least_found)
        ids = half.candidates(searcher, width, nprobe)
        if goal.least_found:
            there = np.minimum((half.truth.ids >= 0).sum(axis=1), goal.least_found)
            found = min(found, float((np.minimum((ids >= 0).sum(axis=1), there) >= there).mean()))
        possible = np.minimum((half.truth.ids >= 0).sum(axis=1), goal.k)
        hits = np.cumsum(which_right(ids, half.truth, goal.k), axis=1)
        for at, factor in enumerate(factors):
            count = np.minimum(hits[:, min(goal.k * factor, hits.shape[1]) - 1], possible)
            each = (count / np.maximum(possible, 1))[possible > 0]
            recalls[at][name] = float(each.mean())
            errors[at][name] = float(each.std() / np.sqrt(len(each)))
    return [
        Point(setting=Setting(nprobe=nprobe, k_factor=factor), recall=recalls[at], errors=errors[at], found=found)
        for at, factor in enumerate(factors)
    ]


def _ended(by_probes: Mapping[int, list[Point]]) -> bool:
    """Whether two doublings in a row have brought nothing."""
    if len(by_probes) < 5:
        return False
    first, before, last = (by_probes[one][-1].recall for one in sorted(by_probes)[-3:])
    return all(last[name] - before[name] < NO_GAIN and before[name] - first[name] < NO_GAIN for name in last)


def _between(by_probes: Mapping[int, list[Point]], goal: Goal, factors: tuple[int, ...]) -> list[int]:
    """Probes between the last that misses the goal and the first that reaches it, for each factor."""
    looked = sorted(by_probes)
    if goal.recall is None:
        return [_middle(a, b) for a, b in pairwise(looked) if _middle(a, b) not in by_probes]
    found = set()
    for at in range(len(factors)):
        for a, b in pairwise(looked):
            if by_probes[b][at].reaches(goal.recall, margin=True):
                found.add(_middle(a, b))
                break
    return sorted(found - set(looked))


def _middle(a: int, b: int) -> int:
    return round(math.sqrt(a * b))


def _flat(by_probes: Mapping[int, list[Point]]) -> list[Point]:
    return [point for nprobe in sorted(by_probes) for point in by_probes[nprobe]]
