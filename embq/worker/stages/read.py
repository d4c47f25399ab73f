"""The read stage: turns claimed units into chunks of samples, which threads decode and tokenise."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from embq.core.errors import ConfigError, EmbqError, InputError, SampleError, SourceError
from embq.core.service.log import Events
from embq.core.units import Sample, key_without_chunks
from embq.sources.access.read_ahead import ReadAhead
from embq.sources.maps import Map, map_of, mapped
from embq.sources.unit_reader import fetchable, read, start_reader
from embq.worker.claim.lease import LeasedUnit, UnitPart
from embq.worker.embedders.base import BuffersImages, Embedder, HasChunks, Prepared
from embq.worker.embedders.text.splitting import CHARS_PER_TOKEN
from embq.worker.meter.meter import Meter

CHUNK_SAMPLES = 32
"""Samples prepared by one thread at a time: large enough to hide the hand-over, small enough to spread one unit."""

CAREFUL_POLL_S = 0.0005
"""Poll interval of the reader of a suspect unit, until its last sample is done."""

ADVANCE_S = 0.1
"""Interval at which reading shows that it gets on."""

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Pauses before a unit is read again when storage does not answer: a minute in all, then the attempt has failed."""

CUT_TEXT_CHARS = 128 * 1024
"""Characters of texts to be cut after which a chunk of samples ends."""

CHUNK_IMAGE_BYTES = 8_000_000
"""Bytes of encoded images after which a chunk of samples ends: photographs are read ahead, and spread over the threads,
in such pieces."""

CHUNKS_OF_A_THREAD = 2
"""Chunks of images for each thread: the one that it decodes, and the next."""

CUT_TEXT_FACTOR = 6
"""Bytes that a character of a text takes when it is cut: in the text, in its chunk, and in the chunk's tokens."""


Source = Callable[[LeasedUnit], Iterable[Sample]]
Refuse = Callable[[LeasedUnit, EmbqError], None]
Answers = tuple[Sequence[Sample], Sequence[Prepared | SampleError]]


def give_up(_lease: LeasedUnit, error: EmbqError) -> None:
    """Raise the error: the `Refuse` of a process without other runs."""
    raise error


class Chunk:
    """Prepared samples of a unit, or for each the reason why it cannot be embedded.

    The samples as they were read are not held: encoded images take megabytes.

    Args:
        text_factor: bytes that a character of a text takes.
        image_bytes: of what all models together make of an image.

    Attributes:
        prepared: returns the samples in their order, or in place of a text that is cut the chunks of it, none of them
            with its image; and as many answers of `Embedder.prepare`.
        size: bytes that the chunk takes while it waits for the device: what is made of images, and texts.
        expected: about how many samples the device gets of it: of texts that are cut, their chunks.
    """

    __slots__ = ("expected", "lease", "prepared", "size")

    def __init__(
        self,
        lease: LeasedUnit,
        samples: Sequence[Sample],
        prepared: Future[Answers],
        text_factor: int = 1,
        image_bytes: int = 0,
    ) -> None:
        self.lease = lease
        self.prepared = prepared
        chars = sum(len(sample.text or "") for sample in samples)
        images = sum(sample.image is not None for sample in samples)
        self.size = images * image_bytes + chars * text_factor
        chunking = lease.record.model.chunking
        cut = 0 if chunking is None else chars // (CHARS_PER_TOKEN * chunking.tokens)
        self.expected = max(len(samples), cut)


@dataclass(frozen=True, slots=True)
class EndOfUnit:
    """The unit has been read to its end: `samples` of them, or not at all because of `error`."""

    lease: LeasedUnit
    samples: int
    error: SourceError | None = None


class ReadStage:
    """Reads one unit after the other.

    Args:
        pool: threads that prepare.
        source: returns the samples of a unit; raises SourceError as `embq.sources.unit_reader.read` does.
        roots: folders that inputs may come from; empty allows all.
        hand_on: takes each chunk in order; it blocks while the device is behind.
        refuse: gives back a unit that cannot be read on this machine, for an error that concerns its run alone.
        upcoming: the units that wait for this stage, the next one first.
    """

    def __init__(
        self,
        embedder: Embedder,
        pool: ThreadPoolExecutor,
        meter: Meter,
        *,
        source: Source | None = None,
        roots: Sequence[str],
        hand_on: Callable[[Chunk | EndOfUnit], None],
        refuse: Refuse = give_up,
        upcoming: Callable[[], list[LeasedUnit]] = list,
    ) -> None:
        self.embedder = embedder
        self.cutter = embedder if isinstance(embedder, HasChunks) else None
        self.text_factor = 1 if self.cutter is None else CUT_TEXT_FACTOR
        self.image_bytes = embedder.image_bytes if isinstance(embedder, BuffersImages) else 0
        self.pool = pool
        self.meter = meter
        self.source = source or self._of_input
        self.roots = roots
        self.hand_on = hand_on
        self.refuse = refuse
        self.upcoming = upcoming
        self.ahead = ReadAhead()
        self.encoded = EncodedAhead(meter.times.threads * CHUNKS_OF_A_THREAD * CHUNK_IMAGE_BYTES)
        self.log = Events("worker")

    def run(self, lease: LeasedUnit) -> None:
        """Read one unit and hand on all of it.

        The attempt is charged here, before the first byte is looked at: a sample that ends its worker may do so in
        the decoder as well as on the device. A reader process is started before, which is no work on the unit.
        """
        self.ahead.let_go()
        try:
            start_reader(lease.unit)
        except ConfigError as problem:
            self.refuse(lease, problem)
            self.hand_on(EndOfUnit(lease, 0))
            return
        if not lease.begin():
            self.hand_on(EndOfUnit(lease, 0))
            return
        pauses = iter(PAUSES_S)
        while True:
            with self.ahead.in_use():
                count, error = self._read(lease)
            pause = next(pauses, None)
            if error is None or not error.transient or count or pause is None or lease.lost:
                break
            # Storage is away: wait here, because no unit is to blame, before giving the unit up.
            self.log.warning("storage_away", source=lease.unit.source, why=error.message, retry_s=pause)
            self._pause(pause)
        self.hand_on(EndOfUnit(lease, count, error))

    def _read(self, lease: LeasedUnit) -> tuple[int, SourceError | None]:
        """Hand on the unit's chunks; returns their samples, and why there are no more if that is not the end."""
        count = 0
        unread: list[tuple[str, str]] = []  # key and reason of the first
        lease.unread = 0
        size = 1 if lease.careful else min(CHUNK_SAMPLES, self.embedder.batch_size)
        try:
            function = map_of(lease.unit)
            samples = iter(self.source(lease))
            while chunk := self._next_chunk(lease, samples, size):
                count += len(chunk)
                lost = [(sample.key, sample.unread[1]) for sample in chunk if sample.unread is not None]
                lease.unread += len(lost)
                unread = unread or lost[:1]
                self._fetch_next()
                self.hand_on(self._submitted(lease, chunk, function))
                with self.meter.times.at("read", "blocked"):
                    while lease.careful and lease.handled < count and not lease.lost:
                        time.sleep(CAREFUL_POLL_S)
                if lease.lost:
                    return count, None
        except SourceError as error:
            return count, error
        except (ConfigError, InputError) as error:
            self.refuse(lease, error)
            return count, None
        for key, why in unread:
            self.log.warning(
                "metadata_unread", run=lease.run, source=lease.unit.source, samples=lease.unread, first=key, why=why
            )
        planned = lease.unit.expected
        if planned is not None and count != planned:
            return count, SourceError(
                f"{lease.unit.source} gave {count} samples, the manifest says {planned}", code="source_changed"
            )
        return count, None

    def _of_input(self, lease: LeasedUnit) -> Iterable[Sample]:
        texts = "text" in lease.record.model.modalities
        return read(lease.unit, self.roots, on_progress=self.meter.board.advance, texts=texts)

    def _submitted(self, lease: LeasedUnit, samples: Sequence[Sample], function: Map | None) -> Chunk:
        """Have samples prepared, once there is room for their encoded images."""
        size = sum(len(sample.image or b"") for sample in samples)
        with self.meter.times.at("read", "blocked"):
            self.encoded.acquire(size)
        self.meter.times.submitted()
        # Before a thread begins with the samples, and takes their images out.
        chunk = Chunk(lease, samples, Future(), self.text_factor, self.image_bytes)
        chunk.prepared = self.pool.submit(self._prepare, lease, samples, function)
        chunk.prepared.add_done_callback(lambda _: self.encoded.give_back(size))
        return chunk

    def _fetch_next(self) -> None:
        """Let files of the next units come while this one, whose own has come, is handed on.

        Only bytes, and uncharged: an idle worker may still take such a unit.
        """
        for lease in self.upcoming():
            if fetchable(lease.unit, self.roots) and not self.ahead.begin(lease.unit, partial(_is_held, lease)):
                return

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with self.meter.times.at("read", "busy"):
            while (remaining := end - time.monotonic()) > 0:
                time.sleep(min(1.0, remaining))

    def _next_chunk(self, lease: LeasedUnit, samples: Iterator[Sample], size: int) -> list[Sample]:
        with self.meter.stage("read", [UnitPart(lease)]):
            chunk = []
            chars = image_bytes = 0
            most_chars = float("inf") if self.cutter is None else CUT_TEXT_CHARS
            due = time.monotonic() + ADVANCE_S
            for sample in itertools.islice(samples, size):
                chunk.append(sample)
                if time.monotonic() > due:  # to show it for each sample would cost as much as reading
                    self.meter.board.advance()
                    due = time.monotonic() + ADVANCE_S
                if sample.image is not None:
                    image_bytes += len(sample.image)
                if sample.text is not None:
                    chars += len(sample.text)
                if image_bytes >= CHUNK_IMAGE_BYTES or chars >= most_chars:
                    break
            return chunk

    def _prepare(self, lease: LeasedUnit, samples: Sequence[Sample], function: Map | None) -> Answers:
        with self.meter.stage("prepare", [UnitPart(lease, samples[0].ordinal, samples[-1].ordinal)]):
            errors = [_error(lease, sample) for sample in samples]
            if function is not None or self.cutter is not None:
                pairs = [
                    (sample, error) if function is None or error is not None else mapped(function, sample)
                    for sample, error in zip(samples, errors, strict=True)
                ]
                if self.cutter is not None:
                    pairs = [part for sample, error in pairs for part in self._cut(self.cutter, sample, error)]
                samples, errors = [sample for sample, _ in pairs], [error for _, error in pairs]
            answers: list[Prepared | SampleError] = []
            # A text may have very many chunks.
            for start in range(0, len(samples), CHUNK_SAMPLES):
                group, wrong = samples[start : start + CHUNK_SAMPLES], errors[start : start + CHUNK_SAMPLES]
                if any(wrong):
                    usable = [sample for sample, error in zip(group, wrong, strict=True) if error is None]
                    ready = iter(self.embedder.prepare(usable) if usable else [])
                    answers += [next(ready) if error is None else error for error in wrong]
                else:
                    answers += self.embedder.prepare(group)
                self.meter.board.advance()
            for sample in samples:
                sample.image = None  # which is not needed again
            return samples, answers

    def _cut(
        self, cutter: HasChunks, sample: Sample, error: SampleError | None
    ) -> list[tuple[Sample, SampleError | None]]:
        """The chunks of a text, or the text itself with why it has none."""
        if error is None:
            try:
                return [(chunk, None) for chunk in cutter.chunks(sample, self.meter.board.advance)]
            except SampleError as problem:
                error = problem
        return [(replace(sample, key=key_without_chunks(sample.key), text=None), error)]


def _is_held(lease: LeasedUnit) -> bool:
    return not lease.lost


def _error(lease: LeasedUnit, sample: Sample) -> SampleError | None:
    """Why a sample is not even looked at, if it is not."""
    if sample.error is not None:  # nothing handles it, and a retry goes by its code
        return SampleError(*sample.error)
    if sample.ordinal in lease.poison:
        return SampleError(
            "crash", "each worker that handled this sample died, or stood still; see the supervisor's log"
        )
    return None


class EncodedAhead:
    """Room for encoded images between the reader and the threads that decode them. Safe to use from any thread.

    What is decoded is far smaller than what it was read as, or the other way round, so each is bounded for itself.

    Args:
        most_bytes: more do not wait, but for a single chunk that is larger.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held = 0
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Bytes that wait, or are being decoded."""
        with self._changed:
            return self._held

    def acquire(self, size: int) -> None:
        """Wait until there is room for `size` bytes, and take it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + size <= self._most_bytes)
            self._held += size

    def give_back(self, size: int) -> None:
        """Free the bytes of a chunk that is decoded or cancelled."""
        with self._changed:
            self._held -= size
            self._changed.notify_all()
