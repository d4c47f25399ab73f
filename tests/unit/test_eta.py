"""Prediction of the end of a run: from sizes to tokens, from batches to speeds, from both to seconds."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from embq.app.status.broker_snapshot import Reports
from embq.app.status.eta import NO_ETA, Eta, predict
from embq.core.run.unit_sizes import UnitSize, size_of
from embq.core.units import Retry, Unit
from embq.worker.meter.meter import WINDOW_S, RunSpeeds
from embq.writer.token_estimate import TokenEstimate

# --- tokens that are left ---


def unit_of(lengths: Iterable[int]) -> tuple[UnitSize, int]:
    """A slice of lines of JSON, and its tokens: about 5 bytes and 1 token a word, 40 bytes and 2 tokens more a text."""
    words = list(lengths)
    rng = random.Random(sum(words))
    size = sum(round(rng.gauss(5 * n, 2 * n**0.5)) + 40 for n in words)
    return UnitSize("jsonl", len(words), size), sum(n + 2 for n in words)


def workload(units: list[tuple[UnitSize, int]]) -> TokenEstimate:
    made = TokenEstimate()
    for extent, _ in units:
        made.remaining[extent.kind] = made.remaining.get(extent.kind, UnitSize(extent.kind, 0, 0)) + extent
    return made


def error_after(units: list[tuple[UnitSize, int]], share: float) -> float:
    """Relative error of the estimate of the tokens that are left, once the first units are done."""
    made, done = workload(units), round(len(units) * share)
    for extent, tokens in units[:done]:
        made.committed(extent, tokens)
    left = sum(tokens for _, tokens in units[done:])
    assert made.tokens_left is not None
    return abs(made.tokens_left - left) / sum(tokens for _, tokens in units)


def skewed(count: int) -> list[int]:
    rng = random.Random(0)
    return [max(1, round(rng.lognormvariate(3.5, 1.0))) for _ in range(count)]


@pytest.mark.parametrize("order", ["as they come", "shortest first", "longest first"])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_tokens_left_follow_from_bytes_also_where_texts_are_sorted(order: str, share: float) -> None:
    lengths = skewed(10_000)
    if order != "as they come":
        lengths.sort(reverse=order == "longest first")
    units = [unit_of(lengths[start : start + 100]) for start in range(0, 10_000, 100)]
    assert error_after(units, share) < 0.03


def test_a_file_of_long_texts_after_one_of_short_ones_is_seen_before_it_is_reached() -> None:
    rng = random.Random(0)
    units = [unit_of(rng.randint(5, 15) for _ in range(100)) for _ in range(100)]
    units += [unit_of(rng.randint(150, 250) for _ in range(100)) for _ in range(100)]
    assert error_after(units, 0.05) < 0.1
    assert error_after(units, 0.51) < 0.01


@pytest.mark.parametrize("seed", range(3))
def test_a_file_of_short_texts_after_one_of_long_ones_is_not_taken_for_nothing_nor_for_a_multiple(seed: int) -> None:
    # Half of the tokens each. What a text costs beside its bytes cannot be known from long ones.
    rng = random.Random(seed)
    units = [unit_of(rng.randint(150, 250) for _ in range(20)) for _ in range(36)]
    units += [unit_of(rng.randint(5, 15) for _ in range(20)) for _ in range(600)]
    for done in (7, 14, 28):
        assert error_after(units, done / len(units)) < 0.35
    assert error_after(units, 80 / len(units)) < 0.05


def test_shards_of_as_many_images_cost_the_same_whatever_their_bytes() -> None:
    rng = random.Random(0)
    units = [(UnitSize("tar", 1, 1_000_000 + 20_000 * i), 1000 + rng.randint(-20, 20)) for i in range(100)]
    assert error_after(units, 0.2) < 0.03


def test_without_bytes_samples_tell_and_without_samples_units_do() -> None:
    units = [(UnitSize("parquet", 1000, 0), 5000)] * 4 + [(UnitSize("parquet", 100, 0), 500)]
    assert error_after(units, 0.2) == 0
    assert error_after([(UnitSize("tar", 1, 0), 5000)] * 10, 0.2) == 0


def test_a_kind_of_which_nothing_is_done_costs_as_much_for_each_sample_as_the_others() -> None:
    made = workload([(UnitSize("csv", 10, 800), 100), (UnitSize("files", 30, 0), 30)])
    made.committed(UnitSize("csv", 10, 800), 100)
    assert made.tokens_left == 300


def test_nothing_is_known_before_the_first_unit_that_tells_its_tokens() -> None:
    made = workload([(UnitSize("csv", 10, 800), 0)] * 3)
    made.committed(UnitSize("csv", 10, 800), 0)
    assert made.tokens_left is None
    made.committed(UnitSize("csv", 10, 800), 70)
    assert made.tokens_left == 70


def test_a_retry_of_some_samples_has_their_share_of_the_unit() -> None:
    retry = Retry(unit=0, failed=0, record=2, attempts=1, replaces=2, only="0-1", samples=10)
    unit = Unit(kind="csv", source="/a", start=100, stop=1100, samples=10, retry=retry)
    assert size_of(unit) == UnitSize("csv", 2, 200)


# --- the speed of a device ---


def run_for(speed: RunSpeeds, seconds: float, *, batch_s: float, tokens: int, began: float = 0.0) -> float:
    """Batches one after the other; gives when the last one ended."""
    now = began
    while now + batch_s <= began + seconds:
        speed.batch(now, now + batch_s, {"a": tokens})
        now += batch_s
    return now


@pytest.mark.parametrize("batch_s", [0.01, 0.3, 3.0, 8.0, 40.0])
def test_a_device_is_as_fast_right_after_a_batch_as_right_before_the_next(batch_s: float) -> None:
    speed = RunSpeeds()
    ended = run_for(speed, max(60.0, 5 * batch_s), batch_s=batch_s, tokens=round(1000 * batch_s))
    for later in np.linspace(0.0, batch_s, 20):
        assert speed.per_s(ended + later)["a"] == pytest.approx(1000, rel=0.02)


def test_a_device_has_a_speed_after_its_first_batch_and_none_before() -> None:
    speed = RunSpeeds()
    assert speed.per_s(100.0) == {}
    speed.batch(100.0, 104.0, {"a": 400})
    assert speed.per_s(105.0) == {"a": pytest.approx(100.0)}


def test_a_device_that_becomes_slower_is_believed_within_a_window() -> None:
    speed = RunSpeeds()
    ended = run_for(speed, 60.0, batch_s=0.5, tokens=500)
    ended = run_for(speed, WINDOW_S + 2.5, batch_s=2.5, tokens=500, began=ended)
    assert speed.per_s(ended)["a"] == pytest.approx(200, rel=0.05)


def test_a_batch_that_comes_to_no_end_makes_a_device_slower_and_slower() -> None:
    speed = RunSpeeds()
    ended = run_for(speed, 60.0, batch_s=1.0, tokens=100)
    later = [speed.per_s(ended + wait)["a"] for wait in (0.5, 10.0, 100.0, 1000.0)]
    assert later == sorted(later, reverse=True)
    assert later[0] == pytest.approx(100, rel=0.01)
    assert later[-1] < 3


def test_the_batch_in_hand_is_done_as_far_as_the_device_is_fast_but_no_further_than_the_largest() -> None:
    speed = RunSpeeds()
    assert speed.in_hand(1.0) == {}
    ended = run_for(speed, 60.0, batch_s=3.0, tokens=300)
    assert [round(speed.in_hand(ended + wait)["a"]) for wait in (0.0, 1.0, 3.0)] == [0, 100, 300]
    assert speed.in_hand(ended + 30.0)["a"] == pytest.approx(300)


def test_each_run_has_its_share_of_a_device() -> None:
    speed = RunSpeeds()
    for second in range(30):
        speed.batch(second, second + 1, {"a": 75, "b": 25} if second % 2 else {"a": 100})
    assert speed.per_s(30.0) == {"a": pytest.approx(87.5, rel=0.03), "b": pytest.approx(12.5, rel=0.2)}


def test_what_was_measured_before_a_rest_is_forgotten() -> None:
    speed = RunSpeeds()
    run_for(speed, 10.0, batch_s=1.0, tokens=100)
    speed.rest()
    assert speed.per_s(500.0) == {}
    speed.batch(500.0, 501.0, {"a": 300})
    assert speed.per_s(501.0) == {"a": 300}


# --- the end ---


def share(tokens_per_s: float, *, units: int = 1) -> dict[str, Any]:
    return {"tokens_per_s": tokens_per_s, "units": units, "size": 100 * units, "begun": [], "in_batch": 0}


def end(shares: list[dict[str, Any]], **changes: Any) -> Eta:
    known: dict[str, Any] = {"tokens_left": 10_000, "begun": 0, "samples_left": 50, "exact": True, "samples_per_s": 2.0}
    return predict(shares, **{**known, "queued": 5, "worked_s": 100.0, **changes})


def test_the_end_is_what_is_left_over_what_all_devices_do() -> None:
    assert end([share(60), share(40)]) == Eta(seconds=100.0, basis="tokens", per_s=100.0)
    assert end([share(60), share(40)], begun=5_000).seconds == 50.0
    assert end([share(60), share(40)], begun=50_000).seconds == 0.0, "what is done twice is done"


def test_samples_and_then_units_stand_in_for_tokens() -> None:
    assert end([share(0)], tokens_left=None) == Eta(seconds=25.0, basis="samples", per_s=2.0)
    assert end([], tokens_left=None, exact=False).basis == "units"
    assert end([], samples_per_s=0.0) == NO_ETA


@pytest.mark.parametrize(("worked_s", "told"), [(0.0, False), (9.0, False), (12.0, True), (25.0, True)])
def test_nothing_is_predicted_before_it_can_be_believed(worked_s: float, told: bool) -> None:
    found = end([share(100)], worked_s=worked_s)
    assert (found.seconds is not None) is told
    assert (found.basis, found.per_s) == ("tokens", 100.0), "what it will be based on is told"


def test_who_holds_nothing_adds_nothing_once_nothing_waits() -> None:
    assert end([share(60), share(40, units=0)]).per_s == 100.0
    assert end([share(60), share(40, units=0)], queued=0).per_s == 60.0


def test_at_the_end_of_a_run_the_slowest_device_with_work_decides() -> None:
    shares = [share(1000, units=4), {**share(10, units=1), "begun": [[7, "token", 850]], "in_batch": 50}]
    assert end(shares, tokens_left=5_000, begun=900).seconds == pytest.approx(4.1, abs=0.1)
    assert end(shares, tokens_left=5_000, begun=900, queued=0).seconds == 10.0, "100 tokens of its unit"


def test_workers_that_have_fallen_silent_and_other_runs_do_not_count() -> None:
    said: list[dict[str, Any]] = [
        {"silent_s": 0.5, "runs": {"r": share(1), "other": share(9)}},
        {"silent_s": 60.0, "runs": {"r": share(2)}},
        {"silent_s": 0.5, "runs": {}},
        {"silent_s": 0.5},
    ]
    assert Reports(said).shares("r") == [share(1)]
