"""The read stage: claimed units in, chunks of samples out, decoding and tokenising already under way in threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from core.errors import SampleError, SourceError
from core.units import Sample
from sources.kinds import read
from worker.embedders.base import Embedder, Prepared
from worker.stats import Stats
from worker.work import UnitWork

CHUNK_SAMPLES = 32
"""Samples prepared by one thread at a time: large enough to hide the hand-over, small enough to spread one unit."""

DECODED_BYTES = 224 * 224 * 3 * 4
"""What a decoded image takes: float32 at the usual input size."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some samples of a unit, with the prepared form of each on its way."""

    work: UnitWork
    samples: Sequence[Sample]
    prepared: Future[list[Prepared | SampleError]]

    @property
    def size(self) -> int:
        """Bytes that the chunk takes: images with their decoded form, and texts."""
        return sum(
            (len(s.image) + DECODED_BYTES if s.image is not None else 0) + len(s.text or "") for s in self.samples
        )


@dataclass(frozen=True, slots=True)
class EndOfUnit:
    """The unit has been read to its end: `samples` of them, or not at all because of `error`."""

    work: UnitWork
    samples: int
    error: SourceError | None = None


class ReadStage:
    """Reads one unit after the other.

    Args:
        pool: threads that prepare.
        roots: folders that inputs may come from; empty allows all.
        hand_on: takes each chunk in order; it blocks while the device is behind.
    """

    def __init__(
        self,
        embedder: Embedder,
        pool: ThreadPoolExecutor,
        stats: Stats,
        *,
        roots: Sequence[str],
        hand_on: Callable[[Chunk | EndOfUnit], None],
    ) -> None:
        self.embedder = embedder
        self.pool = pool
        self.stats = stats
        self.roots = roots
        self.hand_on = hand_on

    def run(self, work: UnitWork) -> None:
        """Read one unit and hand on all of it."""
        work.stage = "read"
        count = 0
        samples = iter(read(work.unit, self.roots))
        try:
            while chunk := self._next_chunk(samples):
                count += len(chunk)
                self.hand_on(Chunk(work, chunk, self.pool.submit(self._prepare, chunk)))
                if work.lost:
                    break
            self._check_count(work, count)
        except SourceError as error:
            self.hand_on(EndOfUnit(work, count, error))
        else:
            self.hand_on(EndOfUnit(work, count))

    def _check_count(self, work: UnitWork, count: int) -> None:
        planned = work.unit.samples
        if planned is not None and count != planned and not work.lost:
            raise SourceError(
                f"{work.unit.source} gave {count} samples, the manifest says {planned}", code="source_changed"
            )

    def _next_chunk(self, samples: Iterator[Sample]) -> list[Sample]:
        with self.stats.busy("read"):
            return list(itertools.islice(samples, min(CHUNK_SAMPLES, self.embedder.batch_size)))

    def _prepare(self, samples: Sequence[Sample]) -> list[Prepared | SampleError]:
        with self.stats.busy("prepare"):
            usable = [sample for sample in samples if sample.error is None]
            answers = iter(self.embedder.prepare(usable) if usable else [])
            return [
                next(answers) if sample.error is None else SampleError(sample.error[0], sample.error[1])
                for sample in samples
            ]
