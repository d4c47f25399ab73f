"""Hints: RQ jobs with the message "unit U of run R waits". Plain JSON and allow-listed names, nothing executable.

RQ by itself imports the function that a job names, unpickles by default, and follows callbacks and webhooks. `HintJob`
does none of these: it is data (RQ 2.12: `Job.func`, `Job.restore`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, cast

import msgspec
import redis
from redis.client import Pipeline
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from embq.core import wire
from embq.core.broker.client import now_ms
from embq.core.errors import MalformedError
from embq.core.queue.keys import HINT_FUNCTION, HINT_MAX_BYTES, VERSION, queue_name
from embq.core.units import Unit
from embq.core.wire import Generation, LedgerId, UnitNumber

T = TypeVar("T")

FRONT = 256
"""Hints of a queue among which those of one run are looked for first; most queues have no more."""

STALE_S = 600
"""Age at which a hint that is still listed as popped is taken for one of a dead worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A hint for a unit of a run.

    Attributes:
        run: run id.
        gen: generation of the run's queue; hints of an older one are dropped.
        u: index of the unit.
        unit: the unit itself, so that a worker needs no access to the output folder.
    """

    function: ClassVar[str] = HINT_FUNCTION

    run: str
    gen: str
    u: int
    unit: Unit

    def to_json(self) -> dict[str, Any]:
        """The hint as the one argument of its job."""
        return body(self, self.unit.describe())

    @classmethod
    def from_job(cls, job: HintJob) -> Hint:
        """The hint in a job; MalformedError if it is no hint of this version."""
        run, gen, u, unit = read(job, cls.function, Unit.from_description)
        return cls(run=run, gen=gen, u=u, unit=unit)


class AnyHint(Protocol):
    """A hint of any kind of work.

    Attributes:
        function: name of its jobs. It is never imported or called.
        run, gen, u: as in `Hint`.
    """

    function: ClassVar[str]

    @property
    def run(self) -> str: ...

    @property
    def gen(self) -> str: ...

    @property
    def u(self) -> int: ...

    def to_json(self) -> dict[str, Any]:
        """The hint as the one argument of its job."""


def body(hint: AnyHint, unit: Mapping[str, Any]) -> dict[str, Any]:
    """The one argument of the job of a hint, with its unit as JSON."""
    return {"v": VERSION, "run": hint.run, "gen": hint.gen, "u": hint.u, "unit": unit}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """The one argument of the job of a hint."""

    v: int
    run: LedgerId
    gen: Generation
    u: UnitNumber
    unit: dict[str, Any]


def read(job: HintJob, function: str, unit_of: Callable[[Any], T]) -> tuple[str, str, int, T]:
    """Run, generation, u and unit of a hint; MalformedError if the job is none, or one of another version."""
    what = f"job {job.id}"
    call = wire.read(_Call, job.plain, what=what, most_bytes=HINT_MAX_BYTES)
    (data,) = call.args
    if call.function != function or data.get("v") != VERSION or set(data) != set(_Body.__slots__):
        raise wire.malformed(what, "it names something else, or is of another version")
    body = wire.convert(_Body, data, what=what)
    return body.run, body.gen, body.u, unit_of(body.unit)


class _Call(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The array that RQ stores of a job."""

    function: str
    instance: None
    args: tuple[dict[str, Any]]
    kwargs: Annotated[dict[str, Any], msgspec.Meta(max_length=0)]


class HintJob(Job):
    """An RQ job that can only be read. Give it as `job_class`, with `serializer=JSONSerializer`, everywhere."""

    plain: bytes = b""
    """Its data, of at most HINT_MAX_BYTES."""

    def restore(self, raw_data: Mapping[bytes, bytes]) -> Any:
        """Load the job's data and no other field; NoSuchJobError if it is too large, before it is unpacked."""
        data = raw_data.get(b"data", b"")
        unpacker = zlib.decompressobj()
        try:
            plain = unpacker.decompress(data, HINT_MAX_BYTES + 1)
        except zlib.error as error:
            raise NoSuchJobError(f"job {self.id} is not a hint") from error
        if max(len(data), len(plain)) > HINT_MAX_BYTES or not unpacker.eof:
            raise NoSuchJobError(f"job {self.id} is larger than a hint may be")
        self.plain = plain
        return super().restore({b"data": data})

    @property
    def func(self) -> Any:
        """Never gives a function: a hint is not code."""
        raise PermissionError(f"job {self.id} is a hint and cannot be called")

    def perform(self) -> Any:
        """Never runs anything: a hint is not code."""
        raise PermissionError(f"job {self.id} is a hint and cannot be performed")


def hint_queue(client: redis.Redis, queue_key: str) -> Queue:
    """The RQ queue of all runs that share a model config."""
    return Queue(queue_name(queue_key), connection=client, job_class=HintJob, serializer=JSONSerializer)


def push(queue: Queue, hints: Sequence[AnyHint], *, at_front: bool) -> None:
    """Enqueue hints. Each gets an id of its own, so a doubled hint never shares RQ's bookkeeping with another."""
    if not hints:
        return
    stamp = now_ms(queue.connection)
    queue.enqueue_many(
        [
            Queue.prepare_data(
                hint.function,
                args=[hint.to_json()],
                job_id=f"{hint.run}-{hint.u}-{stamp}",
                # RQ renders an empty description from the call; a blank one costs nothing.
                description=" ",
                result_ttl=0,
                failure_ttl=60,
                at_front=at_front,
            )
            for hint in hints
        ]
    )


def pop(queue: Queue, most: int, *, run: str = "", wait_s: float = 0.0) -> list[HintJob]:
    """Pop up to `most` waiting hints, as RQ pops one: each is listed as popped until it is dropped.

    One whose data is missing or malformed is left to `sweep`.

    Args:
        run: of this run alone; "" for all.
        wait_s: time that the broker blocks until there is one, unless `run` is given; 0 does not wait.
    """
    if most < 1:
        return []
    popped = _popped_of(queue, run, most) if run else _popped(queue, most, wait_s)
    jobs = []
    for job_id, raw_data in popped:
        job = HintJob(job_id, connection=queue.connection, serializer=JSONSerializer)
        with suppress(NoSuchJobError):
            job.restore(raw_data)
            jobs.append(job)
    return jobs


def _popped(queue: Queue, most: int, wait_s: float) -> list[tuple[str, Any]]:
    """Ids and data of popped hints."""
    client, popped = queue.connection, queue.intermediate_queue.key
    # The broker takes parts of a second.
    first = [client.blmove(queue.key, popped, wait_s, "LEFT", "RIGHT")] if wait_s else []  # type: ignore[arg-type]
    if first == [None]:
        return []
    with client.pipeline(transaction=False) as pipe:
        for _ in range(most - len(first)):
            pipe.lmove(queue.key, popped, "LEFT", "RIGHT")
        job_ids = _ids(raw for raw in (*first, *pipe.execute()) if raw is not None)
        for job_id in job_ids:
            pipe.hgetall(HintJob.key_for(job_id))
        return list(zip(job_ids, pipe.execute() if job_ids else [], strict=True))


def _popped_of(queue: Queue, run: str, most: int) -> list[tuple[str, Any]]:
    """Ids and data of popped hints of one run; those of others stay where they are."""
    client = queue.connection
    # The first hints are its own, unless runs share the queue.
    for last, enough in ((most - 1, most), (FRONT - 1, 1), (-1, 0)):
        listed = _ids(client.lrange(queue.key, 0, last))
        job_ids = [job_id for job_id in listed if job_id.startswith(f"{run}-")][:most]
        if len(job_ids) >= enough:
            break
    with client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.lpush(queue.intermediate_queue.key, job_id)
            pipe.lrem(queue.key, 1, job_id)
            pipe.hgetall(HintJob.key_for(job_id))
        answers = pipe.execute() if job_ids else []
    # Of two processes that remove a hint one does.
    return [
        (job_id, data) for job_id, removed, data in zip(job_ids, answers[1::3], answers[2::3], strict=True) if removed
    ]


def put_back(queue: Queue, job_ids: Sequence[str]) -> None:
    """Return popped hints to the front of the queue, in their order."""
    if not job_ids:
        return
    with queue.connection.pipeline() as pipe:
        for job_id in reversed(job_ids):
            pipe.lrem(queue.intermediate_queue.key, 1, job_id)
            pipe.lpush(queue.key, job_id)
        pipe.execute()


def drop(pipe: Pipeline, queue: Queue, job_id: str) -> None:
    """Remove a popped hint: from the list of popped ones, and its data."""
    pipe.lrem(queue.intermediate_queue.key, 1, job_id)
    pipe.delete(HintJob.key_for(job_id))


def peek(queue: Queue, run: str, most: int) -> Hint | None:
    """A hint of one run among the first `most` in the queue, where it stays; None if there is none."""
    client = queue.connection
    for job_id in _ids(client.lrange(queue.key, 0, most - 1)):
        if job_id.startswith(f"{run}-"):
            job = HintJob(job_id, connection=client, serializer=JSONSerializer)
            with suppress(NoSuchJobError, MalformedError):
                job.restore(cast("dict[bytes, bytes]", client.hgetall(HintJob.key_for(job_id))))
                return Hint.from_job(job)
    return None


def withdraw(client: redis.Redis, queue: Queue, run: str) -> int:
    """Remove the waiting hints of one run; returns their number. One that a worker pops meanwhile is harmless."""
    waiting = _ids(client.lrange(queue.key, 0, -1))
    ours = [job_id for job_id in waiting if job_id.startswith(f"{run}-")]
    with client.pipeline() as pipe:
        for job_id in ours:
            pipe.lrem(queue.key, 1, job_id)
            pipe.delete(HintJob.key_for(job_id))
        pipe.execute()
    return len(ours)


def remove(client: redis.Redis, queue: Queue) -> None:
    """Remove a queue with all its hints. RQ would load a script for that, which not every user may."""
    lists = (queue.key, queue.intermediate_queue.key)
    listed = [job_id for key in lists for job_id in _ids(client.lrange(key, 0, -1))]
    with client.pipeline() as pipe:
        pipe.delete(*lists, *(HintJob.key_for(job_id) for job_id in listed))
        pipe.srem(Queue.redis_queues_keys, queue.key)
        pipe.execute()


def sweep(client: redis.Redis, queue: Queue) -> int:
    """Remove the popped hints of dead workers; returns their number."""
    popped = cast("list[bytes]", client.lrange(queue.intermediate_queue.key, 0, -1))
    oldest_ms = now_ms(client) - STALE_S * 1000 if popped else 0
    swept = 0
    for raw in popped:
        stamp = re.search(rb"-([0-9]{1,15})\Z", raw)
        if stamp is not None and int(stamp[1]) > oldest_ms:
            continue
        with client.pipeline() as pipe:
            pipe.lrem(queue.intermediate_queue.key, 1, cast("str", raw))
            pipe.delete(b"rq:job:" + raw)
            pipe.execute()
        swept += 1
    return swept


def _ids(listed: Iterable[bytes | str]) -> list[str]:
    """Ids of jobs; a malformed one is skipped, and left to `sweep` once it is popped."""
    ids = []
    for raw in cast("Iterable[bytes]", listed):
        if _ID.fullmatch(raw):
            ids.append(raw.decode())
        else:
            wire.skipped("id of a hint", raw[:200], "it holds other signs, or is too long")
    return ids


_ID = re.compile(rb"[A-Za-z0-9_-]{1,200}")
