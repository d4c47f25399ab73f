"""How fast a device is now, in tokens per second of each run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

WINDOW_S = 20.0
LEAST_BATCHES = 4
"""A speed is that of the last 20 seconds, or of the last 4 batches where these took longer."""
BIN_S = 0.25
"""Batches that end closer to each other than that are counted as one, so that few are kept."""


class _Point(NamedTuple):
    ended: float
    tokens: Counter[str]
    """Of each run, of all batches until then."""


class Speed:
    """Measures from the end of one batch to the end of another, so that a device whose batches take seconds is as fast
    right after one as it is right before the next.

    Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._points: deque[_Point] = deque()

    def batch(self, began: float, ended: float, tokens: Mapping[str, int]) -> None:
        """Count a batch: how many tokens it had, by run."""
        if not self._points:
            self._points.append(_Point(began, Counter()))
        there = self._points[-1].tokens
        if len(self._points) > 2 and ended - self._points[-2].ended < BIN_S:
            self._points.pop()
        self._points.append(_Point(ended, there + Counter(tokens)))
        while len(self._points) > LEAST_BATCHES + 1 and self._points[1].ended <= ended - WINDOW_S:
            self._points.popleft()

    def rest(self) -> None:
        """The device has had nothing to do, which says nothing of its speed."""
        self._points.clear()

    def per_s(self, now: float) -> dict[str, float]:
        """Run -> tokens per second; those of a device that has not finished a batch are not known.

        A batch that takes longer than all before it counts as the largest of them, at most, once it ends.
        """
        if len(self._points) < 2:
            return {}
        first, last = self._points[0], self._points[-1]
        done = last.tokens - first.tokens
        all_done, span = done.total(), last.ended - first.ended
        if not all_done or span <= 0:
            return {}
        at_most = (all_done + self._largest()) / (now - first.ended) if now > last.ended else all_done / span
        share = min(1.0, at_most / (all_done / span))
        return {run: tokens / span * share for run, tokens in done.items()}

    def in_hand(self, now: float) -> dict[str, float]:
        """Run -> tokens that are probably done of the batch in hand, which is taken for one like the largest."""
        speeds = self.per_s(now)
        if not speeds:
            return {}
        seconds = min(now - self._points[-1].ended, self._largest() / sum(speeds.values()))
        return {run: speed * max(0.0, seconds) for run, speed in speeds.items()}

    def _largest(self) -> int:
        pairs = zip(self._points, list(self._points)[1:], strict=False)
        return max(after.tokens.total() - before.tokens.total() for before, after in pairs)
