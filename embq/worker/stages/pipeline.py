"""The pipeline inside a worker process: read, prepare, embed, publish, each in its own thread, each with a bound.

::

    submit ─▶ units (prefetch) ─▶ read ─▶ chunks (ahead of the device) ─▶ embed ─▶ results ─▶ publish
                                    └─▶ prepare: a pool of threads

An error in any stage stops the whole pipeline; `error` holds it and the process ends with it. No thread dies alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from embq.core.service.log import Events
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.embedders.base import Embedder
from embq.worker.meter.meter import Meter
from embq.worker.stages.embed import EmbedStage, can_wait
from embq.worker.stages.publish import Publisher
from embq.worker.stages.read import Chunk, EndOfUnit, ReadStage, Refuse, Source, give_up

BYTES_AHEAD = 256 * 1024 * 1024
"""Between reader and device: as many samples as the embed stage asks for, and no more bytes than this."""
UNITS_AHEAD, ROWS_AHEAD = 1_000, 50_000
"""Between device and broker: a batch may complete many small units or one large one; 50,000 rows are about 80 MB."""
LINGER_S = 0.005
"""Time that a partial batch waits for more samples before the idle device takes it."""
PREPARING_S = 0.05
"""The same while more samples are being prepared, so where preparing is the bottleneck: each pass costs the CPU some
milliseconds, which small passes would take from the threads that prepare."""
POLL_S = 0.2

Item = TypeVar("Item")


class BoundedQueue(Generic[Item]):
    """First in, first out. Each item takes a share of the room, 1.0 being all of it; a larger one passes alone."""

    def __init__(self) -> None:
        self._taken = 0.0
        self._waiting: deque[tuple[Item, float]] = deque()
        self._changed = threading.Condition()

    def put(self, item: Item, share: float, timeout_s: float) -> bool:
        """Append an item; False if there was no room within `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._waiting or self._taken + share <= 1.0, timeout_s):
                return False
            self._waiting.append((item, share))
            self._taken += share
            self._changed.notify_all()
            return True

    def waiting(self) -> list[Item]:
        """The items, first one first."""
        with self._changed:
            return [item for item, _ in self._waiting]

    def get_if(self, suits: Callable[[Item], bool]) -> Item | None:
        """The first item, if there is one and it suits; without waiting."""
        with self._changed:
            return self._first() if self._waiting and suits(self._waiting[0][0]) else None

    def get(self, timeout_s: float) -> Item | None:
        """The first item; None if none came within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._waiting:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    return None
            return self._first()

    def _first(self) -> Item:
        item, share = self._waiting.popleft()
        # Rounding must not add up over millions of items.
        self._taken = self._taken - share if self._waiting else 0.0
        self._changed.notify_all()
        return item


class Pipeline:
    """Runs the stages until `close`.

    Args:
        meter: its number of threads prepare samples.
        prefetch: claimed units that wait for the reader.
        source: returns the samples of a unit; None reads its input.
        roots: folders that inputs may come from; empty allows all.
        refuse: see `ReadStage`.
    """

    def __init__(
        self,
        embedder: Embedder,
        leases: Leases,
        meter: Meter,
        publish: Publisher,
        *,
        prefetch: int,
        source: Source | None = None,
        roots: Sequence[str] = (),
        refuse: Refuse = give_up,
    ) -> None:
        self.leases = leases
        self.error: BaseException | None = None
        self.log = Events("worker")
        self._times = meter.times
        self._pool = ThreadPoolExecutor(meter.times.threads, thread_name_prefix="prepare")
        self._draining = False
        self._closed = False
        self._prefetch = prefetch
        self._units: BoundedQueue[LeasedUnit] = BoundedQueue()
        self._chunks: BoundedQueue[Chunk | EndOfUnit] = BoundedQueue()
        self._results: BoundedQueue[LeasedUnit] = BoundedQueue()
        self.read = ReadStage(
            embedder,
            self._pool,
            meter,
            source=source,
            roots=roots,
            refuse=refuse,
            hand_on=self._put_chunk,
            upcoming=self._units.waiting,
        )
        self.embed = EmbedStage(embedder, meter, hand_on=self._put_result, next_item=self._next_chunk)
        self._publish = publish
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=name, daemon=True)
            for name, loop in (
                ("read", self._read_loop),
                ("embed", self._embed_loop),
                ("publish", self._publish_loop),
            )
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, lease: LeasedUnit) -> None:
        """Queue a claimed unit; waits while `prefetch` units are queued."""
        self._times.begin()
        self._put(self._units, lease, 1 / self._prefetch)

    def drain(self, timeout_s: float, *, at_once: Callable[[], bool]) -> bool:
        """Give queued units back, let begun ones finish; False if they did not within `timeout_s`.

        Args:
            at_once: asked all the while; True ends the waiting.
        """
        self._draining = True
        self.read.ahead.close()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.error is None and not at_once():
            if self.leases.wait_until_at_most(0, timeout_s=POLL_S):
                return True
        return not self.leases.snapshot()

    def close(self) -> None:
        """Stop the threads."""
        self._closed = True
        self.read.ahead.close()
        for thread in self._threads:
            thread.join(5)
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def running(self) -> bool:
        """Whether the stages still work."""
        return not self._closed and self.error is None

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:  # noqa: BLE001 - thread boundary: whatever it is, the process must end with it
            self.error = error

    def _put_chunk(self, item: Chunk | EndOfUnit) -> None:
        share = 0.0
        if isinstance(item, Chunk):
            share = max(item.expected / self.embed.batcher.samples_ahead, item.size / BYTES_AHEAD)
        with self._times.at("read", "blocked"):
            self._put(self._chunks, item, share)

    def _next_chunk(self) -> Chunk | EndOfUnit | None:
        return self._chunks.get_if(can_wait) if self.running else None

    def _put_result(self, lease: LeasedUnit) -> None:
        with self._times.at("embed", "blocked"):
            share = max(1 / UNITS_AHEAD, len(lease.samples) / ROWS_AHEAD, lease.text_bytes / BYTES_AHEAD)
            self._put(self._results, lease, share)

    def _put(self, target: BoundedQueue[Item], item: Item, share: float) -> None:
        while self.running and not target.put(item, share, POLL_S):
            continue

    def _read_loop(self) -> None:
        while self.running:
            with self._times.at("read", "starved"):
                lease = self._units.get(POLL_S)
            if lease is None:
                continue
            if self._draining:
                lease.release()
            else:
                self.read.run(lease)

    def _embed_loop(self) -> None:
        while self.running:
            with self._times.at("embed", self.embed.waiting_state):
                item = self._chunks.get(LINGER_S if self.embed.has_waiting else POLL_S)
            if item is None:
                self.embed.flush()
                continue
            if isinstance(item, Chunk) and self.embed.has_waiting and not item.prepared.done():
                self._linger(item)
            self.embed.add(item)

    def _linger(self, item: Chunk) -> None:
        """Wait for samples that are being prepared, but not for long: then the device gets what there is."""
        deadline = time.monotonic() + PREPARING_S
        while (remaining := deadline - time.monotonic()) > 0:
            state = self.embed.waiting_state
            with self._times.at("embed", state):
                # In small steps while the device is at work, because it may be through with it meanwhile.
                if futures.wait([item.prepared], LINGER_S if state == "busy" else remaining).done:
                    return
        self.embed.flush()

    def _publish_loop(self) -> None:
        while self.running:
            with self._times.at("publish", "blocked" if self._publish.full_runs() else "starved"):
                lease = self._results.get(POLL_S)
            if lease is not None:
                self._publish.run(lease)
            self._publish.again()
