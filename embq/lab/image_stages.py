"""Measures the stages of a worker on a user's images, alone and together, in this process.

Readers, embedder and pipeline are those of a worker; there is no broker and no writer, so that the result is the speed
of a worker that does not wait for these.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from embq.core.errors import DeviceFullError, SampleError, SourceError
from embq.core.queue.hints import Hint
from embq.core.queue.runs import RunRecord
from embq.core.units import Sample, Unit
from embq.sources.unit_reader import read
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.embedders.base import PendingVectors, Prepared
from embq.worker.meter.bottleneck import Bottleneck
from embq.worker.meter.meter import Meter
from embq.worker.stages.pipeline import Pipeline
from embq.worker.stages.publish import Publisher

if TYPE_CHECKING:
    from embq.core.models import ModelConfig
    from embq.core.queue.ledger import Ledger
    from embq.worker.embedders.base import Embedder

Poll = Callable[[], None]
"""Called repeatedly during a measurement; raises if the user stops it."""
UNITS = 64
"""Places of the inputs that samples are read from."""
MOST_BYTES = 512 * 1024 * 1024
"""Limit of encoded samples in memory: 500 photographs of a megabyte, or 20,000 of 256 pixels."""
CHUNK = 8
"""Samples that a thread decodes between checks of the clock: large photographs take 20 ms and more."""
LEAST_PASSES = 3
UNITS_WAITING = 4
"""Claimed units that wait for the reader, as in a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Samples in some seconds.

    Attributes:
        cpu_s: CPU time, if it was measured.
        bytes: of the encoded samples, if they were counted.
    """

    samples: int
    seconds: float
    cpu_s: float = 0.0
    bytes: int = 0

    @property
    def per_s(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def per_core(self) -> float:
        """Samples per second of CPU time."""
        return self.samples / self.cpu_s if self.cpu_s > 0 else 0.0


@dataclass(slots=True)
class Tried:
    """Results of the distinct samples.

    Attributes:
        answers: place of a sample -> its failure code, or "" for success.
        sources: failure code -> units that could not be read to their end.
    """

    answers: dict[int, str] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)

    @property
    def failures(self) -> dict[str, int]:
        """Failure code -> samples."""
        return dict(sorted(Counter(code for code in self.answers.values() if code).items()))


def spread(units: Iterable[Unit], most: int = UNITS) -> list[Unit]:
    """Units at equal distances, at most `most`, and at least half as many of more; no others are in memory."""
    chosen: list[Unit] = []
    step = 1
    for place, unit in enumerate(units):
        if place % step == 0:
            chosen.append(unit)
            if len(chosen) > most:
                chosen, step = chosen[::2], 2 * step
    return chosen


def read_some(units: Sequence[Unit], count: int, seconds: float, tried: Tried, poll: Poll) -> tuple[list[Sample], Rate]:
    """Read up to `count` samples, equally from each unit, in at most about `seconds`; returns them and the rate.

    Raises the SourceError of the first unit if none can be read.
    """
    samples: list[Sample] = []
    size, first_error = 0, None
    each = -(-count // len(units))
    began = time.monotonic()
    for unit in units:
        try:
            for sample in itertools.islice(read(unit, ()), min(each, count - len(samples))):
                samples.append(sample)
                size += len(sample.image or b"")
                if size > MOST_BYTES or (len(samples) % CHUNK == 0 and time.monotonic() - began > seconds):
                    break
        except SourceError as error:
            tried.sources[error.code] += 1
            first_error = first_error or error
        poll()
        if len(samples) >= count or size > MOST_BYTES or time.monotonic() - began > seconds:
            break
    if not samples and first_error is not None:
        raise first_error
    return samples, Rate(samples=len(samples), seconds=time.monotonic() - began, bytes=size)


def decode(
    embedder: Embedder, samples: Sequence[Sample], threads: int, seconds: float, tried: Tried, poll: Poll
) -> Rate:
    """The rate at which `threads` threads prepare the samples, repeatedly, for about `seconds`."""
    chunks = [range(start, min(start + CHUNK, len(samples))) for start in range(0, len(samples), CHUNK)]
    turns, lock = itertools.cycle(chunks), threading.Lock()
    began = time.monotonic()
    stop = threading.Event()

    def work() -> tuple[int, float, float]:
        done, cpu_before = 0, time.thread_time()
        while not stop.is_set() and (time.monotonic() - began < seconds or not done):
            with lock:
                places = next(turns)
            for place, answer in zip(places, prepare(embedder, [samples[i] for i in places]), strict=True):
                tried.answers[place] = answer.code if isinstance(answer, SampleError) else ""
            done += len(places)
        return done, time.thread_time() - cpu_before, time.monotonic()

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(work) for _ in range(threads)]
        try:
            while not all(thread.done() for thread in running):
                time.sleep(0.02)
                poll()
        finally:
            stop.set()
        ended = [thread.result() for thread in running]
    return Rate(
        samples=sum(done for done, *_ in ended),
        seconds=max(at for *_, at in ended) - began,
        cpu_s=sum(cpu_s for _, cpu_s, _ in ended),
    )


def prepare(embedder: Embedder, samples: Sequence[Sample]) -> list[Prepared | SampleError]:
    """Prepare samples; SampleError for each that fails, also those that the reader refused."""
    errors = [None if sample.error is None else SampleError(*sample.error) for sample in samples]
    answers = iter(embedder.prepare([s for s, error in zip(samples, errors, strict=True) if error is None]))
    return [next(answers) if error is None else error for error in errors]


def some_prepared(embedder: Embedder, samples: Sequence[Sample], count: int, poll: Poll) -> list[Prepared]:
    """Up to `count` prepared samples."""
    ready: list[Prepared] = []
    for start in range(0, len(samples), CHUNK):
        answers = prepare(embedder, samples[start : start + CHUNK])
        ready += [answer for answer in answers if not isinstance(answer, SampleError)]
        poll()
        if len(ready) >= count:
            break
    return ready[:count]


def device(embedder: Embedder, ready: Sequence[Prepared], seconds: float, poll: Poll) -> tuple[Rate, int]:
    """The rate at which the device embeds prepared samples, and the size of a pass: the embedder's batch, or what fits.

    Passes overlap if the embedder allows it, as in a worker.
    """
    size = embedder.batch_size
    while True:
        turns = itertools.cycle(ready)
        try:
            _passes(embedder, turns, size, 0.0, poll, least=1)  # what happens once: kernels, memory
            return _passes(embedder, turns, size, seconds, poll, least=LEAST_PASSES), size
        except DeviceFullError:
            if size == 1:
                raise
            size //= 2


def _passes(
    embedder: Embedder, turns: Iterator[Prepared], size: int, seconds: float, poll: Poll, *, least: int
) -> Rate:
    flying: list[Any] = []
    done = 0
    began = time.monotonic()
    while time.monotonic() - began < seconds or done < least:
        vectors = embedder.embed(list(itertools.islice(turns, size)))
        flying.append(vectors)
        while len(flying) > (vectors.ahead if isinstance(vectors, PendingVectors) else 0):
            dict(flying.pop(0))
        done += 1
        poll()
    for vectors in flying:
        dict(vectors)
    return Rate(samples=done * size, seconds=time.monotonic() - began)


class _Granting:
    """A ledger for the read stage that grants every lease and stores nothing."""

    def start(self, _held: Iterable[tuple[int, str]]) -> set[str]:
        return set()

    def release(self, u: int, token: str, *, failed: tuple[str, str] | None = None) -> bool:
        del u, token, failed
        return True


class _Discard(Publisher):
    """A publish stage that discards complete units."""

    def run(self, work: LeasedUnit) -> None:
        work.end()


def together(
    embedder: Embedder, config: ModelConfig, units: Sequence[Unit], threads: int, seconds: float, poll: Poll
) -> tuple[Rate, dict[str, Any]]:
    """The rate of reading, preparing and embedding at the same time, for about `seconds` after the first pass; and the
    bottleneck report of such a worker. Units are repeated until the time is over.
    """
    leases, meter = Leases(), Meter(threads)
    pipeline = Pipeline(embedder, leases, meter, _Discard(), prefetch=2 * UNITS_WAITING)
    attribution = Bottleneck(meter, modalities=config.modalities, decode=config.decode)
    record = RunRecord(run="bench", output="", model=config, units=len(units))
    ledger = cast("Ledger", _Granting())
    numbered = enumerate(itertools.cycle(units))
    passes: list[tuple[float, int]] = []
    pipeline.start()
    began = time.monotonic()
    deadline = began + 4 * seconds
    try:
        while time.monotonic() < deadline:
            if pipeline.error is not None:
                raise pipeline.error
            if sum(unit.stage == "queued" for unit in leases.snapshot()) < UNITS_WAITING:
                u, unit = next(numbered)
                hint = Hint(run="bench", gen="bench", u=u, unit=unit)
                work = LeasedUnit(hint, record, ledger, f"bench:{u}", attempts=0, poison=frozenset())
                leases.add(work)
                pipeline.submit(work)
                continue
            if meter.last_batch_at is not None and (not passes or passes[-1][0] != meter.last_batch_at):
                if not passes:
                    attribution.report()
                    deadline = time.monotonic() + seconds
                passes.append((meter.last_batch_at, meter.rows))
            time.sleep(0.002)
            poll()
        report = attribution.report()
    finally:
        for work in leases.snapshot():
            work.lost = True  # so that the reader stops in the middle of its unit
        pipeline.close()
    if len(passes) < 2:
        return Rate(samples=meter.rows, seconds=time.monotonic() - began), report
    (first_at, first), (last_at, last) = passes[0], passes[-1]
    return Rate(samples=last - first, seconds=last_at - first_at), report
