"""The embed stage: prepared samples in, vectors out, in batches that span units. Only its thread uses the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from core.errors import SampleError
from core.units import Sample
from core.vectors import Fault, similarities, stored
from worker.embedders.base import Embedder, Prepared, Truncated
from worker.progress import ProgressBoard, Span
from worker.read import Chunk, EndOfUnit
from worker.stats import Stats
from worker.trace import Trace
from worker.work import Leases, UnitWork

if TYPE_CHECKING:
    from collections.abc import Sequence


class EmbedStage:
    """Gathers samples until a batch is full or nothing more comes, embeds it, and gives the rows back to their units.

    Args:
        board: where the stage says what it has in hand.
        trace: where it notes what the device did.
        hand_on: takes each complete unit.
    """

    def __init__(
        self,
        embedder: Embedder,
        leases: Leases,
        stats: Stats,
        board: ProgressBoard,
        *,
        hand_on: Callable[[UnitWork], None],
        trace: Trace | None = None,
    ) -> None:
        self.embedder = embedder
        self.leases = leases
        self.stats = stats
        self.board = board
        self.hand_on = hand_on
        self.trace = trace or Trace()
        self._waiting: list[tuple[UnitWork, Sample, Prepared]] = []

    @property
    def has_waiting(self) -> bool:
        """Whether a partial batch waits for more samples."""
        return bool(self._waiting)

    def take(self, item: Chunk | EndOfUnit) -> None:
        """Take the next item in order; embeds whenever a batch is full."""
        if isinstance(item, EndOfUnit):
            self._end(item)
            return
        for sample, prepared in item.prepared.result():
            if isinstance(prepared, SampleError):
                item.work.add_failure(sample, prepared.code, prepared.message)
            else:
                item.work.truncated += isinstance(prepared, Truncated)
                self._waiting.append((item.work, sample, prepared))
        while len(self._waiting) >= self.embedder.batch_size:
            self._embed(self.embedder.batch_size)
        if item.work.careful:
            self.flush()

    def flush(self) -> None:
        """Embed what waits, however little it is."""
        if self._waiting:
            self._embed(len(self._waiting))

    def _end(self, item: EndOfUnit) -> None:
        if item.error is not None:
            self._waiting = [entry for entry in self._waiting if entry[0] is not item.work]
            if item.error.transient:
                # Another attempt, perhaps on another machine, may succeed; the last one makes it a failure.
                item.work.ledger.release(item.work.u, item.work.token, failed=(item.error.code, item.error.message))
                self._drop(item.work)
                return
            item.work.fail_whole(item.error.code, item.error.message)
        else:
            item.work.end_of_read(item.samples)
        self._finish_if_complete(item.work)

    def _embed(self, count: int) -> None:
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        kept = set()
        # Asked once for each: a lease that is found lost later is let go when the unit is finished.
        for work in {id(work): work for work, _, _ in batch}.values():
            work.stage = "embed"
            if work.lost:  # its end may have been read already, so nothing else would let go of it
                self._drop(work)
            else:
                kept.add(id(work))
        batch = [entry for entry in batch if id(entry[0]) in kept]
        if not batch:
            return
        in_hand: dict[str, Span] = {}
        for work, sample, _ in batch:
            first = in_hand[work.token].first if work.token in in_hand else sample.ordinal
            in_hand[work.token] = Span(work.token, work.u, first, sample.ordinal)
        lengths = [self.embedder.length(prepared) for _, _, prepared in batch]
        units = [span.u for span in in_hand.values()]
        with (
            self.stats.busy("embed"),
            self.board.step("embed", in_hand.values()),
            self.trace.batch(rows=len(batch), tokens=sum(lengths), units=units),
        ):
            vectors = self.embedder.embed([prepared for _, _, prepared in batch])
        self.stats.batch_done(len(batch), sum(lengths))
        for (work, _, _), length in zip(batch, lengths, strict=True):
            work.tokens += length
        start = 0
        for stop in range(1, len(batch) + 1):
            if stop == len(batch) or batch[stop][0] is not batch[start][0]:
                work = batch[start][0]
                rows = {output: block[start:stop] for output, block in vectors.items()}
                self._store(work, [sample for _, sample, _ in batch[start:stop]], rows)
                self._finish_if_complete(work)
                start = stop

    def _store(self, work: UnitWork, samples: Sequence[Sample], vectors: dict[str, np.ndarray]) -> None:
        rows, model = work.record.rows, work.record.model
        made = [(output, *stored(block, rows)) for output, block in vectors.items()]
        for column, (image, text) in model.compared.items() if rows.similarity else ():
            made.append((column, *similarities(vectors[image], vectors[text])))
        faults: dict[int, Fault] = {}  # of each sample the first
        for name, _, wrong in made:
            faults = (_named(wrong, name) if model.members else wrong) | faults
        kept = {name: values for name, values, _ in made}
        if faults:
            for i, fault in sorted(faults.items()):
                work.add_failure(samples[i], fault.code, fault.message)
            good = [i for i in range(len(samples)) if i not in faults]
            samples = [samples[i] for i in good]
            kept = {name: block[good] for name, block in kept.items()}
        if samples:
            work.add_rows(samples, kept)

    def _finish_if_complete(self, work: UnitWork) -> None:
        if work.lost:
            self._drop(work)
        elif work.complete:
            work.stage = "publish"
            self.hand_on(work)

    def _drop(self, work: UnitWork) -> None:
        work.lost = True
        work.samples, work.vectors = [], {}
        self.leases.remove(work)


def _named(faults: Mapping[int, Fault], name: str) -> dict[int, Fault]:
    """Faults that say whose they are, where there are several models."""
    return {i: replace(fault, message=f"{name}: {fault.message}") for i, fault in faults.items()}
