"""What a worker does with its time, measured where the work happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from worker.speed import Speed
from worker.throughput import Throughput

STAGES = ("read", "prepare", "embed", "publish", "full")
"""Busy seconds are kept for each: reading samples, decoding or tokenising (per thread), the device, handing results
over, and waiting because the writer has no room."""


class Stats:
    """Counters of one worker process. Safe to use from any thread.

    Attributes:
        rows: samples that got a vector.
        tokens: their own, as `Embedder.length` says.
        processed: tokens that the device computed for them, with the padding.
        memory_full: passes for which the device had no room.
        recomputed: samples whose vectors were not finite, and were computed once more in fp32.
        failed: samples and units that did not.
        units: units published.
        throughput: how fast rows come out, whatever holds them up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = dict.fromkeys(STAGES, 0.0)
        self.rows = 0
        self.tokens = 0
        self.processed = 0
        self.memory_full = 0
        self.recomputed = 0
        self.failed = 0
        self.units = 0
        self.throughput = Throughput()
        self._speed = Speed()
        self.first_batch_at: float | None = None
        self.last_batch_at: float | None = None

    @contextmanager
    def busy(self, stage: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            with self._lock:
                self._busy[stage] += spent

    def batch_done(self, rows: int, tokens: Mapping[str, int], *, processed: int, took_s: float) -> None:
        """Count a batch of vectors, the tokens of each run that they were made of, and all with the padding."""
        now = time.monotonic()
        with self._lock:
            self._speed.batch(now - took_s, now, tokens)
            self.rows += rows
            self.tokens += sum(tokens.values())
            self.processed += processed
            self.last_batch_at = now
            if self.first_batch_at is None:
                self.first_batch_at = now

    def tokens_per_s(self) -> tuple[dict[str, float], dict[str, float]]:
        """Run -> tokens per second by the last batches, and tokens done of the one in hand; see `worker.speed`."""
        now = time.monotonic()
        with self._lock:
            return self._speed.per_s(now), self._speed.in_hand(now)

    def rested(self) -> None:
        """Nothing was in hand for a while, so what was measured before says nothing of what comes."""
        with self._lock:
            self._speed.rest()

    def unit_done(self, failures: int) -> None:
        """Count a published unit."""
        with self._lock:
            self.units += 1
            self.failed += failures

    def busy_seconds(self) -> dict[str, float]:
        """Busy seconds per stage since the start."""
        with self._lock:
            return dict(self._busy)
