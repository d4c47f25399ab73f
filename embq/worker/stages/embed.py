"""The embed stage: embeds prepared samples in passes that span units. Only its thread uses the device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from embq.core.errors import DeviceFullError, SampleError
from embq.core.rows.vectors import Fault, similarities, stored
from embq.core.service.log import Events
from embq.core.units import Sample
from embq.worker.claim.lease import LeasedUnit, UnitPart
from embq.worker.embedders.base import Embedder, PendingVectors, Truncated
from embq.worker.meter.meter import Meter
from embq.worker.meter.stage_times import State
from embq.worker.stages.batching import Batch, Batcher, without
from embq.worker.stages.read import Chunk, EndOfUnit


class InFlight(NamedTuple):
    """A forward pass that the device has begun, at a time in monotonic seconds; its vectors may still be on their way.

    Once they have arrived, they are here, or why there are none.
    """

    batch: Batch
    vectors: Mapping[str, np.ndarray] | DeviceFullError
    began: float


class EmbedStage:
    """Gathers samples until a window of them waits or no more come, embeds it pass by pass, and returns the rows to
    their units.

    Where vectors come back while the device goes on (`PendingVectors`), a pass is begun before those of the one before
    are asked for.

    Attributes:
        batcher: the samples that wait for a pass.

    Args:
        hand_on: takes each complete unit.
        next_item: returns the next item in order, if there is one for which `can_wait` holds.
    """

    def __init__(
        self,
        embedder: Embedder,
        meter: Meter,
        *,
        hand_on: Callable[[LeasedUnit], None],
        next_item: Callable[[], Chunk | EndOfUnit | None] = lambda: None,
    ) -> None:
        self.embedder = embedder
        self.meter = meter
        self.hand_on = hand_on
        self.next_item = next_item
        self.log = Events("worker")
        self.batcher = Batcher(embedder, meter.throughput, threads=meter.times.threads)
        self._in_flight: list[InFlight] = []
        self._free_at = 0.0

    @property
    def has_waiting(self) -> bool:
        """Whether samples wait for company, or vectors are on their way."""
        return len(self.batcher) > 0 or bool(self._in_flight)

    @property
    def waiting_state(self) -> State:
        """State of this stage while its thread waits for input: "busy" while the device computes."""
        under_way = [flight.vectors for flight in self._in_flight if isinstance(flight.vectors, PendingVectors)]
        for vectors in under_way:
            if vectors.over_at is None and vectors.is_over():
                vectors.over_at = time.monotonic()
        return "busy" if any(vectors.over_at is None for vectors in under_way) else "starved"

    def add(self, item: Chunk | EndOfUnit) -> None:
        """Take the next item in order; embeds whenever there is a window."""
        self._gather(item)
        while self.batcher.is_full:
            for embedded in self._passes():
                self._gather_as_many(embedded)
        if isinstance(item, Chunk) and item.lease.careful:
            self.flush()

    def _gather_as_many(self, embedded: int) -> None:
        """Let as many samples wait for the next window as a pass of this one took, so that as many more are prepared.

        If all were taken behind the window, all threads would prepare at once while this one begins its next passes,
        which took up to ten times as long then, for want of the interpreter's lock; later they would all be idle.
        """
        count = len(self.batcher) + embedded
        while len(self.batcher) < count and (item := self.next_item()) is not None:
            self._gather(item)

    def _gather(self, item: Chunk | EndOfUnit) -> None:
        if isinstance(item, EndOfUnit):
            self._end(item)
            return
        with self.meter.times.at("embed", self.waiting_state):
            samples, answers = item.prepared.result()
        failed = {place for place, answer in enumerate(answers) if isinstance(answer, SampleError)}
        for place in sorted(failed):
            item.lease.add_failure(samples[place], answers[place].code, answers[place].message)
        if failed:
            good = [place for place in range(len(samples)) if place not in failed]
            samples, answers = [samples[place] for place in good], [answers[place] for place in good]
        item.lease.truncated += sum(isinstance(prepared, Truncated) for prepared in answers)
        tokens = [self.embedder.length(prepared) for prepared in answers]
        self.batcher.add(Batch([item.lease] * len(samples), samples, answers, tokens))

    def flush(self) -> None:
        """Embed what waits, however little it is."""
        while self.has_waiting:
            for _ in self._passes():
                pass
            self._settle()

    def _end(self, item: EndOfUnit) -> None:
        if item.error is not None:
            self._settle()  # some of what the device has in hand may be of this unit
            self.batcher.drop(item.lease)
            if item.error.transient:
                # Another attempt, perhaps on another machine, may succeed; the last one makes it a failure.
                item.lease.release(failed=(item.error.code, item.error.message))
                item.lease.drop()
                return
            item.lease.fail_whole(item.error.code, item.error.message)
        else:
            item.lease.end_of_read(item.samples)
            if item.lease.unit.expected is None:
                self.meter.throughput.unit_read(item.samples)
        self._finish_if_complete(item.lease)

    def _passes(self) -> Iterator[int]:
        """Embed the next window; returns the number of samples of each pass that was begun."""
        for batch in self.batcher.batches():
            if owned := self._still_ours(batch):
                self._embed(owned)
            yield len(batch)

    def _still_ours(self, batch: Batch) -> Batch:
        """The samples whose units are not lost. Asked for each pass, because a window takes seconds."""
        lost = {lease for lease in batch.by_unit if lease.lost}
        for lease in lost:  # its end may have been read already, so nothing else would let go of it
            lease.drop()
        return without(batch, lost) if lost else batch

    def _embed(self, batch: Batch) -> None:
        try:
            with self._at_work(batch):
                began = time.monotonic()
                vectors = self.embedder.embed(batch.prepared)
                self._in_flight.append(InFlight(batch, vectors, began))
                arrived = self._arrived(leave=vectors.ahead if isinstance(vectors, PendingVectors) else 0)
        except DeviceFullError as error:
            self._make_smaller(batch, error)
            return
        if self.batcher.room.was_enough():
            self.log.info("memory_back", budget=self.batcher.room.tokens)
        self._give_back(arrived)

    def _make_smaller(self, batch: Batch, error: DeviceFullError) -> None:
        """Have a pass for which the device has no room done in another way, and the next ones be smaller."""
        room, cost = self.batcher.room, self._cost(batch)
        room.was_too_small(cost)
        self.meter.memory_full += 1
        self.log.warning("memory_full", samples=len(batch), tokens=cost, budget=room.tokens, why=error)
        if self._in_flight:  # what is still on the device may be what left no room
            self._settle()
            self.batcher.repeat([batch])
        elif len(batch) > 1:
            middle = len(batch) // 2
            self.batcher.repeat([batch.part(0, middle), batch.part(middle)])
        else:
            (lease,) = batch.leases
            size = f"{batch.tokens[0]} tokens do" if self.embedder.token_budget else "the sample does"
            lease.add_failure(batch.samples[0], error.code, f"{size} not fit the device, even alone: {error}")
            self._finish_if_complete(lease)

    def _settle(self) -> None:
        """Wait for the vectors that are on their way, and give them back."""
        if self._in_flight:
            with self._at_work():
                arrived = self._arrived(leave=0)
            self._give_back(arrived)

    @contextmanager
    def _at_work(self, batch: Batch | None = None) -> Iterator[None]:
        """The embed stage with a batch, and all passes in flight, in hand."""
        flying = [flight.batch for flight in self._in_flight]
        with self.meter.stage("embed", _parts([batch, *flying] if batch else flying)):
            yield

    def _arrived(self, *, leave: int) -> list[InFlight]:
        """The oldest passes with their vectors here, all but `leave` of them."""
        arrived = []
        while len(self._in_flight) > leave:
            batch, vectors, begun = self._in_flight.pop(0)
            try:
                assert not isinstance(vectors, DeviceFullError)
                here = dict(vectors)
            except DeviceFullError as error:
                arrived.append(InFlight(batch, error, begun))
                continue
            arrived.append(InFlight(batch, self._finite(batch, here), begun))
            # Until the one before was done, it only waited. It may have been over before it was asked for.
            over_at = vectors.over_at if isinstance(vectors, PendingVectors) else None
            began, self._free_at = max(begun, self._free_at), over_at or time.monotonic()
            units = batch.by_unit
            tokens: Counter[str] = Counter()
            for lease, places in units.items():
                tokens[lease.run] += sum(batch.tokens[place] for place in places)
            self.meter.batch_done(
                len(batch),
                tokens,
                processed=self._cost(batch),
                took_s=self._free_at - began,
                full=self.batcher.is_whole(batch),
                claimed_at=min(lease.claimed_at for lease in units),
            )
            self.meter.trace.batch(began, rows=len(batch), tokens=tokens.total(), units=[lease.u for lease in units])
        return arrived

    def _finite(self, batch: Batch, vectors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The vectors of a pass, with those that are not finite computed once more in fp32."""
        finite = np.logical_and.reduce([np.isfinite(block).all(axis=1) for block in vectors.values()])
        if finite.all():
            return vectors
        places = np.flatnonzero(~finite).tolist()
        try:
            again = self.embedder.embed_in_fp32(batch.chosen(places).prepared)
        except DeviceFullError as error:
            self.log.warning("not_recomputed", samples=len(places), why=error)
            return vectors
        mended = {output: np.array(block) for output, block in vectors.items()}
        for output, block in again.items():
            mended[output][places] = block
        self.meter.recomputed += len(places)
        unfixed = sum(not all(np.isfinite(block[place]).all() for block in mended.values()) for place in places)
        self.log.warning("recomputed_in_fp32", samples=len(places), still_not_finite=unfixed)
        return mended

    def _cost(self, batch: Batch) -> int:
        return self.embedder.cost(batch.tokens)

    def _give_back(self, arrived: Iterable[InFlight]) -> None:
        """The rows of finished passes to their units, in which publishing puts them in order."""
        for batch, vectors, _ in arrived:
            if isinstance(vectors, DeviceFullError):
                self._make_smaller(batch, vectors)
                continue
            for lease, places in batch.by_unit.items():
                entire = len(places) == len(batch)
                own = batch if entire else batch.chosen(places)
                lease.tokens += sum(own.tokens)
                store(lease, own.samples, {name: block if entire else block[places] for name, block in vectors.items()})
                self._finish_if_complete(lease)

    def _finish_if_complete(self, lease: LeasedUnit) -> None:
        if lease.lost:
            lease.drop()
        elif lease.complete:
            self.meter.throughput.unit_done(lease)
            self.hand_on(lease)


def can_wait(item: Chunk | EndOfUnit) -> bool:
    """Whether an item may be taken between two passes: it is prepared, and nothing in hand has to be dropped for it."""
    if isinstance(item, EndOfUnit):
        return item.error is None
    return item.prepared.done() and not item.lease.careful


def _parts(batches: Iterable[Batch]) -> list[UnitPart]:
    """The samples of batches by unit: from the first to the last ordinal of each."""
    parts: dict[LeasedUnit, UnitPart] = {}
    for batch in batches:
        for lease, places in batch.by_unit.items():
            ordinals = [batch.samples[place].ordinal for place in places]
            if lease in parts:
                ordinals += parts[lease][1:]
            parts[lease] = UnitPart(lease, min(ordinals), max(ordinals))
    return list(parts.values())


def store(lease: LeasedUnit, samples: Sequence[Sample], vectors: dict[str, np.ndarray]) -> None:
    """Add the vectors of some samples of a unit to its rows, in the type and length that the run stores; those of which
    one cannot be stored to its failures.

    Args:
        vectors: output -> float32 (len(samples), d).
    """
    rows, model = lease.record.rows, lease.record.model
    columns = [(output, *stored(block, rows)) for output, block in vectors.items()]
    for column, (image, text) in model.compared.items() if rows.similarity else ():
        columns.append((column, *similarities(vectors[image], vectors[text])))
    faults: dict[int, Fault] = {}  # of each sample the first
    for name, _, wrong in columns:
        faults = (_named(wrong, name) if model.members else wrong) | faults
    by_name = {name: values for name, values, _ in columns}
    if faults:
        for i, fault in sorted(faults.items()):
            lease.add_failure(samples[i], fault.code, fault.message)
        good = [i for i in range(len(samples)) if i not in faults]
        samples = [samples[i] for i in good]
        by_name = {name: block[good] for name, block in by_name.items()}
    if samples:
        lease.add_rows(samples, by_name)


def _named(faults: Mapping[int, Fault], name: str) -> dict[int, Fault]:
    """Faults that say whose they are, if there are several models."""
    return {i: replace(fault, message=f"{name}: {fault.message}") for i, fault in faults.items()}
