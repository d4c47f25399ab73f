"""How fast a worker is, measured batch by batch, and how many seconds of work it has in hand.

Work is counted in tokens. Those of a unit are not known before it was embedded, but its bytes are, and what a byte of
late units cost: so units of long texts that come after short ones are not taken for short ones. Where a unit has no
bytes, or none of its kind is done yet, its samples tell.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from core.run.unit_sizes import UnitSize, size_of
from core.units import Unit
from worker.claim.lease import LeasedUnit

MEMORY_S = 10.0
"""What was measured so long ago counts a third. A card that is throttled is known to be slow after a few seconds."""
UNITS_REMEMBERED = 10
"""Of as many units the mean size is taken."""


class _Cost(NamedTuple):
    """What some units of one kind cost, and how large they were; later ones count more."""

    tokens: float
    bytes: float


class Throughput:
    """Rows and tokens per second of one worker process, as they come out: a slow reader makes a worker slow as well.

    A sample counts one token at least. Safe to use from any thread.

    Args:
        clock: monotonic seconds, as `UnitWork.claimed_at` has them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rows = self._tokens = self._seconds = 0.0
        self._samples: float | None = None
        self._late: deque[tuple[UnitSize, int | None]] = deque(maxlen=UNITS_REMEMBERED)
        self._costs: dict[str, _Cost] = {}
        self._last_at: float | None = None
        self._last_s = 0.0

    def batch_done(self, rows: int, tokens: int, *, since: float) -> None:
        """Count a batch that has ended now, of which the first sample was claimed at `since`.

        It took the time from the end of the batch before; waiting for units to be had does not count.
        """
        with self._lock:
            now = self._clock()
            began = since if self._last_at is None else max(since, self._last_at)
            self._last_s = max(1e-6, now - began)
            self._last_at = now
            kept = math.exp(-self._last_s / MEMORY_S)
            self._rows = self._rows * kept + rows
            self._tokens = self._tokens * kept + max(rows, tokens)
            self._seconds = self._seconds * kept + self._last_s

    def unit_claimed(self, unit: Unit) -> None:
        """Count a unit as one of late, which those that come will be like."""
        with self._lock:
            self._late.append((size_of(unit), unit.expected))
            if unit.expected is not None:
                self._count(unit.expected)

    def unit_read(self, samples: int) -> None:
        """Count the samples of a unit of which only reading told how many it has."""
        with self._lock:
            self._count(samples)

    def unit_done(self, work: LeasedUnit) -> None:
        """Learn what a byte costs from a unit of which every sample is embedded, or is a failure."""
        with self._lock:
            rate = self._per_s()
            if rate is None or not work.tokens or not work.extent.bytes:
                return
            kept, known = math.exp(-work.tokens / rate / MEMORY_S), self._costs.get(work.extent.kind, _Cost(0.0, 0.0))
            self._costs[work.extent.kind] = _Cost(
                known.tokens * kept + max(len(work.samples), work.tokens), known.bytes * kept + work.extent.bytes
            )

    @property
    def unit_samples(self) -> float | None:
        """Samples of a unit of usual size; None where none is known yet."""
        return self._samples

    @property
    def rows_per_s(self) -> float | None:
        """Speed of late; None before the first batch."""
        with self._lock:
            return self._rows / self._seconds if self._rows else None

    @property
    def tokens_per_s(self) -> float | None:
        """The same in tokens."""
        with self._lock:
            return self._per_s()

    @property
    def unit_s(self) -> float | None:
        """Seconds for a unit like those of late; None where their size or the speed is not known yet."""
        with self._lock:
            rate = self._per_s()
            each = [self._tokens_of(extent, samples) for extent, samples in self._late]
            known = [tokens for tokens in each if tokens is not None]
            return None if rate is None or not known else max(1e-6, sum(known) / len(known) / rate)

    def seconds_of(self, unit: Unit) -> float | None:
        """Seconds for one unit; None where its size or the speed is not known yet."""
        with self._lock:
            rate, tokens = self._per_s(), self._tokens_of(size_of(unit), unit.expected)
            return None if rate is None or tokens is None else tokens / rate

    def ahead_s(self, held: Iterable[LeasedUnit]) -> float | None:
        """Seconds until the device is through with units; None where that cannot be told yet."""
        left = 0.0
        with self._lock:
            rate = self._per_s()
            for work in held:
                tokens = self._tokens_of(work.extent, work.planned)
                if rate is None or tokens is None:
                    return None
                left += work.left_of(tokens)
            if not left or rate is None or self._last_at is None:
                return 0.0
            # The batch in hand is done in part.
            return max(0.0, left / rate - min(self._clock() - self._last_at, self._last_s))

    def _per_s(self) -> float | None:
        return self._tokens / self._seconds if self._rows else None

    def _tokens_of(self, extent: UnitSize, samples: int | None) -> float | None:
        """About how many tokens a unit has."""
        cost = self._costs.get(extent.kind) if extent.bytes else None
        if cost is not None:
            return extent.bytes * cost.tokens / cost.bytes
        count = self._samples if samples is None else samples
        return None if count is None or not self._rows else count * self._tokens / self._rows

    def _count(self, samples: int) -> None:
        usual = samples if self._samples is None else self._samples
        self._samples = usual + (samples - usual) / UNITS_REMEMBERED
