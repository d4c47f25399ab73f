"""Receives hints from one queue, registered as an RQ worker.

A hint is finished as soon as its unit is claimed; from then on the lease stands for the unit. RQ's worker loop, job
heartbeats, timeouts, retries and registries are not used: only its queues, and its registry of workers for `rq info`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Generic, Self, TypeVar

import redis
from rq import Queue
from rq.serializers import JSONSerializer
from rq.worker import SimpleWorker, WorkerStatus

from embq.core import wire
from embq.core.errors import MalformedError
from embq.core.queue import hints
from embq.core.queue.hints import AnyHint, HintJob

WORKER_TTL_S = 60
BLOCK_S = 0.25
"""Time that the broker blocks for a hint; a request to stop is noticed only after it."""
HEARTBEAT_S = 5.0

H = TypeVar("H", bound=AnyHint)


class HintReceiver(SimpleWorker, Generic[H]):
    """Pops hints while its `with` block lasts, in which it is registered as an RQ worker.

    Args:
        queue: exactly one; with several, RQ falls back to a pop that loses what a dying worker held.
        read: makes a hint of a job; MalformedError if it is none.
    """

    def __init__(self, queue: Queue, *, name: str, read: Callable[[HintJob], H]) -> None:
        super().__init__(
            [queue],
            name=name,
            connection=queue.connection,
            job_class=HintJob,
            serializer=JSONSerializer,
            worker_ttl=WORKER_TTL_S,
            log_job_description=False,
        )
        self._hint_of = read
        self._beat_at = 0.0

    def __enter__(self) -> Self:
        self.register_birth()
        self.set_state(WorkerStatus.STARTED)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.register_death()  # type: ignore[no-untyped-call]

    @contextmanager
    def receive(
        self,
        most: int,
        fits: Callable[[Sequence[H]], int] = len,
        *,
        run: str = "",
    ) -> Iterator[list[H]]:
        """Up to `most` hints, none if none comes within `BLOCK_S`; they are dropped when the block ends in order.

        Args:
            fits: how many of those that were popped to take; the others are put back.
            run: take those of this run alone; "" takes all.
        """
        queue = self.queues[0]
        jobs = hints.pop(queue, most, run=run, wait_s=BLOCK_S)
        pairs = [(job, hint) for job in jobs if (hint := self._read(job)) is not None]
        fit = fits([hint for _, hint in pairs]) if pairs else 0
        back = [job.id for job, _ in pairs[fit:]]
        hints.put_back(queue, back)
        if run and not pairs:
            time.sleep(BLOCK_S)
        yield [hint for _, hint in pairs[:fit]]
        with self.connection.pipeline() as pipe:
            for job in jobs:
                if job.id not in back:
                    hints.drop(pipe, queue, job.id)
            pipe.execute()

    def beat(self) -> None:
        """Report to RQ that this process lives, every `HEARTBEAT_S` seconds."""
        seconds = time.monotonic()
        if seconds - self._beat_at >= HEARTBEAT_S:
            self._beat_at = seconds
            self.heartbeat()

    def register_birth(self) -> None:
        """Register, also if the broker has lost that this process signed off from its last queue.

        RQ refuses a name that it takes to be at work; ours are those of one process each.
        """
        self.connection.delete(self.key)
        super().register_birth()  # type: ignore[no-untyped-call]

    def _read(self, job: HintJob) -> H | None:
        try:
            return self._hint_of(job)
        except MalformedError as error:
            wire.skipped("hint", job.id, error)
            return None

    def _set_ip_address(self, connection: redis.Redis) -> None:
        """Unknown: RQ would look for our address in the list of all clients, which workers may not read."""
        self.ip_address = "unknown"

    def _set_connection(self, connection: redis.Redis) -> redis.Redis:
        """Unchanged: RQ would wait most of a minute for each answer, and so on a connection that died unseen."""
        return connection
