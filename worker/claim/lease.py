"""One claimed unit on its way through the pipeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from sys import getsizeof
from typing import TYPE_CHECKING

from core.queue.hints import Hint
from core.queue.keys import MAX_ATTEMPTS
from core.queue.ledger import Ledger
from core.queue.runs import RunRecord
from core.run.unit_sizes import size_of
from core.units import Failure, Sample

if TYPE_CHECKING:
    import numpy as np


class LeasedUnit:
    """A unit under a lease: what it is, and what became of its samples so far.

    Outcomes are touched by the embed stage only; `lost` may be set by any thread.

    Attributes:
        extent: how much it holds, as far as planning knows.
        planned: its samples; None until it is read, where only reading tells.
        token: the lease.
        lost: True once the lease is known to be gone; the unit's remaining work is dropped.
        stage: where the unit is now, for `embq status`.
        attempt: how often its samples are tried now, with attempts that ended their worker and earlier retries.
        suspect: it was charged before, so it runs alone.
        careful: goes sample by sample, one after the other, so that the sample that ends the process can be named.
        poison: ordinals of samples that ended their worker; they become failures unseen.
        truncated: texts that were longer than the model reads.
        tokens: what its embedded samples cost the device, as `Embedder.length` says.
        handled: samples that have become a row or a failure; a text that was cut, with the last of its chunks.
    """

    def __init__(
        self, hint: Hint, record: RunRecord, ledger: Ledger, token: str, *, attempts: int, poison: frozenset[int]
    ) -> None:
        self.u = hint.u
        self.run = hint.run
        self.gen = hint.gen
        self.unit = hint.unit
        self.unit_id = hint.unit.unit_id
        self.extent = size_of(hint.unit)
        self.planned = hint.unit.expected
        self.record = record
        self.ledger = ledger
        self.token = token
        self.attempt = attempts + 1 + (0 if hint.unit.retry is None else hint.unit.retry.attempts)
        self.suspect = attempts > 0
        self.careful = attempts >= MAX_ATTEMPTS - 1
        self.poison = poison
        self.lost = False
        self.stage = "queued"
        self.claimed_at = time.monotonic()
        self.samples: list[Sample] = []
        self.vectors: dict[str, list[np.ndarray]] = {}
        self.failures: list[Failure] = []
        self.truncated = 0
        self.tokens = 0
        self.handled = 0
        self._announced: int | None = None
        self._chunks_left: dict[int, int] = {}

    def add_rows(self, samples: Sequence[Sample], vectors: dict[str, np.ndarray]) -> None:
        """Keep what is stored of some samples: output -> array of shape (len(samples), width), and the similarities."""
        self.samples.extend(s if s.image is None else replace(s, image=None) for s in samples)
        for output, block in vectors.items():
            self.vectors.setdefault(output, []).append(block)
        self._count(samples)

    def add_failure(self, sample: Sample, code: str, message: str) -> None:
        """Record that a sample has no row."""
        self.failures.append(
            Failure(ordinal=sample.ordinal, key=sample.key, code=code, message=message, attempt=self.attempt)
        )
        self._count([sample])

    def fail_whole(self, code: str, message: str) -> None:
        """The unit's source cannot be trusted: drop every row, keep one failure that stands for all of it."""
        self.samples, self.vectors = [], {}
        self.failures = [Failure(ordinal=None, key="", code=code, message=message, attempt=self.attempt)]
        self.truncated = self.tokens = 0
        self._announced = self.planned = self.handled = 1

    def end_of_read(self, samples: int) -> None:
        """The reader has given all `samples` samples of the unit."""
        self._announced = self.planned = samples

    def left_of(self, tokens: float) -> float:
        """Tokens of samples that are neither a row nor a failure, of so many that all have together."""
        if self.planned is None:
            return max(0.0, tokens - self.tokens)
        return tokens * (1 - self.handled / self.planned) if self.handled < self.planned else 0.0

    @property
    def text_bytes(self) -> int:
        """Memory that texts and metadata of its rows take."""
        return sum(getsizeof(sample.text) + getsizeof(sample.metadata) for sample in self.samples)

    @property
    def complete(self) -> bool:
        """Whether every sample has become a row or a failure."""
        return self.handled == self._announced

    def _count(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if sample.passage is not None:
                left = self._chunks_left.pop(sample.ordinal, sample.passage.count) - 1
                if left:
                    self._chunks_left[sample.ordinal] = left
                    continue
            self.handled += 1


class Leases:
    """The units that this process holds, for the heartbeat and for draining. Safe to use from any thread."""

    def __init__(self) -> None:
        self._held: dict[str, LeasedUnit] = {}
        self._changed = threading.Condition()

    def add(self, work: LeasedUnit) -> None:
        """Start beating for a unit."""
        with self._changed:
            self._held[work.token] = work

    def remove(self, work: LeasedUnit) -> None:
        """Stop beating for a unit: it is published, released or lost."""
        with self._changed:
            self._held.pop(work.token, None)
            self._changed.notify_all()

    def snapshot(self) -> list[LeasedUnit]:
        """The units held now."""
        with self._changed:
            return list(self._held.values())

    def wait_until_at_most(self, count: int, *, timeout_s: float) -> bool:
        """Wait until no more than `count` units are held; False where that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._held) <= count, timeout_s)
