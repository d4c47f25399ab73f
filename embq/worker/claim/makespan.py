"""The end of a run, as the speeds of its workers have it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embq.core.queue.worker_speeds import ROUNDING, WorkerSpeed

STEPS, EXACT_S = 50, 1e-5
"""Steps of the bisection at most, and the seconds to which its result is exact: each step takes 4 us of CPU."""


def makespan(left: int, workers: Sequence[WorkerSpeed], *, since_s: float = 0.0) -> float:
    """Seconds until `left` unclaimed units can be done, where each goes to the worker that finishes it first.

    The earliest time by which the workers, of which there is one at least, get so many further units done.

    Args:
        since_s: that have passed since the workers were looked at.
    """
    ahead_s, unit_s, count = np.array([(one.ahead_s, one.unit_s, one.workers) for one in workers]).T
    ahead_s = np.maximum(0.0, ahead_s - since_s)
    low, high = 0.0, float(np.min(ahead_s + left * unit_s))
    for _ in range(STEPS):
        if high - low <= EXACT_S:
            break
        middle = (low + high) / 2
        units = np.maximum(0.0, np.floor((middle - ahead_s) / unit_s + ROUNDING))
        if float(count @ units) >= left:
            high = middle
        else:
            low = middle
    return high
