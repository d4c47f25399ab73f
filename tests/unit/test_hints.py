"""Hints: data that RQ carries and that nobody executes."""

from __future__ import annotations

import json
import pickle
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from embq.core.errors import MalformedError
from embq.core.queue import hints
from embq.core.queue.hints import Hint, HintJob, drop, hint_queue, push, sweep
from embq.core.queue.keys import HINT_FUNCTION, HINT_MAX_BYTES, VERSION
from embq.core.units import UNIT_SPEC_MAX_BYTES, Unit
from embq.worker.claim.rq_worker import HintReceiver
from tests.support.outputs.run_case import MakeRun, RunCase


def hint(run: RunCase, u: int = 0) -> Hint:
    return Hint(run=run.info.run, gen="1-0", u=u, unit=run.units[u])


def put(run: RunCase, data: bytes, name: str = "evil", **fields: Any) -> str:
    """Put a job into a queue, as any client of the broker can."""
    job_id = f"{name}-1"
    run.client.hset(HintJob.key_for(job_id), mapping={"data": data, **fields})
    run.client.rpush(run.queue.key, job_id)
    return job_id


def packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode())


def body(run: RunCase, **changes: Any) -> dict[str, Any]:
    return {**hint(run).to_json(), **changes}


def pop(run: RunCase) -> HintJob | None:
    found = Queue.dequeue_any([run.queue], None, run.client, job_class=HintJob, serializer=JSONSerializer)
    return found[0] if found else None  # type: ignore[return-value]


def test_hints_come_out_of_rq_as_they_went_in(run: RunCase) -> None:
    push(run.queue, [hint(run, u) for u in range(3)], at_front=False)
    assert [run.pop() for _ in range(4)] == [hint(run, 0), hint(run, 1), hint(run, 2), None]


def test_urgent_hints_come_first(run: RunCase) -> None:
    push(run.queue, [hint(run, 0)], at_front=False)
    push(run.queue, [hint(run, 1)], at_front=True)
    assert [h.u for h in (run.pop(), run.pop()) if h] == [1, 0]


def test_pushing_nothing_is_nothing(run: RunCase) -> None:
    push(run.queue, [], at_front=True)
    assert run.client.llen(run.queue.key) == 0


def test_a_worker_of_one_run_leaves_the_hints_of_others_where_they_are(run: RunCase, make_run: MakeRun) -> None:
    other = make_run(4)
    foreign = [Hint(run=other.info.run, gen="1-0", u=u, unit=other.units[u]) for u in range(4)]
    mixed = [foreign[0], hint(run, 0), foreign[1], foreign[2], hint(run, 1), hint(run, 2), foreign[3]]
    push(run.queue, mixed, at_front=False)
    worker = HintReceiver(run.queue, name="w", read=Hint.from_job)
    with worker.receive(2, run=run.info.run) as found:
        assert found == [hint(run, 0), hint(run, 1)]
    with worker.receive(5, lambda _: 0, run=run.info.run) as found:
        assert found == []
    assert run.client.llen(run.queue.intermediate_queue.key) == 0
    assert [run.pop() for _ in range(6)] == [hint(run, 2), *foreign, None]


def test_a_dropped_hint_leaves_nothing_behind(run: RunCase) -> None:
    push(run.queue, [hint(run)], at_front=False)
    run.pop()
    assert run.client.keys("rq:job:" + run.info.run + "*") == []
    assert run.client.exists(run.queue.key, run.queue.intermediate_queue.key) == 0


def receiver(run: RunCase) -> HintReceiver[Hint]:
    return HintReceiver(run.queue, name=f"worker-of-{run.info.run}", read=Hint.from_job)


def test_a_worker_may_begin_anew_although_the_broker_has_lost_that_it_ended(run: RunCase) -> None:
    receiver(run).register_birth()
    with receiver(run) as again:
        assert run.client.hexists(again.key, "birth")
    assert run.client.hexists(again.key, "death")


def test_a_worker_puts_hints_back_that_it_popped_and_has_no_room_for(run: RunCase) -> None:
    push(run.queue, [hint(run, u) for u in range(6)], at_front=False)
    with receiver(run) as worker:
        for expected in ([0, 1], [2, 3]):
            with worker.receive(4, fits=lambda found: min(2, len(found))) as found:
                assert [one.u for one in found] == expected
    assert run.client.llen(run.queue.intermediate_queue.key) == 0
    assert [run.pop() for _ in range(3)] == [hint(run, 4), hint(run, 5), None]


def test_the_largest_unit_fits_into_a_hint(run: RunCase) -> None:
    # A name of one escaped character is the shape in which JSON adds most to what the planner counted.
    count = (UNIT_SPEC_MAX_BYTES - 300) // len('["\\udcff",1],')
    unit = Unit(kind="files", source="/d", items=(("\udcff", 1),) * count)
    assert len(json.dumps(unit.describe(), separators=(",", ":"))) > 0.99 * UNIT_SPEC_MAX_BYTES
    big = Hint(run=run.info.run, gen="1-0", u=1, unit=unit)
    push(run.queue, [big], at_front=False)
    assert run.pop() == big


def refused(run: RunCase, said: str) -> HintJob:
    """The next job of the queue, which is no hint."""
    job = pop(run)
    assert job is not None
    with pytest.raises(MalformedError, match=said):
        Hint.from_job(job)
    return job


def test_data_that_rq_would_execute_is_never_called(run: RunCase, tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    put(run, packed(["os.system", None, [f"touch {trace}"], {}]))
    job = refused(run, "malformed")
    for attempt in (lambda: job.func, job.perform):
        with pytest.raises(PermissionError):
            attempt()
    assert not trace.exists()


class _Bomb:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def test_a_pickle_is_never_loaded(run: RunCase, tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    put(run, zlib.compress(pickle.dumps((HINT_FUNCTION, None, [_Bomb(trace)], {}))))
    refused(run, "malformed")
    assert not trace.exists()


def test_callbacks_webhooks_and_dependencies_are_not_even_read(run: RunCase) -> None:
    put(
        run,
        packed([HINT_FUNCTION, None, [body(run)], {}]),
        success_callback_name="os.system",
        success_callback_timeout="1",
        failure_callback_name="os.system",
        failure_callback_timeout="x",
        stopped_callback_name="os.system",
        webhooks='[{"url": "http://localhost:9"}]',
        dependency_ids='["a"]',
        meta=pickle.dumps("x"),
        result="x",
        timeout="x",
        exc_info="x",
        description="x",
        retries_left="7",
    )
    job = pop(run)
    assert job is not None
    assert Hint.from_job(job) == hint(run)
    assert job.success_callback is None
    assert job.failure_callback is None
    assert job.stopped_callback is None
    assert (job.webhooks or [], job.dependency_ids, job.meta, job.retries_left) == ([], [], {}, None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not compressed",
        zlib.compress(b"0" * (HINT_MAX_BYTES + 1)),
        zlib.compress(b"0" * 10_000_000),
        zlib.compress(b"x")[:-1],
        b"x" * (HINT_MAX_BYTES + 1),
    ],
    ids=["empty", "plain", "too large", "bomb", "cut", "too long"],
)
def test_data_that_is_too_large_or_no_data_is_passed_over(run: RunCase, data: bytes) -> None:
    put(run, data)
    push(run.queue, [hint(run, 3)], at_front=False)
    job = pop(run)
    assert job is not None
    assert Hint.from_job(job).u == 3, "the job is skipped, and the worker goes on with the next"


@pytest.mark.parametrize("fields", [{"created_at": "x"}, {"origin": b"\xff"}, {"status": "x"}])
def test_a_field_of_rq_that_is_damaged_ends_no_worker(run: RunCase, fields: dict[str, Any]) -> None:
    put(run, packed([HINT_FUNCTION, None, [body(run)], {}]), **fields)
    push(run.queue, [hint(run, 3)], at_front=False)
    job = pop(run)
    assert job is not None
    assert Hint.from_job(job) == hint(run), "the field is not even read"


NO_HINTS: list[Any] = [
    None,
    [],
    {},
    "x",
    [1, 2],
    [HINT_FUNCTION, None, [], {}],
    [HINT_FUNCTION, None, [1], {}],
    [HINT_FUNCTION, None, None, None],
    [HINT_FUNCTION, None, [{}, {}], {}],
    [HINT_FUNCTION, None, [[["v"]]], {}],
    [HINT_FUNCTION + "x", None, [{}], {}],
]


@pytest.mark.parametrize("value", NO_HINTS, ids=str)
def test_json_of_another_shape_is_a_value_error(run: RunCase, value: Any) -> None:
    put(run, packed(value))
    refused(run, "malformed")


@pytest.mark.parametrize(
    "changes",
    [
        {"v": VERSION + 1},
        {"v": VERSION - 1},
        {"v": None},
        {"func": "os.system"},
        {"u": "x"},
        {"u": None},
        {"u": [1]},
        {"u": float("inf")},
        {"unit": None},
        {"unit": []},
        {"unit": {"kind": "tar"}},
        {"unit": {**Unit(kind="tar", source="/a").describe(), "pipe": "x"}},
        {"unit": {**Unit(kind="tar", source="/a").describe(), "start": "x"}},
        {"unit": {**Unit(kind="tar", source="/a").describe(), "stop": float("-inf")}},
        {"unit": {**Unit(kind="tar", source="/a").describe(), "items": [1]}},
        {"unit": {**Unit(kind="tar", source="/a").describe(), "items": [[1]]}},
    ],
    ids=str,
)
def test_a_hint_of_another_version_or_with_other_fields_is_a_value_error(run: RunCase, changes: dict[str, Any]) -> None:
    put(run, packed([HINT_FUNCTION, None, [body(run, **changes)], {}]))
    refused(run, "malformed")


def test_deeply_nested_json_is_a_value_error(run: RunCase) -> None:
    put(run, zlib.compress(b"[" * 30_000 + b"]" * 30_000))
    refused(run, "evil-1")


@pytest.mark.parametrize("keyword", [{"kwargs": 1}, {"x": 1}])
def test_keyword_arguments_are_refused(run: RunCase, keyword: dict[str, int]) -> None:
    put(run, packed([HINT_FUNCTION, None, [body(run)], keyword]))
    refused(run, "malformed")


def test_a_plain_rq_worker_finds_nothing_to_import_in_a_hint(run: RunCase) -> None:
    push(run.queue, [hint(run)], at_front=False)
    job = Job.fetch(run.queue.job_ids[0], connection=run.client, serializer=JSONSerializer)
    with pytest.raises((ImportError, AttributeError, ValueError)):
        _ = job.func


def test_a_job_that_expired_is_a_job_that_is_not_there(run: RunCase) -> None:
    with pytest.raises(NoSuchJobError):
        HintJob.fetch("nothing-1", connection=run.client, serializer=JSONSerializer)


def test_the_sweep_removes_what_dead_workers_popped_and_nothing_younger(
    run: RunCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(run.queue, [hint(run, u) for u in range(2)], at_front=False)
    assert pop(run) is not None
    popped = run.queue.intermediate_queue.key
    assert sweep(run.client, run.queue) == 0
    assert run.client.llen(popped) == 1
    now = hints.now_ms(run.client)
    monkeypatch.setattr(hints, "now_ms", lambda _: now + hints.STALE_S * 1000 + 1000)
    assert sweep(run.client, run.queue) == 1
    assert run.client.llen(popped) == 0
    assert run.client.llen(run.queue.key) == 1, "hints that still wait are not the sweep's"
    assert sweep(run.client, run.queue) == 0


def test_the_clock_of_the_client_decides_nothing(run: RunCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.0)
    push(run.queue, [hint(run)], at_front=False)
    monkeypatch.undo()
    assert pop(run) is not None
    assert sweep(run.client, run.queue) == 0, "it was pushed a moment ago, whatever the pusher's clock said"


def test_the_sweep_removes_jobs_that_are_no_hints(run: RunCase) -> None:
    job_id = put(run, b"", name="no-stamp-x")
    pop(run)
    assert sweep(run.client, run.queue) == 1
    assert run.client.exists(HintJob.key_for(job_id)) == 0


def test_dropping_twice_is_harmless(run: RunCase, client: redis.Redis) -> None:
    push(run.queue, [hint(run)], at_front=False)
    job = pop(run)
    assert job is not None
    for _ in range(2):
        with client.pipeline() as pipe:
            drop(pipe, run.queue, job.id)
            pipe.execute()
    assert client.llen(run.queue.intermediate_queue.key) == 0


def test_runs_with_another_model_have_another_queue(make_run: MakeRun) -> None:
    one, other = make_run(1), make_run(1)
    push(one.queue, [hint(one)], at_front=False)
    assert other.pop() is None
    assert hint_queue(one.client, one.record.model.queue_key).key.startswith("rq:queue:embq.")
