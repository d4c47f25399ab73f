"""The speed that a worker measures of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from embq.core.rows.spec import RowSpec
from embq.core.units import Sample, Unit
from embq.worker.claim.lease import LeasedUnit
from embq.worker.meter.meter import MEMORY_S, UNITS_REMEMBERED, Throughput
from tests.support.fakes.clock import FakeClock


def unit(samples: int | None, *, size: int = 0, kind: str = "lines") -> Unit:
    return Unit(kind=kind, source="s", samples=samples, stop=size)


def work_of(samples: int | None, *, done: int = 0, tokens: int = 0, size: int = 0, kind: str = "lines") -> LeasedUnit:
    hint = SimpleNamespace(u=0, run="r", gen="1-0", unit=unit(samples, size=size, kind=kind))
    record = SimpleNamespace(rows=RowSpec())
    work = LeasedUnit(cast("Any", hint), cast("Any", record), cast("Any", None), "t", attempts=0, poison=frozenset())
    work.add_rows([Sample(ordinal=i, key=str(i), text="t") for i in range(done)], {})
    work.tokens = tokens
    return work


@pytest.fixture
def throughput(clock: FakeClock) -> Throughput:
    return Throughput(clock)


def batches(throughput: Throughput, clock: FakeClock, count: int, *, rows: int, seconds: float) -> None:
    began = clock()
    for _ in range(count):
        clock.advance(seconds)
        throughput.batch_done(rows, 10 * rows, since=began)


def test_nothing_is_known_before_the_first_batch(throughput: Throughput) -> None:
    throughput.unit_claimed(unit(10))
    assert throughput.tokens_per_s is None
    assert (throughput.rows_per_s, throughput.unit_s, throughput.ahead_s([work_of(10)])) == (None, None, None)
    assert throughput.ahead_s([]) == 0.0


def test_work_in_hand_is_what_has_no_outcome_yet_less_what_the_batch_in_hand_has_done(
    throughput: Throughput, clock: FakeClock
) -> None:
    batches(throughput, clock, 3, rows=10, seconds=1.0)
    held = [work_of(20, done=10), work_of(40)]
    assert throughput.ahead_s(held) == pytest.approx(5.0)
    clock.advance(0.5)
    assert throughput.ahead_s(held) == pytest.approx(4.5)
    clock.advance(60)
    assert throughput.ahead_s(held) == pytest.approx(4.0), "no more of it than a batch can be done"


def test_waiting_for_units_makes_no_device_slow_but_waiting_for_the_reader_does(
    throughput: Throughput, clock: FakeClock
) -> None:
    batches(throughput, clock, 5, rows=10, seconds=1.0)
    clock.advance(3600)
    claimed_at = clock()
    clock.advance(1.0)
    throughput.batch_done(10, 100, since=claimed_at)
    assert throughput.rows_per_s == pytest.approx(10.0)
    batches(throughput, clock, 50, rows=10, seconds=2.0)
    assert throughput.rows_per_s == pytest.approx(5.0, rel=0.01)


def test_a_unit_has_the_samples_that_units_have_where_only_reading_it_tells(
    throughput: Throughput, clock: FakeClock
) -> None:
    batches(throughput, clock, 3, rows=10, seconds=1.0)
    unknown = work_of(None)
    assert (throughput.unit_s, throughput.ahead_s([unknown])) == (None, None)
    throughput.unit_claimed(unit(None))
    assert throughput.unit_s is None
    throughput.unit_read(30)
    assert throughput.unit_s == pytest.approx(3.0)
    assert throughput.ahead_s([unknown]) == pytest.approx(3.0)
    unknown.end_of_read(50)
    assert throughput.ahead_s([unknown]) == pytest.approx(5.0)


def test_the_speed_of_late_counts_most_in_rows_and_in_tokens(throughput: Throughput, clock: FakeClock) -> None:
    batches(throughput, clock, 1, rows=10, seconds=10.0)
    assert (throughput.rows_per_s, throughput.tokens_per_s) == (1.0, 10.0)
    batches(throughput, clock, 60, rows=10, seconds=1.0)
    assert throughput.rows_per_s == pytest.approx(10.0, rel=0.1)
    assert throughput.tokens_per_s == pytest.approx(100.0, rel=0.1)


def test_once_units_of_its_kind_are_done_a_unit_takes_as_long_as_its_bytes_say(
    throughput: Throughput, clock: FakeClock
) -> None:
    batches(throughput, clock, 3, rows=10, seconds=1.0)
    long = work_of(20, size=8000)
    assert throughput.ahead_s([long]) == pytest.approx(2.0), "of its kind nothing is done, and its samples tell"
    throughput.unit_done(work_of(20, done=20, tokens=200, size=800))
    assert throughput.ahead_s([long]) == throughput.seconds_of(long.unit) == pytest.approx(20.0)
    assert throughput.ahead_s([work_of(20, done=5, size=8000)]) == pytest.approx(15.0)
    assert throughput.ahead_s([work_of(None, size=8000)]) == pytest.approx(20.0), "before it is read"
    assert throughput.ahead_s([work_of(None, tokens=1500, size=8000)]) == pytest.approx(5.0), "while it is read"
    assert throughput.ahead_s([work_of(20, size=8000, kind="tar")]) == pytest.approx(2.0), "of another kind"
    assert throughput.ahead_s([work_of(20)]) == pytest.approx(2.0), "of a kind that has no bytes"


def test_units_to_come_are_like_those_of_late(throughput: Throughput, clock: FakeClock) -> None:
    batches(throughput, clock, 3, rows=10, seconds=1.0)
    throughput.unit_done(work_of(20, done=20, tokens=200, size=800))
    for count, size in ((50, 800), (UNITS_REMEMBERED, 8000)):
        for _ in range(count):
            throughput.unit_claimed(unit(20, size=size))
        assert throughput.unit_s == pytest.approx(size / 400)


def test_what_a_byte_costs_is_learned_from_late_units(throughput: Throughput, clock: FakeClock) -> None:
    batches(throughput, clock, 3, rows=10, seconds=1.0)
    for tokens in (200, 1000):
        for _ in range(3 * int(MEMORY_S)):
            throughput.unit_done(work_of(20, done=20, tokens=tokens, size=1000))
        assert throughput.seconds_of(unit(20, size=1000)) == pytest.approx(tokens / 100, rel=0.1)


def test_samples_without_tokens_and_units_without_rows_do_no_harm(throughput: Throughput, clock: FakeClock) -> None:
    began = clock()
    clock.advance(1.0)
    throughput.batch_done(10, 0, since=began)
    throughput.unit_done(work_of(10, done=10, size=1000))
    assert throughput.ahead_s([work_of(20, size=1000), work_of(0, size=1000)]) == pytest.approx(2.0)


def test_the_device_is_expected_to_finish_its_units_one_after_the_other(
    throughput: Throughput, clock: FakeClock
) -> None:
    first, second = work_of(20, done=10), work_of(40)
    first.token, second.token = "first", "second"
    first.claimed_at = clock()
    assert throughput.outlook([first]) == {}, "before the first batch"
    throughput.unit_claimed(unit(20))
    batches(throughput, clock, 3, rows=10, seconds=1.0)
    assert throughput.outlook([]) == {}
    for late_s in (0.0, 0.5, 7.0):
        clock.advance(late_s)
        since_s = {0.0: 0.0, 0.5: 0.5, 7.0: 7.5}[late_s]
        assert throughput.outlook([first, second]) == {
            "first": (pytest.approx(1.0 - since_s), pytest.approx(1.0)),
            "second": (pytest.approx(5.0 - since_s), pytest.approx(2.0)),
        }
    first.claimed_at = clock() - 2.0
    assert throughput.outlook([first])["first"][0] == pytest.approx(-1.0), "it had nothing to do before"


def test_a_unit_that_waits_for_nothing_but_to_be_published_is_not_late(
    throughput: Throughput, clock: FakeClock
) -> None:
    done = work_of(10, done=10)
    done.claimed_at = clock()
    throughput.unit_claimed(unit(10))
    batches(throughput, clock, 3, rows=10, seconds=1.0)
    clock.advance(600.0)
    assert throughput.outlook([done]) == {"t": (0.0, pytest.approx(1.0))}
    new = work_of(10)
    new.token, new.claimed_at = "new", clock()
    assert throughput.outlook([done, new])["new"][0] == pytest.approx(1.0), "the device waited for it"
