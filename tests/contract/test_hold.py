"""Units that a worker claims: seconds of work, and at the end of a run what it finishes before the others do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis

from embq.core.queue.heartbeats import WORKER_REPORTS, BriefReport
from embq.core.queue.hints import Hint
from embq.core.queue.keys import WORKERS, speeds_key
from embq.core.queue.scripts import load_scripts
from embq.core.queue.worker_speeds import SILENT_S, WorkerSpeed, keep_sum, other_speeds
from embq.core.units import Sample, Unit
from embq.producer.feeder import Feeder
from embq.worker.claim.claim_policy import (
    AHEAD_S,
    FETCH_AHEAD_S,
    MOST_AHEAD,
    PATIENCE_S,
    PULL,
    REST_LEAST_S,
    REST_MOST_S,
    RESTS,
    SORTED_AHEAD_S,
    UNITS_AHEAD,
    ClaimPolicy,
    makespan,
)
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.embedders.base import Embedder
from embq.worker.meter.meter import Throughput
from tests.support.fakes.clock import FakeClock
from tests.support.outputs.run_case import RunCase, make_case, unit_of

SAMPLES = 3
"""Samples of a unit."""


class Holder:
    """A worker that claims what its `ClaimPolicy` says, on a device of a stated speed and with a fake clock."""

    def __init__(self, client: redis.Redis, run: RunCase, clock: FakeClock, *, window: int = 1) -> None:
        self.run, self.clock = run, clock
        self.leases, self.throughput = Leases(), Throughput(clock)
        self.hold = ClaimPolicy(
            client,
            self.leases,
            self.throughput,
            run.record.model,
            name="me",
            runs=lambda: [run.info.run],
            prefetch=2,
            embedder=cast("Embedder", SimpleNamespace(batch_size=1, window=window)),
            clock=clock,
        )

    def known_as(self, *, unit_s: float) -> None:
        """The device has been measured."""
        self.throughput.unit_claimed(unit_of(0, SAMPLES))
        began = self.clock()
        self.clock.advance(unit_s)
        self.throughput.batch_done(SAMPLES, SAMPLES, since=began)

    def reads(self) -> None:
        """Every unit in hand is begun, so none waits for the reader."""
        for unit in self.leases.snapshot():
            unit.stage = "read"

    def claim(self, units: int, *, from_far: bool = False, size: int = 0) -> None:
        for u in range(units):
            unit = replace(unit_of(u, SAMPLES), size=size)
            work = self._work(unit, f"1-0:me:{len(self.leases.snapshot())}")
            self.leases.add(work)
            self.hold.claimed(unit, from_far=from_far)

    def has_done(self, unit: Unit) -> None:
        """A unit like those of late is through, at 1 token a sample."""
        self.throughput.unit_claimed(unit)
        work = self._work(unit, "1-0:me:done")
        work.add_rows([Sample(ordinal=i, key=str(i), text="t") for i in range(SAMPLES)], {})
        work.tokens = SAMPLES
        self.throughput.unit_done(work)

    def _work(self, unit: Unit, token: str) -> LeasedUnit:
        hint = Hint(run=self.run.info.run, gen="1-0", u=0, unit=unit)
        return LeasedUnit(hint, self.run.record, cast("Any", None), token, attempts=0, poison=frozenset())

    def claim_all_it_may(self, *, size: int = 0) -> int:
        """Claims until it holds enough; gives how many units it holds then."""
        while units := self.hold.room():
            self.claim(units, size=size)
        return len(self.leases.snapshot())


MakeHolder = Callable[..., Holder]


@pytest.fixture
def make_holder(own_client: redis.Redis, tmp_path: Path, clock: FakeClock) -> MakeHolder:
    def make(units: int = 1000, **options: Any) -> Holder:
        run = make_case(own_client, tmp_path / "out", units)
        run.build()
        return Holder(own_client, run, clock, **options)

    return make


def other(client: redis.Redis, run: RunCase, *, unit_s: float, ahead_s: float = 0.0, name: str = "other") -> None:
    """Another worker of the same model has reported, and the producer has seen it."""
    said = {"name": name, "model": run.record.model.spec, "unit_s": unit_s, "ahead_s": ahead_s}
    WORKER_REPORTS.report(client, said, life_s=60, scripts=load_scripts(client))
    Feeder(client, lease_s=30.0).tick()


def test_until_its_speed_is_known_a_worker_holds_one_unit(make_holder: MakeHolder) -> None:
    holder = make_holder()
    assert holder.claim_all_it_may() == 1
    assert holder.hold.describe() == {}


@pytest.mark.parametrize(
    ("unit_s", "held"),
    [
        (10 * AHEAD_S, 1),
        (AHEAD_S / 4, 4),
        (AHEAD_S / 40, 40),
        (AHEAD_S / 1e6, UNITS_AHEAD),
    ],
)
def test_a_slow_device_holds_seconds_of_work_and_a_fast_one_as_many_units_as_that_takes(
    make_holder: MakeHolder, unit_s: float, held: int
) -> None:
    holder = make_holder()
    holder.known_as(unit_s=unit_s)
    holder.clock.advance(unit_s)  # whatever is left of the batch in hand
    first = holder.hold.room()
    assert 1 <= first <= PULL
    assert held <= holder.claim_all_it_may() <= held + 2


@pytest.mark.parametrize(
    ("unit_s", "rest_s"),
    [
        (AHEAD_S * 100, REST_MOST_S),
        (AHEAD_S / 2 / UNITS_AHEAD, AHEAD_S / 2 / RESTS),
        (AHEAD_S / 1e6, REST_LEAST_S),
    ],
)
def test_a_worker_with_enough_in_hand_asks_again_after_a_share_of_it(
    make_holder: MakeHolder, unit_s: float, rest_s: float
) -> None:
    holder = make_holder()
    holder.known_as(unit_s=unit_s)
    holder.clock.advance(unit_s)
    holder.claim_all_it_may()
    assert holder.hold.rest_s == pytest.approx(rest_s, rel=0.05)


def test_a_worker_to_which_little_is_left_asks_again_soon_however_much_it_held_before(make_holder: MakeHolder) -> None:
    holder = make_holder()
    holder.known_as(unit_s=AHEAD_S * 100)
    holder.claim_all_it_may()
    for work in holder.leases.snapshot():
        holder.leases.remove(work)
    holder.hold.room()
    assert holder.hold.rest_s == REST_LEAST_S


def test_a_worker_that_held_short_units_holds_no_more_seconds_of_long_ones(make_holder: MakeHolder) -> None:
    holder = make_holder()
    holder.known_as(unit_s=AHEAD_S / 40)
    short, long = (replace(unit_of(0, SAMPLES), size=size) for size in (1000, 24_000))
    holder.has_done(short)
    assert holder.throughput.seconds_of(long) == pytest.approx(0.6 * AHEAD_S)
    assert 30 <= holder.hold.room() <= PULL, "it takes those that come for short ones"
    assert holder.hold.fits([long] * PULL) == 2
    assert holder.hold.fits([short] * 10 + [long] * (PULL - 10)) == 12
    assert holder.hold.fits([short] * PULL) == PULL
    assert holder.hold.fits([replace(long, size=100 * long.size)]) == 1
    holder.claim(holder.hold.fits([long] * holder.hold.room()), size=long.size)
    assert holder.claim_all_it_may(size=long.size) == 2


def test_a_device_for_which_samples_are_sorted_holds_a_window_of_them(make_holder: MakeHolder) -> None:
    holder = make_holder(window=2)
    holder.known_as(unit_s=1.0)
    holder.clock.advance(1.0)
    assert SORTED_AHEAD_S <= holder.claim_all_it_may() <= SORTED_AHEAD_S + 2


def test_however_fast_the_device_the_number_of_units_held_is_bounded(make_holder: MakeHolder) -> None:
    holder = make_holder(5000, window=10 * SAMPLES * MOST_AHEAD)
    holder.known_as(unit_s=1e-6)
    assert holder.claim_all_it_may() == MOST_AHEAD


def test_files_from_far_are_fetched_before_their_turn_but_not_minutes_before(make_holder: MakeHolder) -> None:
    holder = make_holder()
    holder.claim(1, from_far=True)
    holder.reads()
    assert holder.hold.room() == 1, "although nothing tells yet how fast the device is"
    for unit in holder.leases.snapshot():
        holder.leases.remove(unit)
    holder.claim(2, from_far=True)
    assert holder.hold.room() == 0
    for unit in holder.leases.snapshot()[1:]:
        holder.leases.remove(unit)
    holder.reads()
    holder.known_as(unit_s=FETCH_AHEAD_S / 2)
    holder.clock.advance(FETCH_AHEAD_S)
    assert [holder.hold.room(), holder.claim(2, from_far=True), holder.hold.room()] == [1, None, 0]


def test_the_last_units_are_left_to_a_worker_that_has_them_done_earlier(
    make_holder: MakeHolder, own_client: redis.Redis
) -> None:
    holder = make_holder(units=8)
    holder.known_as(unit_s=10.0)
    other(own_client, holder.run, unit_s=1.0, ahead_s=1.0)
    assert holder.hold.room() == 0, "the other has all eight done after nine seconds"
    other(own_client, holder.run, unit_s=2.0, ahead_s=1.0)
    holder.clock.advance(1.0)
    assert holder.hold.room() == 1, "the other would need seventeen"


def test_near_the_end_no_worker_holds_more_than_half_of_what_is_left_to_do(
    make_holder: MakeHolder, own_client: redis.Redis
) -> None:
    holder = make_holder(units=40)
    holder.known_as(unit_s=0.1)
    other(own_client, holder.run, unit_s=0.1)
    # Twenty units each, two seconds: half of that.
    assert 8 <= holder.claim_all_it_may() <= 12


@pytest.mark.parametrize("how", ["falls silent", "does not take them"])
def test_units_that_were_left_to_another_are_taken_where_that_one(
    make_holder: MakeHolder, own_client: redis.Redis, how: str
) -> None:
    holder = make_holder(units=8)
    holder.known_as(unit_s=10.0)
    other(own_client, holder.run, unit_s=1.0)
    assert holder.hold.room() == 0
    if how == "falls silent":
        own_client.zincrby(WORKERS, -1000 * (SILENT_S + 1), "other")
        Feeder(own_client, lease_s=30.0).tick()
        holder.clock.advance(1.0)
    else:
        for _ in range(10):
            other(own_client, holder.run, unit_s=1.0)
            holder.clock.advance(1.0)
            assert holder.hold.room() == 0
        holder.clock.advance(PATIENCE_S)
    assert holder.hold.room() == 1


def test_with_nothing_left_only_who_would_be_first_waits_for_what_comes_back(
    make_holder: MakeHolder, own_client: redis.Redis
) -> None:
    holder = make_holder(units=0)
    holder.known_as(unit_s=1.0)
    other(own_client, holder.run, unit_s=1.0, name="equal")
    assert holder.hold.room() == 1
    assert not holder.hold.unclaimed
    other(own_client, holder.run, unit_s=0.1)
    holder.clock.advance(1.0)
    assert [holder.hold.room() for _ in range(3)] == [0, 0, 0]


def test_only_workers_of_the_same_model_that_take_units_count(make_holder: MakeHolder, own_client: redis.Redis) -> None:
    holder = make_holder(units=8)
    holder.known_as(unit_s=10.0)
    scripts = load_scripts(own_client)
    for name, said in (
        ("another-model", {"model": "stub:9", "unit_s": 0.1, "ahead_s": 0.0}),
        ("about-to-leave", {"model": holder.run.record.model.spec}),
        ("me", {"model": holder.run.record.model.spec, "unit_s": 0.1, "ahead_s": 0.0}),
    ):
        WORKER_REPORTS.report(own_client, {"name": name, **said}, life_s=60, scripts=scripts)
    Feeder(own_client, lease_s=30.0).tick()
    assert holder.hold.room() >= 1


def test_a_look_at_a_thousand_workers_is_one_small_answer(make_holder: MakeHolder, own_client: redis.Redis) -> None:
    key = speeds_key(make_holder().run.record.model.queue_key)
    workers = [WorkerSpeed(ahead_s=n % 7 / 3, unit_s=10.0 if n % 10 else 1.0, mark=n + 1) for n in range(1_000)]
    reports = [BriefReport(name=f"w{n}", ahead_s=one.ahead_s, unit_s=one.unit_s) for n, one in enumerate(workers)]
    keep_sum(own_client, key.rpartition(":")[2], [(report, 0.0) for report in reports], at_ms=5_000)
    text = own_client.get(key)
    assert len(text) <= 2_000
    found = other_speeds(text, 5_000, "w7")
    assert sum(one.workers for one in found) == 1_000
    for left in (10, 500, 5_000, 100_000):
        assert makespan(left, found) == pytest.approx(makespan(left, workers), rel=0.05, abs=1.0)
    few = reports[:40]
    keep_sum(own_client, key.rpartition(":")[2], [(report, 0.5) for report in few], at_ms=5_000)
    assert [one.workers for one in other_speeds(own_client.get(key), 6_000, "w7")] == [1] * 39
    assert other_speeds(own_client.get(key), 9_000, "w7") == [], "it is too old"
    own_client.set(key, b"{}")
    assert other_speeds(own_client.get(key), 5_000, "w7") == []
