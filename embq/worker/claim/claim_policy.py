"""Decides how many units a worker claims.

One rule: a worker claims further units while it finishes those in hand within some seconds, and within half of the time
that is left of the run. It leaves the last units to workers that finish them earlier (`makespan`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import redis

from embq.core.models import ModelConfig
from embq.core.queue import hints
from embq.core.queue.keys import run_key, speeds_key
from embq.core.queue.runs import units_unclaimed
from embq.core.queue.worker_speeds import ROUNDING, WorkerSpeed, other_speeds
from embq.core.units import Unit
from embq.worker.claim.lease import Leases
from embq.worker.embedders.base import Embedder
from embq.worker.meter.meter import Throughput
from embq.worker.stages.batching import WINDOW_S

AHEAD_S, SORTED_AHEAD_S = 2.0, WINDOW_S + 2.0
"""Seconds of work in hand: the next unit can be opened in that time, and a change of priority is felt after it. More
where samples are sorted by length, which wants a window of them."""
FETCH_AHEAD_S = 30.0
"""The same, where whole files come from far; such units are not begun, and an idle worker may still take them."""
LEAST_AHEAD_S = 0.1
"""Least work in hand, however near the end is: with less, a fast device would wait for its next unit."""
UNITS_AHEAD, WINDOWS_AHEAD, MOST_AHEAD = 64, 2, 1024
"""Units in hand: that many, or as many as fill this many windows, but never more than the last."""
PULL = 32
"""Units claimed at once, at most."""
LOOK_LEAST_S, LOOK_IDLE_S, LOOK_MOST_S, LOOKS = 0.1, 0.5, 2.0, 20
"""A worker looks at what is left, and at the others, so often in the time that is left, and within these bounds; less
often if nothing is left."""
REST_LEAST_S, REST_MOST_S, RESTS = 0.01, 0.1, 20
"""A worker that holds enough asks itself again after such a share of the seconds that it has in hand, within these
bounds: a request to stop is seen no earlier."""
PATIENCE_S = 1.0
"""So much later than expected, a unit that was left to others is taken after all."""


STEPS, EXACT_S = 50, 1e-5
"""Steps of the bisection at most, and the seconds to which its result is exact: each step takes 4 us of CPU."""


def makespan(unclaimed: int, workers: Sequence[WorkerSpeed], *, since_s: float = 0.0) -> float:
    """Seconds until `unclaimed` units can be done, where each goes to the worker that finishes it first.

    The earliest time by which the workers, of which there is one at least, get that many further units done.

    Args:
        since_s: that have passed since the workers were looked at.
    """
    ahead_s, unit_s, count = np.array([(worker.ahead_s, worker.unit_s, worker.workers) for worker in workers]).T
    ahead_s = np.maximum(0.0, ahead_s - since_s)
    low, high = 0.0, float(np.min(ahead_s + unclaimed * unit_s))
    for _ in range(STEPS):
        if high - low <= EXACT_S:
            break
        middle = (low + high) / 2
        units = np.maximum(0.0, np.floor((middle - ahead_s) / unit_s + ROUNDING))
        if float(count @ units) >= unclaimed:
            high = middle
        else:
            low = middle
    return high


class ClaimPolicy:
    """Decides for one worker process how many units to claim now.

    Args:
        client: used by the thread that claims, and by no other.
        name: of this worker; its own report is not one of another.
        run: the one run that it serves; "" for all.
        runs: ids of the runs that it may serve with the loaded model.
        prefetch: units that wait to be read, where their files come from far.
        embedder: its batch size and window bound the samples in hand.

    Attributes:
        enough: the last `room` was 0 because of the units in hand, not because none wait.
        unclaimed: units that are left to claim, by the last look and what was claimed since.
    """

    def __init__(
        self,
        client: redis.Redis,
        leases: Leases,
        throughput: Throughput,
        model: ModelConfig,
        *,
        name: str,
        run: str = "",
        runs: Callable[[], Iterable[str]],
        prefetch: int,
        embedder: Embedder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.leases = leases
        self.throughput = throughput
        self.model = model
        self.name = name
        self.run = run
        self.runs = runs
        self.prefetch = prefetch
        self.embedder = embedder
        self.from_far = False
        self.enough = False
        self.unclaimed = 0
        self._clock = clock
        self._most_s = SORTED_AHEAD_S if embedder.window > embedder.batch_size else AHEAD_S
        self._queue = hints.hint_queue(client, model.queue_key)
        self._peers: list[WorkerSpeed] = []
        self._look_at = 0.0
        self._looked_at = 0.0
        self._due_at: float | None = None
        self._room_s = 0.0
        self._ahead_s = 0.0

    @property
    def rest_s(self) -> float:
        """Seconds after which to ask for `room` again, after it was 0."""
        return min(REST_MOST_S, max(REST_LEAST_S, self._ahead_s / RESTS))

    def room(self) -> int:
        """Units to claim now; 0 if this worker holds enough, or the others finish what is left before it would."""
        held = self.leases.at_work()
        ahead_s, unit_s = self.throughput.ahead_s(held), self.throughput.unit_s
        self._ahead_s = ahead_s or 0.0
        self.enough = False
        is_fetched = self.from_far and sum(unit.stage == "queued" for unit in held) < self.prefetch
        if is_fetched and (ahead_s or 0.0) < FETCH_AHEAD_S:
            if unit_s is None or ahead_s is None:
                return 1
        elif unit_s is None or ahead_s is None:
            # Until a first batch tells how fast the device is, one unit; until it is read, where only that tells
            # how large it is.
            self.enough = bool(held)
            return 0 if held else 1
        elif held and ahead_s >= self._most_s:
            self.enough = True
            return 0
        own = WorkerSpeed(ahead_s=ahead_s, unit_s=unit_s)
        end_s = self._end_s(own)
        share = own.units_by(end_s)
        if not share:
            return self._patience(ahead_s + unit_s, idle=not held)
        self._due_at = None
        if is_fetched:
            return 1
        wanted_s = min(self._most_s, max(LEAST_AHEAD_S, end_s / 2 if self._peers else end_s))
        if held and ahead_s >= wanted_s:
            self.enough = True
            return 0
        self._room_s = wanted_s - ahead_s
        units = min(math.ceil(self._room_s / unit_s), math.ceil(share / 2), PULL, self._free(len(held)))
        return max(0 if held else 1, units)

    def fits(self, units: Sequence[Unit]) -> int:
        """Number of the given units to claim, in their order; at least the first.

        `room` took all for units of usual size; these are seen.
        """
        left_s = self._room_s
        for count, unit in enumerate(units[:-1], 1):
            left_s -= self.throughput.seconds_of(unit) or 0.0
            if left_s <= 0.0:
                return count
        return len(units)

    def claimed(self, unit: Unit, *, from_far: bool) -> None:
        """Note a unit that was claimed, and whether its file is fetched before it is read."""
        self.throughput.unit_claimed(unit)
        self.from_far = from_far
        self.unclaimed = max(0, self.unclaimed - 1)

    def describe(self) -> dict[str, Any]:
        """Fields of the report, which the producer sums up: seconds of work in hand, and seconds per unit."""
        ahead_s, unit_s = self.throughput.ahead_s(self.leases.snapshot()), self.throughput.unit_s
        if ahead_s is None or unit_s is None:
            return {}
        return {"ahead_s": round(ahead_s, 4), "unit_s": max(1e-6, round(unit_s, 6))}

    def _free(self, held: int) -> int:
        """Units that may be claimed on top of those held."""
        samples = max(1.0, self.throughput.unit_samples or 1.0)
        window = max(self.embedder.window, self.embedder.batch_size)
        most = max(UNITS_AHEAD, math.ceil(WINDOWS_AHEAD * window / samples))
        return max(0, min(MOST_AHEAD, most) - held)

    def _end_s(self, own: WorkerSpeed) -> float:
        """Seconds until every unclaimed unit is done; if there is none, until one that may yet come is done."""
        now = self._clock()
        if now >= self._look_at:
            with self.client.pipeline(transaction=False) as pipe:
                pipe.time()
                pipe.get(speeds_key(self.model.queue_key))
                # Of the one run that it serves: hints that wait for others are not left to do.
                pipe.zcard(run_key(self.run, "hinted")) if self.run else pipe.llen(self._queue.key)
                (seconds, micros), speeds, waiting = pipe.execute()
            self.unclaimed = waiting + units_unclaimed(self.client, self.runs())
            self._peers = other_speeds(speeds, seconds * 1000 + micros // 1000, self.name)
            self._looked_at = now
        since_s = now - self._looked_at
        # Own work in hand is as of now.
        own = replace(own, ahead_s=own.ahead_s + since_s)
        end_s = makespan(max(1, self.unclaimed), [own, *self._peers], since_s=since_s)
        if since_s == 0.0:
            least_s = LOOK_LEAST_S if self.unclaimed else LOOK_IDLE_S
            self._look_at = now + min(LOOK_MOST_S, max(least_s, end_s / LOOKS))
        return end_s

    def _patience(self, own_s: float, *, idle: bool) -> int:
        """0 while units are left to others; 1 if they are there still when this one would have been done as well."""
        now = self._clock()
        if not self.unclaimed:
            self._due_at = None
            return 0
        if self._due_at is None:
            self._due_at = now + own_s + PATIENCE_S
        if idle and now >= self._due_at:
            self._due_at = None
            return 1
        return 0
