"""What a worker does with its time, measured where the work happens."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from worker.meter.speed import Speed
from worker.meter.stage_times import StageTimes
from worker.meter.throughput import Throughput

DEVICE_MEMORY_S = 10.0
"""Passes before that many seconds of work of the device count a third in what it is said to do."""


class DeviceRate(NamedTuple):
    """What a device does while it has work: tokens per second, and whether by passes that were full."""

    per_s: float
    full: bool


class Meter:
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
        stages: what each stage spends its time with.

    Args:
        threads: those that decode and tokenise.
    """

    def __init__(self, threads: int = 1) -> None:
        self._lock = threading.Lock()
        self.stages = StageTimes(threads)
        self.rows = 0
        self.tokens = 0
        self.processed = 0
        self.memory_full = 0
        self.recomputed = 0
        self.failed = 0
        self.units = 0
        self.throughput = Throughput()
        self._speed = Speed()
        self._passes: dict[bool, tuple[float, float]] = {}
        self.first_batch_at: float | None = None
        self.last_batch_at: float | None = None

    def batch_done(
        self, rows: int, tokens: Mapping[str, int], *, processed: int, took_s: float, full: bool = True
    ) -> None:
        """Count a batch of vectors, the tokens of each run that they were made of, and all with the padding.

        Args:
            took_s: of the device.
            full: it was about as large as suits the device; a smaller one does not show what it can do.
        """
        now = time.monotonic()
        with self._lock:
            self._speed.batch(now - took_s, now, tokens)
            self.rows += rows
            self.tokens += sum(tokens.values())
            self.processed += processed
            kept = math.exp(-took_s / DEVICE_MEMORY_S)
            done, seconds = self._passes.get(full, (0.0, 0.0))
            self._passes[full] = (done * kept + max(rows, sum(tokens.values())), seconds * kept + took_s)
            self.last_batch_at = now
            if self.first_batch_at is None:
                self.first_batch_at = now

    def tokens_per_s(self) -> tuple[dict[str, float], dict[str, float]]:
        """Run -> tokens per second by the last batches, and tokens done of the one in hand."""
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

    def device_per_s(self) -> DeviceRate | None:
        """What the device does while it has work, by its last full passes where there are any; None before the first
        pass. With smaller ones it is the least that it can do."""
        with self._lock:
            for full in (True, False):
                tokens, seconds = self._passes.get(full, (0.0, 0.0))
                if tokens and seconds > 0.0:
                    return DeviceRate(tokens / seconds, full)
            return None
