"""Index units in the broker: who may take them, whose turn it is, and what remains when their conductor is gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from embq.core.errors import MalformedError
from embq.core.process.children import ChildEndedError
from embq.core.queue.hints import Hint, HintJob, hint_queue, pop, push
from embq.core.queue.keys import INDEXING, INDEXING_MS, run_key
from embq.core.queue.ledger import Ledger
from embq.core.queue.scripts import load_scripts
from embq.index.workers import builds
from embq.index.workers.access import IndexAccess
from embq.index.workers.builds import SHARED, IndexBuild, IndexStage, announce, announced, forget_abandoned
from embq.index.workers.hint import IndexHint
from embq.index.workers.service import IndexChild
from embq.worker.claim.scheduler import Scheduler
from tests.support.outputs.run_case import make_case

RUN = "0" * 32


@pytest.fixture
def build(tmp_path: Path) -> IndexBuild:
    """A build whose folder is there."""
    folder = tmp_path / "index" / "_work" / "b1"
    folder.mkdir(parents=True)
    (folder / SHARED).write_text("nonce")
    return IndexBuild(
        index=str(tmp_path / "index"), build="b1", folder=str(folder), nonce="nonce", memory_bytes=1 << 30
    )


@pytest.fixture
def waiting(own_client: redis.Redis, build: IndexBuild) -> IndexBuild:
    """The same with two units that wait."""
    announce(own_client, IndexStage(build=build, stage="add", run=RUN))
    ledger = Ledger(own_client, RUN)
    ledger.rebuild(gen="g", total=2, done=b"", counters={"fingerprint": ""})
    _, units = ledger.next_units("g", 2, queue_empty=True, reap_at=0)
    push(hint_queue(own_client, build.queue_key), [hint(build, u) for u in units], at_front=False)
    return build


def hint(build: IndexBuild, u: int) -> IndexHint:
    unit = {"index": build.index, "build": build.build, "stage": "add", "number": u, "inputs": "i"}
    return IndexHint(run=RUN, gen="g", u=u, unit=unit)


def scheduler(
    client: redis.Redis, *, run: str = "", able: Callable[[IndexBuild], bool] | None = lambda _: True
) -> Scheduler:
    return Scheduler(client, run=run, slice_s=60.0, able=able)


def looked(chooser: Scheduler) -> object:
    """Builds that a process serves at one look."""
    looks = iter([False, True])
    turn = chooser.wait(lambda: next(looks))
    return turn.model if turn is not None else None


def test_a_worker_without_a_model_serves_an_index_that_waits(own_client: redis.Redis, waiting: IndexBuild) -> None:
    assert looked(scheduler(own_client)) == waiting


@pytest.mark.parametrize(
    "chooser",
    [{"run": "r"}, {"able": None}, {"able": lambda _: False}],
    ids=["bound to a run", "simulated device", "no access"],
)
def test_others_leave_it(own_client: redis.Redis, waiting: IndexBuild, chooser: dict[str, object]) -> None:
    assert looked(scheduler(own_client, **chooser)) is None  # type: ignore[arg-type]


def test_an_index_and_a_model_take_turns(own_client: redis.Redis, waiting: IndexBuild, tmp_path: Path) -> None:
    run = make_case(own_client, tmp_path / "run")
    run.build()
    run.feeder().tick()
    chooser = scheduler(own_client)
    looks = iter([False, True])
    turn = chooser.wait(lambda: next(looks))
    assert turn is not None
    first = turn.model
    turn = chooser.another(turn, spent_s=60.0, idle=False)
    assert turn is not None
    assert {first, turn.model} == {waiting, run.record.model}


def test_between_two_stages_workers_stay_and_nobody_comes(own_client: redis.Redis, build: IndexBuild) -> None:
    announce(own_client, IndexStage(build=build, stage="add", run=RUN))
    chooser = scheduler(own_client)
    assert chooser.is_needed(build)
    assert looked(chooser) is None


def test_a_build_that_nobody_renews_is_removed_with_all_that_it_left(
    own_client: redis.Redis, waiting: IndexBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = load_scripts(own_client)
    forget_abandoned(own_client, scripts=scripts)
    assert [stage.build for stage in announced(own_client)] == [waiting]
    now = builds.now_ms(own_client)
    monkeypatch.setattr(builds, "now_ms", lambda _: now + INDEXING_MS + 1_000)
    assert announced(own_client) == []
    forget_abandoned(own_client, scripts=scripts)
    assert not own_client.exists(INDEXING)
    assert own_client.keys(run_key(RUN, "*")) == []
    assert own_client.keys("rq:job:*") == own_client.keys("rq:queue:*") == []
    assert looked(scheduler(own_client)) is None


def test_a_conductor_that_comes_back_at_that_moment_is_not_removed(
    own_client: redis.Redis, waiting: IndexBuild
) -> None:
    scripts = load_scripts(own_client)
    old = own_client.hget(INDEXING, waiting.queue_key)
    announce(own_client, IndexStage(build=waiting, stage="merge", run=RUN))
    key = waiting.queue_key
    assert not scripts["forget"](keys=[INDEXING, run_key(RUN, "meta")], args=[key, old], client=own_client)
    assert own_client.exists(run_key(RUN, "meta"))


def test_hints_of_one_kind_are_none_of_the_other(own_client: redis.Redis, waiting: IndexBuild) -> None:
    (job,) = pop(hint_queue(own_client, waiting.queue_key), 1)
    assert IndexHint.from_job(job) == hint(waiting, 0)
    with pytest.raises(MalformedError, match="malformed"):
        Hint.from_job(job)


@pytest.mark.parametrize("unit", [{"index": ["a"]}, {"index": {"a": 1}}, "text", None, {"index": 1.5}])
def test_a_unit_of_anything_but_words_and_numbers_is_no_hint(
    own_client: redis.Redis, build: IndexBuild, unit: object
) -> None:
    queue = hint_queue(own_client, build.queue_key)
    body = {"v": 4, "run": RUN, "gen": "g", "u": 0, "unit": unit}
    queue.enqueue(IndexHint.function, args=(body,), job_id="x-0-1")
    (job,) = pop(queue, 1)
    assert isinstance(job, HintJob)
    with pytest.raises(MalformedError, match="malformed"):
        IndexHint.from_job(job)


def test_a_machine_with_another_folder_under_the_same_path_takes_no_part(build: IndexBuild) -> None:
    assert IndexAccess(()).able(build)
    assert not IndexAccess(()).able(replace(build, nonce="of another machine"))
    assert not IndexAccess(()).able(replace(build, folder="/nowhere"))
    assert not IndexAccess(("/elsewhere",)).able(build)
    assert IndexAccess((str(Path(build.index).parent),)).able(build)


def test_a_unit_process_that_dies_says_how_and_another_one_takes_its_place() -> None:
    child = IndexChild(worker="w", threads=1, memory_bytes=1 << 30)
    child.send({"no": "unit"})
    first = child.pid
    os.kill(first, 9)
    with pytest.raises(ChildEndedError, match="signal 9"):
        child.answer(60.0)
    child.send({"no": "unit"})
    assert child.pid != first
    told = child.answer(60.0)
    assert told is not None
    assert told["error"]["code"] == "bug"
    child.close()
    assert child.pid == 0
