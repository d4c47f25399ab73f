"""The feeder: enough hints for every worker, fairly, and none too many."""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from embq.core.queue import hints
from embq.core.queue import outage_detector as outages
from embq.core.queue.heartbeats import BriefReport
from embq.core.queue.keys import RUNS, run_key
from embq.core.queue.result_stream import PublishVerdict
from embq.core.queue.runs import RunRecord, register
from embq.producer import feed_policy
from embq.producer import feeder as module
from embq.producer.feed_policy import MAX_HINTS
from embq.producer.feeder import Feeder, serve
from tests.support.fakes.clock import FakeClock
from tests.support.outputs.run_case import MakeRun, RunCase


@pytest.fixture(autouse=True)
def _small_high_water(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_policy, "MIN_HINTS", 6)
    monkeypatch.setattr(feed_policy, "HINTS_PER_WORKER", 0)
    monkeypatch.setattr(feed_policy, "WINDOW_S", 0.0)


def units_in_queue(run: RunCase) -> list[int]:
    found = []
    while hint := run.pop():
        assert hint.gen == run.gen
        assert hint.unit == run.units[hint.u]
        found.append(hint.u)
    return found


def same_queue(make_run: MakeRun, *units: int) -> list[RunCase]:
    """Runs that share a model, and so a queue."""
    runs = [make_run(count) for count in units]
    for run in runs:
        record = run.record
        run.record = RunRecord(
            run=record.run,
            output=record.output,
            model=runs[0].record.model,
            rows=record.rows,
            units=record.units,
        )
        run.build()
    return runs


def feeder_of(runs: list[RunCase], monkeypatch: pytest.MonkeyPatch) -> Feeder:
    """A feeder of exactly these runs, though the server is shared."""
    mine = {run.info.run: run.record for run in runs}
    monkeypatch.setattr(module, "active", lambda client: mine)
    return Feeder(runs[0].client, lease_s=0.0)


def test_the_queue_is_filled_to_the_mark_and_no_further(make_run: MakeRun) -> None:
    run = make_run(20)
    run.build()
    feeder = run.feeder()
    assert [feeder.tick() for _ in range(3)] == [6, 0, 0]
    assert run.pop() is not None
    assert feeder.tick() == 1
    assert units_in_queue(run) == [1, 2, 3, 4, 5, 6]


def test_units_of_a_lost_worker_go_in_front_of_a_queue_that_is_full(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(20)
    run.build()
    feeder = run.feeder()
    feeder.tick()
    lost = [run.pop() for _ in range(3)]
    for hint in lost:
        assert hint is not None
        run.claim(hint.u)
    assert feeder.tick() == 3
    # A window may also shrink to less than what waits, as the speed of the workers falls.
    monkeypatch.setattr(feed_policy, "MIN_HINTS", 1)
    run.age()
    assert feeder.tick() == 3
    assert units_in_queue(run) == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_the_mark_grows_with_the_workers_and_is_bounded(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(20)
    run.build()
    monkeypatch.setattr(feed_policy, "HINTS_PER_WORKER", 3)
    model = run.record.model.spec
    alive = [(BriefReport(name=f"w{n}", model=model), 0, 0.0) for n in range(4)]
    monkeypatch.setattr(module, "BRIEF_REPORTS", SimpleNamespace(with_age=lambda _: alive))
    assert run.feeder().tick() == 12
    monkeypatch.setattr(feed_policy, "MAX_HINTS", 13)
    alive.extend((BriefReport(name=f"w{n}", model=model), 0, 0.0) for n in range(4, 100))
    assert run.feeder().tick() == 1
    assert MAX_HINTS == 5_000


def test_what_a_feeder_pushed_and_workers_took_is_the_rate_that_the_window_holds(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_policy, "WINDOW_S", 2.0)
    run = make_run(120)
    run.build()
    clock = FakeClock()
    feeder = run.feeder(clock=clock)

    def ticked_after_all_were_taken() -> int:
        while run.pop() is not None:
            pass
        clock.advance(1.0)
        return feeder.tick()

    assert feeder.tick() == 6
    assert ticked_after_all_were_taken() == 2 * 6
    for hint in [run.pop() for _ in range(3)]:
        assert hint is not None
        run.ledger.hint_again(hint.u)
    assert ticked_after_all_were_taken() == 2 * 12, "the urgent ones are among them"
    assert ticked_after_all_were_taken() == 2 * 24


def test_runs_that_are_new_stand_before_those_that_wait_up_to_twice_the_mark(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = same_queue(make_run, 20, 20, 20, 20)
    known: dict[str, RunRecord] = {}
    monkeypatch.setattr(module, "active", lambda client: dict(known))
    feeder = Feeder(runs[0].client, lease_s=0.0)
    pushed = []
    for run in runs:
        known[run.info.run] = run.record
        pushed.append(feeder.tick())
    assert pushed == [6, 5, 1, 0]


def test_urgent_units_go_to_the_front(make_run: MakeRun) -> None:
    run = make_run(20)
    run.build()
    feeder = run.feeder()
    feeder.tick()
    for _ in range(2):
        assert run.pop() is not None
    run.claim(0, "w")
    run.claim(1, "w")
    run.die("w")
    assert feeder.tick() == 2
    assert sorted(units_in_queue(run)[:2]) == [0, 1]


def test_a_run_is_fed_only_when_its_writer_has_set_it_up(run: RunCase) -> None:
    register(run.client, run.record)
    feeder = run.feeder()
    assert feeder.tick() == 0
    run.build()
    assert feeder.tick() == 6


def test_a_rebuilt_queue_is_fed_under_its_new_generation(run: RunCase) -> None:
    run.build()
    feeder = run.feeder()
    feeder.tick()
    units_in_queue(run)
    run.build(gen="2-0")
    assert feeder.tick() == 6
    assert units_in_queue(run) == [0, 1, 2, 3, 4, 5]


def test_only_the_run_that_was_asked_for_is_fed(make_run: MakeRun) -> None:
    one, other = make_run(3), make_run(3)
    for run in (one, other):
        run.build()
    assert one.feeder().tick() == 3
    assert units_in_queue(other) == []


def test_runs_of_one_model_share_the_queue_evenly(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = same_queue(make_run, 20, 20)
    assert feeder_of(runs, monkeypatch).tick() == 6
    hinted = [run.client.zcard(run.key("hinted")) for run in runs]
    assert hinted == [3, 3]


def test_a_large_run_does_not_starve_a_later_one(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = same_queue(make_run, 40, 4)
    feeder = feeder_of([large], monkeypatch)
    feeder.tick()
    feeder = feeder_of([large, small], monkeypatch)
    popped: list[str] = []
    while sum(run == small.info.run for run in popped) < 4:
        hint = large.pop()
        assert hint is not None
        popped.append(hint.run)
        feeder.tick()
    assert len(popped) < 20


def test_finished_runs_take_no_share(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = same_queue(make_run, 20, 3, 3)
    for done in runs[1:]:
        done.build(done=b"\xe0")
    assert feeder_of(runs, monkeypatch).tick() == 6


def test_a_run_whose_manifest_cannot_be_read_holds_up_no_other(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost, cut, whole = same_queue(make_run, 3, 3, 20)
    shutil.rmtree(lost.layout.root)
    (cut.layout.manifest / "00000.parquet").write_bytes(b"PAR1")
    feeder = feeder_of([lost, cut, whole], monkeypatch)
    with caplog.at_level("ERROR"):
        for _ in range(2):
            feeder.tick()
    assert len([r for r in caplog.records if "run_not_fed" in r.getMessage()]) == 2, "each is complained of once"
    assert units_in_queue(whole) == [0, 1, 2, 3, 4, 5]


def test_a_manifest_that_comes_later_is_read_then(run: RunCase) -> None:
    run.build()
    segment = run.layout.manifest / "00000.parquet"
    data = segment.read_bytes()
    segment.unlink()
    feeder = run.feeder()
    assert feeder.tick() == 0
    segment.write_bytes(data)
    assert feeder.tick() == 6


# --- when leases may be taken away ---


def steady(run: RunCase, clock: FakeClock) -> Feeder:
    """A feeder that has heard the same server for a lease of 20 s, and is about to take what has run out."""
    feeder = Feeder(run.client, lease_s=20.0, only=run.info.run, clock=clock)
    ticks = 0
    # A machine that stood still for some seconds is an outage to it.
    while ticks < 110 or not feeder.outages.reap_at():
        clock.advance(0.2)
        feeder.tick()
        ticks += 1
    return feeder


def reaps(run: RunCase, feeder: Feeder, u: int = 0) -> bool:
    """True if the next tick takes away a lease that has run out."""
    assert run.pop() is not None
    token = run.claim(u)
    run.age()
    feeder.tick()
    return run.publish(u, token) is PublishVerdict.LOST


def test_a_lease_that_has_run_out_is_taken_away(run: RunCase, clock: FakeClock) -> None:
    run.build()
    # Where this machine stands still for two seconds in the wrong place, it is not: that is the next test.
    assert any(reaps(run, steady(run, clock), u) for u in range(3))


def test_after_a_pause_leases_are_left_alone_for_one_lease(run: RunCase, clock: FakeClock) -> None:
    run.build()
    feeder = steady(run, clock)
    clock.advance(6.0)
    assert not reaps(run, feeder)


def test_a_short_pause_ends_no_lease_and_so_delays_nothing(run: RunCase, clock: FakeClock) -> None:
    run.build()

    def after_a_pause(u: int) -> bool:
        feeder = steady(run, clock)
        clock.advance(3.0)
        return reaps(run, feeder, u)

    assert any(after_a_pause(u) for u in range(3))


@pytest.mark.parametrize("call", ["active", "now_ms", "BRIEF_REPORTS.with_age", "Ledger.meta", "Ledger.next_units"])
def test_after_an_answer_that_took_long_leases_are_left_alone(
    run: RunCase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    run.build()
    feeder = steady(run, clock)
    name, _, method = call.partition(".")
    holder = outages if name == "now_ms" else module
    owner, attribute = (getattr(holder, name), method) if method else (holder, name)
    real = getattr(owner, attribute)

    def slow(*arguments: object, **options: object) -> object:
        clock.advance(6.0)
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, slow)
        feeder.tick()
    assert not reaps(run, feeder)


def test_after_a_restart_of_the_server_leases_are_left_alone(
    run: RunCase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.build()
    feeder = steady(run, clock)
    server = outages.reach(run.client, "")
    monkeypatch.setattr(outages, "reach", lambda *_: replace(server, incarnation="another"))
    assert not reaps(run, feeder)


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_after_a_jump_of_the_servers_clock_leases_are_left_alone(
    run: RunCase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    run.build()
    feeder = steady(run, clock)
    real = outages.now_ms
    monkeypatch.setattr(outages, "now_ms", lambda client: real(client) + int(seconds * 1000))
    assert not reaps(run, feeder)


def test_popped_hints_of_dead_workers_are_swept(
    run: RunCase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.build()
    feeder = run.feeder(clock=clock)
    feeder.tick()
    run.client.lmove(run.queue.key, run.queue.intermediate_queue.key)
    now = hints.now_ms(run.client)
    monkeypatch.setattr(hints, "now_ms", lambda _: now + 1_000_000)
    clock.advance(61)
    feeder.tick()
    assert run.client.llen(run.queue.intermediate_queue.key) == 0


def test_two_feeders_waste_hints_and_harm_nothing(run: RunCase) -> None:
    writer = run.writer()
    for one in (run.feeder(), run.feeder()):
        one.tick()
    run.finish(writer)
    run.assert_exact()


def test_serving_ends_when_it_is_told_to(run: RunCase) -> None:
    run.build()
    answers = iter([False, False, True])
    serve(run.client, lease_s=20.0, only=run.info.run, stopped=lambda: next(answers))
    assert len(units_in_queue(run)) == 6
    assert run.client.exists(run_key(run.info.run, "meta"))


def test_a_run_that_the_broker_forgot_is_announced_again_until_it_is_done(run: RunCase) -> None:
    run.build()
    feeder = run.feeder()
    feeder.tick()
    run.client.delete(*run.ledger.keys)
    run.client.hdel(RUNS, run.info.run)
    feeder.tick()
    assert RunRecord.from_json(run.client.hget(RUNS, run.info.run)) == run.record
    run.build(done=b"\xff")
    feeder.tick()
    run.client.hdel(RUNS, run.info.run)
    feeder.tick()
    assert not run.client.hexists(RUNS, run.info.run)
