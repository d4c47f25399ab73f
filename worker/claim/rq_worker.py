"""RQ's worker loop, reduced to what embq needs of it: register, block on one queue, pop a hint, hand it on.

A hint is finished as soon as its unit is claimed: the lease carries it from there. So RQ never sees a long job, its
heartbeats, timeouts, retries and registries decide nothing. How many units are claimed is decided by
`worker.claim.claim_policy`. Of several hints that are wanted at once RQ pops the first, and the others are popped
together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

import redis
from rq import Queue
from rq.exceptions import DequeueTimeout, StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker import SimpleWorker

from core import wire
from core.errors import MalformedError
from core.queue import hints
from core.queue.hints import AnyHint, HintJob
from core.service.log import Events

WORKER_TTL_S = 60
IDLE_S = 1.0
BLOCK_S = 0.25
"""How long the broker is asked to wait for a hint; a request to stop is seen no earlier than after that."""
HEARTBEAT_S = 5.0

H = TypeVar("H", bound=AnyHint)


class HintWorker(SimpleWorker, Generic[H]):
    """Pops hints from one queue until `stopped`, or until something fails: then `failed` holds the error.

    Args:
        queue: exactly one; with several, RQ falls back to a pop that loses what a dying worker held.
        read: makes a hint of a job; MalformedError where it is none.
        room: how many hints to pop now; none are popped while it says 0.
        rest_s: after how many seconds to ask for room again.
        fits: how many of those that were popped to take; the others are put back.
        take: gets the hints that were popped.
        stopped: asked before and after every pop.
        idle: called after each second without a hint, or without room for one.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        name: str,
        client: redis.Redis,
        read: Callable[[HintJob], H],
        room: Callable[[], int],
        rest_s: Callable[[], float],
        fits: Callable[[Sequence[H]], int],
        take: Callable[[list[H]], None],
        stopped: Callable[[], bool],
        idle: Callable[[], None],
    ) -> None:
        super().__init__(
            [queue],
            name=name,
            connection=client,
            job_class=HintJob,
            serializer=JSONSerializer,
            worker_ttl=WORKER_TTL_S,
            log_job_description=False,
        )
        self._hint_of = read
        self._room = room
        self._rest_s = rest_s
        self._fits = fits
        self._wanted = 1
        self._take = take
        self._stopped = stopped
        self._idle = idle
        self._beat_at = 0.0
        self.failed: Exception | None = None
        self._events = Events("worker")

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[Job, Queue] | None:
        """The next hint; StopRequested (which ends `work` in order) once `stopped` says so."""
        with self._failures_kept():
            blocked_s = 0.0
            while True:
                self._wait_for_room()
                try:
                    found: tuple[Job, Queue] | None = Queue.dequeue_any(
                        self.queues,
                        BLOCK_S,  # type: ignore[arg-type] # RQ hands it on, and the broker knows parts of a second
                        connection=self.connection,
                        job_class=HintJob,
                        serializer=JSONSerializer,
                    )
                except ValueError as error:  # popped, and not the id of any job
                    wire.skipped("id of a hint", str(error)[:200], error)
                    continue
                except DequeueTimeout:
                    blocked_s += BLOCK_S
                    if blocked_s >= IDLE_S:
                        self._idle()
                        blocked_s = 0.0
                    continue
                if found is not None:
                    return found

    def _wait_for_room(self) -> None:
        idle_at = time.monotonic() + IDLE_S
        while True:
            self.heartbeat()
            if self._stopped():
                raise StopRequested
            self._wanted = self._room()
            if self._wanted:
                return
            if time.monotonic() >= idle_at:
                self._idle()
                idle_at += IDLE_S
            time.sleep(self._rest_s())

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Hand the hint on, and further ones that are wanted; then forget them. Nothing in a job is ever called."""
        with self._failures_kept():
            jobs = [cast("HintJob", job), *hints.pop(queue, self._wanted - 1)]
            found = [(one, hint) for one in jobs if (hint := self._read(one)) is not None]
            fit = self._fits([hint for _, hint in found])
            back = [one.id for one, _ in found[fit:]]
            hints.put_back(queue, back)
            self._take([hint for _, hint in found[:fit]])
            with self.connection.pipeline() as pipe:
                for one in jobs:
                    if one.id not in back:
                        hints.drop(pipe, queue, one.id)
                pipe.execute()

    @contextmanager
    def _failures_kept(self) -> Iterator[None]:
        """Keep an error in `failed` and end `work`; RQ's loop would print it and return as if all were well."""
        try:
            yield
        except StopRequested:
            raise
        except Exception as error:
            self.failed = error
            raise StopRequested from error

    def _read(self, job: HintJob) -> H | None:
        try:
            return self._hint_of(job)
        except MalformedError as error:
            wire.skipped("hint", job.id, error)
            return None

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """RQ's own sign of life, for `rq info`; every few seconds instead of three times per hint."""
        seconds = time.monotonic()
        if seconds - self._beat_at >= HEARTBEAT_S:
            self._beat_at = seconds
            super().heartbeat(timeout, pipeline)

    def register_birth(self) -> None:
        """Register, also where the broker has lost that this process signed off from its last queue.

        RQ refuses a name that it takes to be at work; ours are those of one process each.
        """
        self.connection.delete(self.key)
        super().register_birth()  # type: ignore[no-untyped-call]

    def _set_ip_address(self, connection: redis.Redis) -> None:
        """Nothing: RQ would look for our address in the list of all clients, which is not for workers to see."""
        self.ip_address = "unknown"

    def run_maintenance_tasks(self) -> None:
        """Nothing: RQ's sweep would fail hints that are merely being claimed. The feeder sweeps."""
        self.last_cleaned_at = now()  # type: ignore[assignment]

    def _set_connection(self, connection: redis.Redis) -> redis.Redis:
        """Nothing: RQ would wait most of a minute for each answer, and so on a connection that died unseen."""
        return connection

    def check_for_suspension(self, burst: bool) -> None:
        """Nothing: RQ's suspension is one flag for every queue of the server."""

    def subscribe(self) -> None:
        """Nothing: whoever may publish on RQ's control channel could stop workers."""

    def unsubscribe(self) -> None:
        """Nothing was subscribed."""

    def _install_signal_handlers(self) -> None:
        """The process installs its own, which only set a flag."""
