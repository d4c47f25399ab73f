"""How fast a worker is, measured batch by batch, and how many seconds of work it has in hand."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable

from worker.work import UnitWork

MEMORY_S = 10.0
"""What was measured so long ago counts a third. A card that is throttled is known to be slow after a few seconds."""
UNITS_REMEMBERED = 20
"""Of as many units the mean size is taken, later ones counting more."""


class Throughput:
    """Rows and tokens per second of one worker process, as they come out: a slow reader makes a worker slow as well.

    Safe to use from any thread.

    Args:
        clock: monotonic seconds, as `UnitWork.claimed_at` has them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rows = self._tokens = self._seconds = 0.0
        self._samples: float | None = None
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
            self._tokens = self._tokens * kept + tokens
            self._seconds = self._seconds * kept + self._last_s

    def unit_of(self, samples: int | None) -> None:
        """Count a unit with its samples, once they are known; None is not counted."""
        if samples is None:
            return
        with self._lock:
            usual = samples if self._samples is None else self._samples
            self._samples = usual + (samples - usual) / UNITS_REMEMBERED

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
            return self._tokens / self._seconds if self._rows else None

    @property
    def unit_s(self) -> float | None:
        """Seconds for a unit of usual size; None where the size or the speed is not known yet."""
        rate = self.rows_per_s
        return None if rate is None or self._samples is None else max(1e-6, self._samples / rate)

    def ahead_s(self, held: Iterable[UnitWork]) -> float | None:
        """Seconds until the device is through with units; None where that cannot be told yet."""
        rows = 0.0
        for work in held:
            samples = work.samples_left(self._samples)
            if samples is None:
                return None
            rows += samples
        if not rows:
            return 0.0
        rate = self.rows_per_s
        if rate is None or self._last_at is None:
            return None
        # The batch in hand is done in part.
        return max(0.0, rows / rate - min(self._clock() - self._last_at, self._last_s))
