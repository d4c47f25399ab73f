"""The model that a worker serves next: what has a claim, what is booked, and what workers know of others."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import ConfigError, InputError
from embq.core.models import ModelConfig
from embq.core.queue.fair_queue import VirtualTimes
from embq.core.queue.keys import TURNS
from embq.core.queue.runs import register
from embq.core.rows.spec import RowSpec
from embq.core.run.run_info import WorkerDefaults
from embq.core.service.stopping import StopFlag
from embq.core.settings import Settings
from embq.index.workers.builds import IndexBuild, IndexStage, announce
from embq.worker import model_service, process
from embq.worker.claim.scheduler import Scheduler, Turn, TurnClock
from embq.worker.embedders.stub import StubEmbedder
from embq.worker.stages import read as reading
from embq.worker.supervisor.protocol import WorkerOptions
from tests.support.fakes.clock import FakeClock
from tests.support.outputs.run_case import DIM, RunCase, make_case, sample

SLICE_S = 60.0

Make = Callable[..., RunCase]


@pytest.fixture
def make(own_client: redis.Redis, tmp_path: Path) -> Make:
    """Makes runs, each with a model of its own, whose hints wait in the queue."""

    def one(name: str, *, priority: int = 10, hints: bool = True, **options: object) -> RunCase:
        run = make_case(own_client, tmp_path / name, **options)
        run.build()
        run.ledger.request({"priority": str(priority)})
        if hints:
            run.feeder().tick()
        return run

    return one


def scheduler(client: redis.Redis, run: str = "") -> Scheduler:
    return Scheduler(client, run=run, slice_s=SLICE_S)


def first(chooser: Scheduler) -> Turn | None:
    """The turn of a process that looks once."""
    looks = iter([False, True])
    return chooser.wait(lambda: next(looks))


def first_turn(chooser: Scheduler) -> Turn:
    turn = first(chooser)
    assert turn is not None
    return turn


def at_the_end(chooser: Scheduler, turn: Turn, *, spent_s: float = SLICE_S, idle: bool = False) -> ModelConfig | None:
    other = chooser.another(turn, spent_s=spent_s, idle=idle)
    return other.model if other else None


def booked(client: redis.Redis, run: RunCase) -> float:
    """Device seconds by weight that stand for the model of a run."""
    return VirtualTimes.from_json(client.get(TURNS)).start(run.record.model.queue_key)


def test_without_contention_nobody_ever_changes(own_client: redis.Redis, make: Make) -> None:
    chooser = scheduler(own_client)
    run = make("a")
    turn = first_turn(chooser)
    assert turn.model == run.record.model
    for slices in range(1, 5):
        assert at_the_end(chooser, turn, spent_s=slices * SLICE_S) is None
    assert booked(own_client, run) == pytest.approx(5 * SLICE_S / 10)


def test_a_worker_takes_the_defaults_of_runs_for_what_was_not_chosen(own_client: redis.Redis, make: Make) -> None:
    chooser, run = scheduler(own_client), make("a")
    register(own_client, replace(run.record, workers=WorkerDefaults(batch_size=512, prepare_threads=8)))
    first_turn(chooser)
    defaults = chooser.defaults_of(run.record.model)
    assert (defaults.batch_size, defaults.prepare_threads) == (512, 8)
    plain = WorkerOptions(
        name="w",
        device="cpu",
        run="",
        transport="auto",
        version="",
        drain_s=1.0,
        prefetch=1,
        threads=2,
        batch_size=0,
        report_fd=-1,
        progress_fd=-1,
    )
    own = replace(plain, batch_size=4, threads_chosen=True)
    assert [(one.batch_size, one.threads) for one in (plain.with_defaults(defaults), own.with_defaults(defaults))] == [
        (512, 8),
        (4, 2),
    ]


def test_at_the_end_of_a_slice_another_model_has_its_turn(own_client: redis.Redis, make: Make) -> None:
    chooser = scheduler(own_client)
    make("a")
    turn = first_turn(chooser)
    other = make("b")
    assert at_the_end(chooser, turn) == other.record.model


@pytest.mark.parametrize("state", ["paused", "cancelled"])
def test_the_model_of_a_run_that_rests_has_no_claim(own_client: redis.Redis, make: Make, state: str) -> None:
    chooser = scheduler(own_client)
    mine, other = make("a"), make("b")
    other.ledger.request({"state": state})
    turn = first_turn(chooser)
    assert turn.model == mine.record.model
    assert at_the_end(chooser, turn) is None
    mine.ledger.request({"state": state})
    other.ledger.request({"state": "running"})
    other.feeder().tick()
    assert chooser.is_needed(mine.record.model), "without contention it stays loaded"
    assert at_the_end(chooser, turn, idle=True) == other.record.model


def test_a_model_without_hints_has_no_claim(own_client: redis.Redis, make: Make) -> None:
    """There is no producer, or it cannot read the manifest: a worker that changed for it would stand idle."""
    chooser = scheduler(own_client)
    mine = make("a")
    turn = first_turn(chooser)
    make("b", hints=False)
    assert at_the_end(chooser, turn) is None
    mine.queue.empty()
    assert at_the_end(chooser, turn, idle=True) is None


def test_a_model_whose_units_are_all_held_has_no_claim(own_client: redis.Redis, make: Make) -> None:
    chooser = scheduler(own_client)
    make("a")
    turn = first_turn(chooser)
    other = make("b")
    for u in range(8):
        other.claim(u)
    assert other.queue.count == 8, "hints that are of no use any more"
    assert at_the_end(chooser, turn) is None


def test_a_worker_without_work_changes_at_once_and_only_then(own_client: redis.Redis, make: Make) -> None:
    chooser = scheduler(own_client)
    mine = make("a")
    turn = first_turn(chooser)
    other = make("b")
    assert at_the_end(chooser, turn, spent_s=1.0, idle=True) is None
    mine.queue.empty()
    assert at_the_end(chooser, turn, spent_s=1.0, idle=True) == other.record.model
    chooser.end(turn, spent_s=2.0)
    assert booked(own_client, mine) == pytest.approx(2.0 / 10)


def test_a_model_weighs_what_its_runs_weigh_together(own_client: redis.Redis, make: Make, tmp_path: Path) -> None:
    chooser = scheduler(own_client)
    run = make("a", priority=30)
    again = make_case(own_client, tmp_path / "again")
    again.record = type(again.record)(run=again.record.run, output=again.record.output, model=run.record.model, units=8)
    again.build()
    again.ledger.request({"priority": "15"})
    turn = first_turn(chooser)
    assert turn.weight == 45


def test_a_model_that_cannot_be_loaded_here_is_left_to_others_and_costs_it_nothing(
    own_client: redis.Redis, make: Make
) -> None:
    chooser = scheduler(own_client)
    run = make("a")
    turn = first_turn(chooser)
    chooser.refuse(turn)
    assert booked(own_client, run) == 0.0
    before = own_client.info("commandstats")["cmdstat_llen"]["calls"]
    assert first(chooser) is None
    assert own_client.info("commandstats")["cmdstat_llen"]["calls"] == before, "its queue is asked for no more"
    assert first(scheduler(own_client)) is not None


def test_a_worker_of_one_run_takes_no_part(own_client: redis.Redis, make: Make) -> None:
    mine = make("a")
    make("b")
    chooser = scheduler(own_client, run=mine.record.run)
    turn = first_turn(chooser)
    assert turn.model == mine.record.model
    assert at_the_end(chooser, turn, spent_s=100 * SLICE_S) is None
    chooser.end(turn, spent_s=100 * SLICE_S)
    assert own_client.get(TURNS) is None
    own_client.hset(mine.key("meta"), "state", "done")
    assert chooser.wait(lambda: False) is None


def test_workers_that_book_at_the_same_time_lose_nothing(
    own_client: redis.Redis, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker books between our look and our answer."""
    runs = [make("a"), make("b")]
    ours, theirs = scheduler(own_client), scheduler(own_client)
    real, once = VirtualTimes.begin, [True]

    def begin(self: VirtualTimes, *given: object, **named: object) -> VirtualTimes:
        if once and once.pop():
            assert first(theirs) is not None
        return real(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(VirtualTimes, "begin", begin)
    assert first(ours) is not None
    assert [booked(own_client, run) for run in runs] == [SLICE_S / 10, SLICE_S / 10]


def test_the_virtual_times_may_be_lost(own_client: redis.Redis, make: Make) -> None:
    chooser = scheduler(own_client)
    make("a")
    turn = first_turn(chooser)
    own_client.set(TURNS, "nonsense")
    assert at_the_end(chooser, turn) is None
    own_client.delete(TURNS)
    chooser.end(turn, spent_s=2 * SLICE_S)


# --- runs that cannot be served here ---


WRONG = InputError("its vectors have another length", code="wrong_dimension")


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> FakeClock:
    """The clock of the scheduler, which does not pause."""
    time = SimpleNamespace(monotonic=clock, sleep=lambda _seconds: None)
    monkeypatch.setattr("embq.worker.claim.scheduler.time", time)
    return clock


def test_a_refused_run_is_left_for_a_while_and_its_model_has_no_claim_for_longer(
    own_client: redis.Redis, make: Make, later: FakeClock
) -> None:
    chooser, run = scheduler(own_client), make("a")
    name = run.info.run
    chooser.refuse_run(name, WRONG)
    assert (first(chooser), chooser.is_needed(run.record.model)) == (None, True)
    for seconds, refuses in ((9.9, True), (0.1, False), (589.9, False)):
        later.advance(seconds)
        assert (chooser.refuses(name), chooser.refuses("b" * 16), first(chooser)) == (refuses, False, None)
    later.advance(0.1)
    assert first_turn(chooser).model == run.record.model
    chooser.refuse_run(name, WRONG)
    assert chooser.refuses(name)
    chooser.served(name)
    assert (chooser.refuses(name), first_turn(chooser).model) == (False, run.record.model)
    alone = scheduler(own_client, run=name)
    with pytest.raises(InputError, match="another length"):
        alone.refuse_run(name, WRONG)
    assert not alone.refuses(name)


def test_a_worker_is_misconfigured_if_it_refuses_again_and_again_all_that_there_was(
    own_client: redis.Redis, make: Make, later: FakeClock
) -> None:
    def refusing(chooser: Scheduler, *runs: str) -> Scheduler:
        first_turn(chooser)
        for run in runs:
            assert not chooser.refuses_all()
            chooser.refuse_run(run, WRONG)
        later.advance(10.0)
        assert not chooser.refuses_all(), "they were refused once"
        later.advance(0.1)
        return chooser

    runs = [make(name).info.run for name in "ab"]
    chooser = refusing(scheduler(own_client), *runs)
    indexing = refusing(Scheduler(own_client, run="", slice_s=SLICE_S, able=lambda _work: True), *runs)
    assert (chooser.refuses_all(), indexing.refuses_all()) == (True, True)
    build = IndexBuild(index="/index", build="b", folder="/index/_work", nonce="n", memory_bytes=1)
    announce(own_client, IndexStage(build=build, stage="add", run="0" * 32))
    assert (chooser.refuses_all(), indexing.refuses_all()) == (True, False)
    added = make("c").info.run
    chooser.refuse_run(added, WRONG)
    later.advance(10.1)
    assert not chooser.refuses_all(), "a run that came later proves nothing"
    later_one = refusing(scheduler(own_client), *runs, added)
    assert later_one.refuses_all()
    later_one.served(added)
    assert not later_one.refuses_all()


def test_a_turn_ends_with_its_slice_if_others_have_work_and_before_if_its_own_is_over(
    own_client: redis.Redis, make: Make, later: FakeClock
) -> None:
    chooser, run, is_stopped = scheduler(own_client), make("a"), list[bool]()
    served = TurnClock(chooser, first_turn(chooser), lambda: bool(is_stopped))
    served.begin()
    for seconds in (SLICE_S, SLICE_S - 1.0):  # of the second slice
        later.advance(seconds)
        assert not served.over()
    other = make("b")
    for quiet_s in (0.9, 0.0):  # the other one waits for the end of the slice, for something is in hand
        later.advance(quiet_s)
        served.idle()
        served.busy()
        assert (served.over(), served.next) == (False, None)
    later.advance(0.1)
    assert served.over()
    assert served.next is not None
    assert served.next.model == other.record.model
    served.end()
    assert booked(own_client, run) == pytest.approx(2 * SLICE_S / 10)
    idle = TurnClock(chooser, first_turn(chooser), lambda: bool(is_stopped))
    idle.begin()
    for each in (run, other):
        each.client.hset(each.key("meta"), "state", "done")
    later.advance(0.9)
    idle.idle()
    assert not idle.over()
    later.advance(0.1)
    idle.idle()
    assert (idle.over(), idle.next) == (True, None)
    before = booked(own_client, run)
    is_stopped.append(True)
    idle.end()
    assert booked(own_client, run) == before, "what was booked stays"


# --- the process that changes its model ---


class Device:
    """Counts the models on it, and asks the process to stop when the second one is loaded."""

    def __init__(self) -> None:
        self.stopped = StopFlag()
        self.loaded: list[weakref.ref[StubEmbedder]] = []
        self.models: list[ModelConfig] = []
        self.alive: list[bool] = []

    def load(self, model: ModelConfig, device: str) -> StubEmbedder:
        if self.loaded:
            self.alive.append(self.loaded[0]() is not None)
            self.stopped.count = 1
        embedder = StubEmbedder(model, dim=DIM, batch_size=1, s_per_sample=0.0, s_per_token=0.0, s_per_batch=0.0)
        self.loaded.append(weakref.ref(embedder))
        self.models.append(model)
        return embedder

    def serve(self, url: str, *, slice_s: float = SLICE_S, run: str = "") -> None:
        """A worker process, in this thread."""
        options = WorkerOptions(
            name="w",
            device="cpu",
            run=run,
            prefetch=1,
            threads=1,
            batch_size=0,
            transport="payload",
            drain_s=0.5,
            report_fd=-1,
            progress_fd=-1,
            version="test",
        )
        process.run(options, Settings(broker_url=url, slice_s=slice_s), self.stopped)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(model_service, "load", device.load)
    monkeypatch.setattr(
        reading, "read", lambda unit, roots, on_progress, texts: (sample(0, ordinal) for ordinal in range(3))
    )
    return device


def test_the_old_model_is_freed_before_the_next_is_loaded(
    own_server: EmbeddedServer, make: Make, device: Device
) -> None:
    """A device may hold only one. The process works off the hints of one model, and changes to the other."""
    runs = [make("a"), make("b")]
    device.serve(own_server.url)
    assert device.alive == [False]
    assert sorted(run.client.hlen(run.key("pub")) for run in runs) == [0, 8]


def test_a_run_that_cannot_be_made_of_its_models_vectors_is_left_and_others_are_served(
    own_server: EmbeddedServer, make: Make, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    long, other = make("a", rows=RowSpec(truncate_dim=DIM + 1)), make("b")
    long.client.set(TURNS, VirtualTimes(times={other.record.model.queue_key: 1e-6}).to_json(""))
    with caplog.at_level("ERROR", "worker"):
        device.serve(own_server.url, slice_s=0.5)
    assert device.models == [long.record.model, other.record.model]
    assert long.client.hlen(long.key("pub")) == long.client.hlen(long.key("owner")) == 0
    (said,) = [record.getMessage() for record in caplog.records if "run_refused" in record.getMessage()]
    assert "wrong_dimension" in said
    assert f"have {DIM} numbers" in said


def test_a_worker_of_a_run_that_cannot_be_made_of_its_models_vectors_ends_with_the_reason(
    own_server: EmbeddedServer, make: Make, device: Device
) -> None:
    run = make("a", rows=RowSpec(dtype="binary"))
    with pytest.raises(InputError, match="do not fill"):
        device.serve(own_server.url, run=run.info.run)
    assert run.client.hlen(run.key("owner")) == 0


def test_a_worker_of_a_run_that_was_begun_with_other_weights_ends_with_the_reason(
    own_server: EmbeddedServer, make: Make, device: Device
) -> None:
    run = make("a")
    run.client.hset(run.key("meta"), "fingerprint", "f" * 32)
    with pytest.raises(ConfigError, match=f"begun with other weights.*{'f' * 32}"):
        device.serve(own_server.url, run=run.info.run)
    assert run.client.hlen(run.key("owner")) == 0


def test_results_without_room_are_given_back_when_it_is_the_turn_of_another_model(
    own_server: EmbeddedServer, make: Make, device: Device
) -> None:
    """Nobody writes the one run; the other need not wait for that."""
    full, other = make("a"), make("b")
    full.client.hset(full.key("meta"), "limit_entries", 0)
    # Hardly behind the other, so its turn comes first.
    full.client.set(TURNS, VirtualTimes(times={other.record.model.queue_key: 1e-6}).to_json(""))
    device.serve(own_server.url, slice_s=0.5)
    assert device.models == [full.record.model, other.record.model]
    assert full.client.hlen(full.key("owner")) == 0
    assert {int(attempts) for attempts in full.client.hvals(full.key("att"))} <= {0}


def test_a_run_without_room_for_results_gives_its_model_no_claim(own_client: redis.Redis, make: Make) -> None:
    chooser = scheduler(own_client)
    make("a")
    turn = first_turn(chooser)
    full = make("b")
    full.work_one(0)
    assert at_the_end(chooser, turn) == full.record.model
    full.client.hset(full.key("meta"), "limit_entries", 1)
    assert at_the_end(chooser, turn, spent_s=2 * SLICE_S) is None
