"""Models share the workers by weight, and device seconds are what is shared."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping

import pytest

from embq.core.queue.fair_queue import VirtualTimes

SLICE_S = 60.0


class Fleet:
    """Workers that take turns: each ends its slices later than it should, by what its last unit takes."""

    def __init__(self, workers: int, *, late_s: Mapping[str, float] | None = None) -> None:
        self.turns = VirtualTimes()
        self.late_s = late_s or {}
        self.spent: Counter[str] = Counter()
        self.served: list[str] = []
        self.changes = 0
        self._ends = [(float(worker), worker, "", 0.0, 0) for worker in range(workers)]

    def work(self, seconds: float, **weights: int) -> None:
        """All models in `weights` have work all the time."""
        until = self._ends[0][0] + seconds
        while self._ends[0][0] < until:
            at, worker, own, late_s, weight = heapq.heappop(self._ends)
            if own:
                self.turns = self.turns.correct(own, weight=weight, seconds=late_s)
            model = self.turns.next(weights, own=own, slice_s=SLICE_S)
            self.turns = self.turns.begin(model, weights, slice_s=SLICE_S)
            late_s = self.late_s.get(model, 0.1)
            self.spent[model] += SLICE_S + late_s
            self.served.append(model)
            self.changes += bool(own) and model != own
            heapq.heappush(self._ends, (at + SLICE_S + late_s, worker, model, late_s, weights[model]))


def test_nothing_is_next_where_nothing_has_work() -> None:
    assert VirtualTimes().next({}, slice_s=SLICE_S) == ""


def test_a_model_that_is_alone_is_served_for_ever() -> None:
    fleet = Fleet(3)
    fleet.work(100 * SLICE_S, a=10)
    assert fleet.changes == 0


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("weights", [(10, 10), (10, 30), (1, 100), (70, 30), (10, 20, 30)], ids=str)
def test_device_seconds_are_shared_by_weight(workers: int, weights: tuple[int, ...]) -> None:
    fleet = Fleet(workers, late_s={"m0": 25.0, "m1": 0.2})
    named = {f"m{number}": weight for number, weight in enumerate(weights)}
    fleet.work(1500 * SLICE_S, **named)
    total = sum(fleet.spent.values())
    for model, weight in named.items():
        assert fleet.spent[model] / total == pytest.approx(weight / sum(weights), rel=0.05)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_a_model_that_comes_later_is_next(workers: int) -> None:
    fleet = Fleet(workers)
    fleet.work(50 * SLICE_S, a=10, b=30)
    assert fleet.turns.next({"a": 10, "b": 30, "new": 1}, own=fleet.served[-1], slice_s=SLICE_S) == "new"


def test_a_model_that_had_no_work_does_not_save_up_for_later() -> None:
    fleet = Fleet(1)
    fleet.work(10 * SLICE_S, a=10, b=10)
    fleet.work(100 * SLICE_S, a=10)
    fleet.spent.clear()
    fleet.work(20 * SLICE_S, a=10, b=10)
    assert fleet.spent["a"] == pytest.approx(fleet.spent["b"], rel=0.11)


def test_two_workers_with_two_models_do_not_exchange_them() -> None:
    fleet = Fleet(2, late_s={"a": 0.3, "b": 0.7})
    fleet.work(40 * SLICE_S, a=10, b=10)
    assert fleet.changes <= 2


def test_workers_that_choose_at_the_same_time_choose_different_models() -> None:
    turns, chosen = VirtualTimes(), []
    for _ in range(4):
        chosen.append(turns.next({"a": 10, "b": 10}, slice_s=SLICE_S))
        turns = turns.begin(chosen[-1], {"a": 10, "b": 10}, slice_s=SLICE_S)
    assert sorted(chosen) == ["a", "a", "b", "b"]


def test_a_model_whose_loading_ends_its_worker_again_and_again_does_not_take_all_the_slices() -> None:
    """The cost booked for a slice stays booked where its worker is gone."""
    turns, chosen = VirtualTimes(), []
    for _ in range(20):
        chosen.append(turns.next({"broken": 10, "good": 10}, slice_s=SLICE_S))
        turns = turns.begin(chosen[-1], {"broken": 10, "good": 10}, slice_s=SLICE_S)
    assert chosen.count("good") == 10


def test_a_slice_that_was_given_back_was_never_booked() -> None:
    weights = {"a": 10, "b": 20}
    before = VirtualTimes().begin("a", weights, slice_s=SLICE_S)
    after = before.begin("b", weights, slice_s=SLICE_S).correct("b", weight=20, seconds=-SLICE_S)
    assert after.start("b") == before.start("b")


def test_models_that_are_behind_are_not_kept_in_mind() -> None:
    turns = VirtualTimes()
    for number in range(100):
        weights = {f"m{number}": 10, "always": 10}
        for model in weights:
            turns = turns.begin(model, weights, slice_s=SLICE_S)
    assert len(turns.times) <= 4


def test_turns_are_the_same_after_a_way_through_the_broker() -> None:
    turns = VirtualTimes().begin("a", {"a": 3}, slice_s=SLICE_S).correct("a", weight=3, seconds=0.1)
    assert VirtualTimes.from_json(turns.to_json("x")) == turns
    assert turns.to_json("x") != turns.to_json("y")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"now": "x", "times": {}}',
        '{"now": 1e999}',
        '{"now": NaN}',
        "[" * 9999,
        '{"now": 1, "times": [1]}',
    ],
)
def test_what_cannot_be_understood_begins_anew(text: str) -> None:
    assert VirtualTimes.from_json(text) == VirtualTimes()
