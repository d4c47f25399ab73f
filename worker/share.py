"""Who should take the units that are left of a run, so that all of it ends soonest: a question of arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 50
"""Of the bisection: far below a millisecond, whatever the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a worker has in hand, and how fast it is.

    Attributes:
        ahead_s: seconds until it is through with what it holds.
        unit_s: seconds that it needs for one more unit; above 0.
    """

    ahead_s: float
    unit_s: float

    def units_by(self, end_s: float) -> int:
        """Further units that it gets done until `end_s` seconds from now."""
        # A unit that ends exactly then counts, whatever rounding says.
        return max(0, math.floor((end_s - self.ahead_s) / self.unit_s + 1e-6))


def end_of(left: int, workers: Sequence[Speed]) -> float:
    """Seconds until `left` units that nobody holds can be done, where each goes to whoever finishes it first.

    The earliest time by which the workers, of which there is one at least, get so many further units done.
    """
    low = 0.0
    high = min(worker.ahead_s + left * worker.unit_s for worker in workers)
    for _ in range(STEPS):
        middle = (low + high) / 2
        if sum(worker.units_by(middle) for worker in workers) >= left:
            high = middle
        else:
            low = middle
    return high
