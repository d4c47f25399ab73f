"""Leases on units, and what a leased unit has collected so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from sys import getsizeof
from typing import TYPE_CHECKING, NamedTuple

from embq.core.queue.hints import Hint
from embq.core.queue.keys import MAX_ATTEMPTS
from embq.core.queue.ledger import Ledger
from embq.core.queue.result_stream import PublishVerdict
from embq.core.queue.runs import RunRecord
from embq.core.run.unit_sizes import size_of
from embq.core.units import Failure, Sample

if TYPE_CHECKING:
    import numpy as np


class Lease:
    """The right of this process to work on one unit of one run. `lost` may be set by any thread.

    Attributes:
        token: the fencing token under which the ledger knows the lease.
        lost: the lease is known to be gone; what remains of the unit's work is dropped.
        publishing: a result was sent and not refused for lack of room; that the ledger then no longer knows the lease
            is no loss.
        stage: the stage in which the unit was last, for `embq status`; "queued" before the first.
        claimed_at: monotonic seconds.
    """

    def __init__(self, run: str, gen: str, u: int, token: str, ledger: Ledger) -> None:
        self.run = run
        self.gen = gen
        self.u = u
        self.token = token
        self.ledger = ledger
        self.lost = False
        self.publishing = False
        self.stage = "queued"
        self.claimed_at = time.monotonic()
        self.held_in: Leases | None = None

    def begin(self) -> bool:
        """Charge an attempt, before the first byte is looked at; False if the lease is lost."""
        self.lost = self.lost or bool(self.ledger.start([(self.u, self.token)]))
        return not self.lost

    def publish(self, fields: Mapping[str, str | bytes | int], *, size: int) -> PublishVerdict:
        """Send a result to the writer."""
        if self.lost:
            return PublishVerdict.LOST
        self.publishing = True
        verdict = self.ledger.publish(self.u, self.token, fields, size=size)
        self.publishing = not verdict.is_full
        return verdict

    def release(self, *, failed: tuple[str, str] | None = None) -> None:
        """Give the lease back: uncharged, or charged with (code, message)."""
        self.lost = True
        self.ledger.release(self.u, self.token, failed=failed)
        self.end()

    def end(self) -> None:
        """No longer hold the unit: it is published, released or lost."""
        if self.held_in is not None:
            self.held_in.remove(self)


ASIDE = "aside"
"""Stage of a unit whose result waits for room: nothing is left to do for it."""


class UnitPart(NamedTuple):
    """Samples of one unit that a stage has in hand. A tuple, because one is made for each unit of each batch.

    Attributes:
        first, last: ordinals, or -1 if none is known.
    """

    lease: Lease
    first: int = -1
    last: int = -1


class LeasedUnit(Lease):
    """A leased unit of a run, with the rows and failures of its samples so far, which only the embed stage touches.

    Attributes:
        extent: size of the unit, as far as planning knows it.
        planned: number of samples; None until the unit is read, where planning does not know it.
        attempt: number of this attempt, with those that ended their worker and earlier retries.
        suspect: an earlier attempt ended its worker, so the unit runs alone.
        careful: goes sample by sample, so that the sample that ends the process can be named.
        poison: ordinals of samples that ended their worker; they become failures unseen.
        truncated: texts that were longer than the model reads.
        unread: samples without metadata, or a caption that is not embedded, because these could not be read.
        tokens: what its embedded samples cost the device, as `Embedder.length` says.
        handled: samples that have become a row or a failure; a text that was cut, with the last of its chunks.
    """

    def __init__(
        self, hint: Hint, record: RunRecord, ledger: Ledger, token: str, *, attempts: int, poison: frozenset[int]
    ) -> None:
        super().__init__(hint.run, hint.gen, hint.u, token, ledger)
        self.unit = hint.unit
        self.unit_id = hint.unit.unit_id
        self.extent = size_of(hint.unit)
        self.planned = hint.unit.expected
        self.record = record
        self.attempt = attempts + 1 + (0 if hint.unit.retry is None else hint.unit.retry.attempts)
        self.suspect = attempts > 0
        self.careful = attempts >= MAX_ATTEMPTS - 1
        self.poison = poison
        self.samples: list[Sample] = []
        self.vectors: dict[str, list[np.ndarray]] = {}
        self.failures: list[Failure] = []
        self.truncated = 0
        self.unread = 0
        self.tokens = 0
        self.handled = 0
        self._announced: int | None = None
        self._chunks_left: dict[int, int] = {}

    def add_rows(self, samples: Sequence[Sample], vectors: dict[str, np.ndarray]) -> None:
        """Keep what is stored of some samples: output -> array of shape (len(samples), width), and the similarities."""
        self.samples.extend(samples)
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
        self.truncated = self.unread = self.tokens = 0
        self._announced = self.planned = self.handled = 1

    def forget_rows(self) -> None:
        """Let go of the rows, which are encoded."""
        self.samples, self.vectors = [], {}

    def drop(self) -> None:
        """Forget the rows of a unit whose lease is lost or given back, and the lease."""
        self.lost = True
        self.forget_rows()
        self.end()

    def end_of_read(self, samples: int) -> None:
        """The reader has given all `samples` samples of the unit."""
        self._announced = self.planned = samples

    def left_of(self, tokens: float) -> float:
        """Tokens of samples that are neither a row nor a failure, out of the `tokens` that all have together."""
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
                remaining = self._chunks_left.pop(sample.ordinal, sample.passage.count) - 1
                if remaining:
                    self._chunks_left[sample.ordinal] = remaining
                    continue
            self.handled += 1


class Leases:
    """The leases that this process holds, for the heartbeat and for draining. Safe to use from any thread."""

    def __init__(self) -> None:
        self._held: dict[str, LeasedUnit] = {}
        self._changed = threading.Condition()

    def add(self, unit: LeasedUnit) -> None:
        """Extend a lease from now on, until it ends."""
        with self._changed:
            unit.held_in = self
            self._held[unit.token] = unit

    def remove(self, lease: Lease) -> None:
        """Extend a lease no longer."""
        with self._changed:
            self._held.pop(lease.token, None)
            self._changed.notify_all()

    def snapshot(self) -> list[LeasedUnit]:
        """The units held now."""
        with self._changed:
            return list(self._held.values())

    def at_work(self) -> list[LeasedUnit]:
        """The units held now but for those whose results wait for room."""
        return [unit for unit in self.snapshot() if unit.stage != ASIDE]

    def release_all(self) -> None:
        """Give every lease back, uncharged."""
        for unit in self.snapshot():
            unit.release()

    def wait_until_at_most(self, count: int, *, timeout_s: float) -> bool:
        """Wait until no more than `count` units are at work; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.at_work()) <= count, timeout_s)
