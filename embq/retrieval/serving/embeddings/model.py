"""A served model: requests in, vectors out, in forward passes that span requests."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np

from embq.core.errors import DeviceError, DeviceFullError, EmbqError, ModelError, SampleError
from embq.core.models import ModelSpec
from embq.core.process.limits import cores
from embq.core.service.log import Events
from embq.core.units import Sample
from embq.retrieval.serving.embeddings.loading import Loaded
from embq.retrieval.serving.embeddings.passes import Batch, Passes
from embq.retrieval.serving.http_errors import HttpError
from embq.retrieval.serving.metrics import Metrics
from embq.worker.embedders.base import Embedder, PendingVectors, Prepared, Truncated, VariedEmbedder
from embq.worker.meter.meter import Throughput

MOST_WAIT_S = 30.0
"""Longest queue, in seconds of computation; further requests are refused. Half of the shortest usual client timeout."""

LEAST_PASSES = 8
"""Passes that may wait whatever the speed, which is unknown at first, and low if requests are few."""

PREPARE_THREADS = 4
"""Most threads that tokenise."""

PREPARE_TEXTS = 64
"""Texts of a request that are tokenised before it is the next one's turn."""

CUT_CHARS_PER_TOKEN = 400
"""Of a longer text, this many characters at either end for each token that the model reads are tokenised: some
tokenisers take a minute for a word of 4 MB."""

POLL_S = 0.001
"""Between two looks at passes that the device computes."""

_log = Events("serve")


class Job:
    """The texts of one request.

    Attributes:
        future: its result is the vectors, float32 of shape (texts, dim); cancelled if nobody waits for them any more.
        tokens: estimated from the characters until the texts are tokenised.
        prepared: the texts that are tokenised, in order.
        truncated: number of texts that are longer than the model reads.
        arrived_at: monotonic seconds.

    Args:
        client: who asks.
        longest: most tokens that the model reads of a text.
        embedder: prepares the texts.
    """

    def __init__(self, texts: Sequence[str], client: str, longest: float, embedder: Embedder) -> None:
        self.texts, self.client, self.embedder = texts, client, embedder
        self.future: Future[np.ndarray] = Future()
        self.tokens = int(sum(min(1 + len(text) / 4, longest) for text in texts))
        self.prepared: list[Prepared] = []
        self.truncated = 0
        self.arrived_at = time.monotonic()
        self._vectors: np.ndarray | None = None
        self._remaining = len(texts)

    def add(self, places: Sequence[int], rows: np.ndarray) -> None:
        """Vectors of the texts at some places; after the last ones the future has all."""
        if self._vectors is None:
            self._vectors = np.empty((len(self.texts), rows.shape[1]), np.float32)
        self._vectors[places] = rows
        self._remaining -= len(places)
        if not self._remaining:
            with suppress(InvalidStateError):
                self.future.set_result(self._vectors)

    def fail(self, error: EmbqError) -> None:
        """Give an error in place of vectors."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class Flight(NamedTuple):
    """A pass that the device has begun."""

    batch: Batch[Job]
    vectors: Mapping[str, np.ndarray]

    @property
    def is_over(self) -> bool:
        """Whether reading the vectors waits for nothing."""
        return not isinstance(self.vectors, PendingVectors) or self.vectors.is_over()


class ServedModel:
    """A loaded model for many clients: a pool of threads tokenises, one thread embeds.

    A pass begins when the device is free, with what waits then; while it is busy, when a full pass waits.

    Args:
        on_broken: called in the embed thread if the device is broken; nothing is embedded any more.

    Attributes:
        name: by which requests name it.
        spec: of the model.
        dim: numbers of a vector.
        limits: of a text and of a pass, by their names in text-embeddings-inference's `/info`; None for none.
        precision: in which it computes, one of `embq.core.models.PRECISIONS`.
    """

    def __init__(self, loaded: Loaded, metrics: Metrics, on_broken: Callable[[DeviceError], None]) -> None:
        self.name, self.spec = loaded.name, ModelSpec.parse(loaded.config.spec)
        (self._output,) = loaded.config.output_names
        self._embedder, self._metrics, self._on_broken = loaded.embedder, metrics, on_broken
        self.dim = self._embedder.dims[self._output]
        self._throughput = Throughput()
        self._passes: Passes[Job] = Passes(self._embedder)
        self._flying: list[Flight] = []
        self._ahead = 0
        self._pool = ThreadPoolExecutor(min(PREPARE_THREADS, cores()), "tokenise")
        self._thread = threading.Thread(target=self._run, name="embed", daemon=True)
        self._changed = threading.Condition()
        self._jobs: set[Job] = set()
        self._waiting: Counter[str] = Counter()
        self._prepared_by: dict[tuple[str, str], Embedder] = {}
        self._longest = self._measured_longest()
        self.limits = {
            "max_input_length": None if math.isinf(self._longest) else int(self._longest),
            "max_batch_tokens": self._embedder.token_budget or None,
            "max_batch_requests": self._embedder.batch_size,
        }
        self.precision = loaded.config.precision
        self._arrived: list[Job] = []
        self._closed: EmbqError | None = None

    def start(self) -> None:
        """Start the embed thread."""
        self._thread.start()
        self._metrics.gauges["embq_model_ready"].labels(self.name).set(1)

    def stop(self) -> None:
        """End the threads, after the pass in hand; requests that still wait get an error."""
        self._close(HttpError("the server stops", code="stopping", next_step="ask again", status=503, retry_after_s=1))
        self._thread.join()
        self._pool.shutdown()

    def submit(self, texts: Sequence[str], client: str = "", *, prompt_name: str = "", cut: str = "") -> Job:
        """Have texts embedded, at least one, with a prompt and a cut as of `VariedEmbedder`.

        The job's future raises HttpError if one of them cannot be.

        Raises HttpError `overloaded` if too many tokens wait, of all clients or of this one, `bad_request` if the
        model has no such prompt, and what has broken the device.
        """
        job = Job(texts, client, self._longest, self._preparing(prompt_name, cut))
        speed = self._throughput.tokens_per_s or 0.0
        a_pass = max(self._embedder.token_budget, self._embedder.batch_size)
        limit = max(LEAST_PASSES * a_pass, speed * MOST_WAIT_S)
        with self._changed:
            if self._closed is not None:
                raise self._closed
            if wait := self._tokens_in_the_way(job, limit, a_pass):
                raise HttpError(
                    f"{wait:,} tokens wait for {self.name}",
                    code="overloaded",
                    next_step="ask again in a while, or from fewer clients",
                    status=503,
                    retry_after_s=min(60, math.ceil(wait / speed)) if speed else 1,
                )
            self._jobs.add(job)
            self._count(job, job.tokens)
        job.future.add_done_callback(lambda _: self._release(job))
        self._pool.submit(self._prepare, job)
        return job

    def _preparing(self, prompt_name: str, cut: str) -> Embedder:
        """The embedder that prepares texts so. Called in one thread."""
        if not prompt_name and not cut:
            return self._embedder
        if (prompt_name, cut) not in self._prepared_by:
            param = "prompt_name" if prompt_name else "truncation_direction"
            try:
                if not isinstance(self._embedder, VariedEmbedder):
                    raise ModelError(f"{self.name} takes no {param}", next_step="leave it out")
                other = self._embedder.preparing(prompt_name=prompt_name, cut=cut)
            except ModelError as error:
                raise HttpError(error.message, next_step=error.next_step, param=param) from error
            self._prepared_by[prompt_name, cut] = other
        return self._prepared_by[prompt_name, cut]

    def _tokens_in_the_way(self, job: Job, limit: float, a_pass: int) -> int:
        """The tokens that wait, if they are too many for one more job; else 0.

        A client counts for half of the limit at most, however much it has sent, so none keeps out the others. What
        fits into a pass, of a client that waits for nothing else, is always taken.
        """
        mine = self._waiting[job.client]
        counted = sum(min(tokens, limit / 2) for tokens in self._waiting.values())
        is_small = not mine and job.tokens <= a_pass
        if not is_small and (counted >= limit or (mine and mine + job.tokens > limit / 2)):
            return self._waiting.total()
        return 0

    def _measured_longest(self) -> float:
        """Most tokens that the model reads of a text; infinite if it reads any."""
        (prepared,) = self._embedder.prepare([Sample(ordinal=0, key="", text="word " * 100_000)])
        return self._embedder.length(prepared) if isinstance(prepared, Truncated) else math.inf

    def _release(self, job: Job) -> None:
        with self._changed:
            self._jobs.discard(job)
            self._count(job, -job.tokens)
        if not job.future.cancelled() and job.future.exception() is None:
            for name, count in (("texts", len(job.texts)), ("tokens", job.tokens), ("truncated", job.truncated)):
                self._metrics.counters[f"embq_embeddings_{name}_total"].labels(self.name).inc(count)

    def _count(self, job: Job, tokens: int) -> None:
        self._waiting[job.client] += tokens
        if self._waiting[job.client] <= 0:
            del self._waiting[job.client]
        self._metrics.gauges["embq_embeddings_waiting_tokens"].labels(self.name).set(self._waiting.total())

    def _prepare(self, job: Job) -> None:
        """Tokenise the next texts of a job; after the last ones it arrives."""
        if job.future.done():
            return
        first = len(job.prepared)
        texts = job.texts[first : first + PREPARE_TEXTS]
        samples = [Sample(ordinal=place, key="", text=self._cut(text)) for place, text in enumerate(texts)]
        try:
            for place, prepared in enumerate(job.embedder.prepare(samples), first):
                if isinstance(prepared, SampleError):
                    raise HttpError(f"input[{place}]: {prepared.message}", code=prepared.code, param="input")
                job.prepared.append(prepared)
            is_last = len(job.prepared) == len(job.texts)
            tokens = sum(map(self._embedder.length, job.prepared)) if is_last else 0
        except Exception as error:  # noqa: BLE001 - the boundary to other requests
            job.fail(self._failure_of(error))
            return
        if not is_last:
            with suppress(RuntimeError):  # the server stops
                self._pool.submit(self._prepare, job)
            return
        job.truncated = sum(isinstance(item, Truncated) for item in job.prepared)
        with self._changed:
            if not job.future.done():
                self._count(job, tokens - job.tokens)
                job.tokens = tokens
                self._arrived.append(job)
                self._changed.notify()

    def _cut(self, text: str) -> str:
        chars = CUT_CHARS_PER_TOKEN * self._longest
        return text if len(text) <= 2 * chars else text[: int(chars)] + text[-int(chars) :]

    # --- the embed thread ---

    def _run(self) -> None:
        try:
            while self._closed is None:
                settled = self._settle_finished()
                self._take_arrived()
                if len(self._flying) <= self._ahead and (batch := self._next_batch()):
                    self._begin([entry for entry in batch if not entry.owner.future.done()])
                elif not settled:
                    with self._changed:
                        if not self._arrived and self._closed is None:
                            self._changed.wait(POLL_S if self._flying else None)
        except DeviceError as error:
            _log.error("device_broken", model=self.name, why=error.message)
            self._close(error)
            self._on_broken(error)

    def _take_arrived(self) -> None:
        with self._changed:
            arrived, self._arrived = self._arrived, []
        for job in arrived:
            self._passes.add(job, job.prepared)

    def _next_batch(self) -> Batch[Job]:
        """The next pass; none while the device is busy and less than a full one waits."""
        is_free = sum(not flight.is_over for flight in self._flying) < max(1, self._ahead)
        return self._passes.next() if self._passes and (is_free or self._passes.has_full) else ()

    def _begin(self, batch: Batch[Job]) -> None:
        if not batch:
            return
        with self._failures(batch):
            vectors = self._embedder.embed([entry.prepared for entry in batch])
            self._ahead = vectors.ahead if isinstance(vectors, PendingVectors) else 0
            self._flying.append(Flight(batch, vectors))

    def _settle_finished(self) -> bool:
        """Give the vectors of passes that are over to their jobs; whether there were any.

        Passes of a CPU are computed side by side, and a short one is not to wait for a long one.
        """
        flights, self._flying = self._flying, []
        over: list[Flight] = []
        for flight in flights:
            (over if flight.is_over else self._flying).append(flight)
        for flight in over:
            self._settle(flight)
        return bool(over)

    def _settle(self, flight: Flight) -> None:
        batch, vectors = flight
        with self._failures(batch):
            rows = self._finite(batch, vectors[self._output])
            self._passes.room.was_enough()
            tokens = sum(entry.tokens for entry in batch)
            since = min(entry.owner.arrived_at for entry in batch)
            self._throughput.batch_done(len(batch), tokens, since=since)
            self._metrics.histograms["embq_embeddings_pass_rows"].labels(self.name).observe(len(batch))
            places: dict[Job, list[int]] = {}
            for place, entry in enumerate(batch):
                places.setdefault(entry.owner, []).append(place)
            for job, of_job in places.items():
                job.add([batch[place].place for place in of_job], rows[of_job])

    def _finite(self, batch: Batch[Job], rows: np.ndarray) -> np.ndarray:
        """The vectors, with those that are not finite computed once more in fp32."""
        places = np.flatnonzero(~np.isfinite(rows).all(axis=1)).tolist()
        if not places:
            return rows
        again = self._embedder.embed_in_fp32([batch[place].prepared for place in places])
        mended = np.array(rows)
        mended[places] = again[self._output]
        _log.warning("recomputed_in_fp32", model=self.name, samples=len(places))
        return mended

    def _make_smaller(self, batch: Batch[Job], error: DeviceFullError) -> None:
        """Repeat a pass for which the device has no room, after those in flight or in halves."""
        cost = self._embedder.cost([entry.tokens for entry in batch])
        self._passes.room.was_too_small(cost)
        _log.warning("memory_full", model=self.name, samples=len(batch), tokens=cost, why=error)
        if self._flying:
            while self._flying:
                self._settle(self._flying.pop(0))
            self._passes.repeat([batch])
        elif len(batch) > 1:
            middle = len(batch) // 2
            self._passes.repeat([batch[:middle], batch[middle:]])
        else:
            batch[0].owner.fail(error)

    @contextmanager
    def _failures(self, batch: Batch[Job]) -> Iterator[None]:
        """What goes wrong fails the jobs of this pass only, but for a broken device."""
        try:
            yield
        except DeviceFullError as error:
            self._make_smaller(batch, error)
        except DeviceError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to other requests
            failure = self._failure_of(error)
            for entry in batch:
                entry.owner.fail(failure)

    def _failure_of(self, error: Exception) -> EmbqError:
        if isinstance(error, EmbqError):
            return error
        _log.bug("bug", model=self.name)
        return EmbqError("embq has a bug; its log holds the details", next_step="report it with those lines of the log")

    def _close(self, error: EmbqError) -> None:
        with self._changed:
            self._closed = self._closed or error
            self._changed.notify_all()
            jobs = list(self._jobs)
        for job in jobs:
            job.fail(error)
