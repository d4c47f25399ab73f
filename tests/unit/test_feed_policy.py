"""Runs share a queue by weight, and work is what is shared."""

from __future__ import annotations

from collections import Counter

import pytest

from embq.producer.feed_policy import (
    DECAY,
    HINTS_PER_WORKER,
    MAX_HINTS,
    MIN_HINTS,
    SHORTEST_S,
    WINDOW_S,
    Claimant,
    Shares,
)
from embq.producer.feeder import Window


class Line:
    """A queue that workers take from, fed by `Shares`: run -> (weight, samples of a unit)."""

    def __init__(self, **runs: tuple[int, float]) -> None:
        self.shares = Shares()
        self.runs = runs
        self.waiting: list[str] = []

    def feed(self, size: int, *active: str, ahead: int = 0, only_given: int | None = None) -> list[str]:
        """Fill the line up to `size`; gives the hints that came to stand before the others."""
        self.shares.observe(len(self.waiting))
        claimants = [
            Claimant(run=run, weight=self.runs[run][0], cost=self.runs[run][1], unhinted=1_000_000) for run in active
        ]
        turns = self.shares.turns(claimants, room=size - len(self.waiting), ahead=ahead)[:only_given]
        front = self.shares.give([(run, self.runs[run][1] / self.runs[run][0]) for run in turns])
        self.waiting = turns[:front] + self.waiting + turns[front:]
        return turns[:front]

    def take(self, count: int) -> list[str]:
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def work(self, rounds: int, *active: str) -> Counter[str]:
        """Samples that each run got done."""
        done: Counter[str] = Counter()
        for _ in range(rounds):
            self.feed(20, *active)
            for run in self.take(7):
                done[run] += int(self.runs[run][1])
        return done


def test_runs_of_equal_weight_take_turns() -> None:
    line = Line(a=(10, 5), b=(10, 5))
    line.feed(6, "a", "b")
    assert line.waiting == ["a", "b", "a", "b", "a", "b"]


@pytest.mark.parametrize(("weight", "samples"), [(30, 5), (10, 5), (10, 500), (90, 50), (1, 5)])
def test_work_is_shared_by_weight_whatever_the_units_are(weight: int, samples: int) -> None:
    done = Line(a=(weight, samples), b=(10, 5)).work(3000, "a", "b")
    assert done["a"] / done["b"] == pytest.approx(weight / 10, rel=0.1)


def test_a_run_that_comes_later_stands_before_what_waits_with_its_share_and_no_more() -> None:
    line = Line(large=(10, 5), small=(10, 5))
    line.feed(100, "large")
    line.take(20)
    assert line.feed(100, "large", "small", ahead=100) == ["small"] * 80
    assert line.feed(100, "large", "small", ahead=100) == []
    line.take(80)
    line.feed(100, "large", "small", ahead=100)
    assert Counter(line.waiting) == {"large": 90, "small": 10}


def test_a_run_of_little_weight_that_comes_later_gets_little_of_it() -> None:
    line = Line(large=(100, 5), small=(1, 5))
    line.feed(500, "large")
    line.take(10)
    assert len(line.feed(500, "large", "small", ahead=500)) == 5


def test_a_run_that_had_nothing_to_do_does_not_save_up_for_later() -> None:
    line = Line(a=(10, 5), b=(10, 5))
    line.work(1000, "a")
    line.take(len(line.waiting))
    assert line.work(1000, "a", "b")["b"] == pytest.approx(7 * 1000 * 5 / 2, rel=0.05)


def test_what_a_run_was_not_given_is_not_charged() -> None:
    line = Line(a=(10, 5), b=(10, 5))
    line.feed(10, "a", "b", only_given=1)
    line.feed(5, "a", "b")
    assert Counter(line.waiting) == {"a": 3, "b": 2}


def test_the_window_holds_a_few_seconds_of_what_is_taken() -> None:
    window, now, waiting = Window(), 0.0, 0
    sizes = []
    for _ in range(60):
        size = window.size(waiting, workers=2, now=now)
        sizes.append(size)
        window.pushed(max(0, size - waiting))
        waiting = max(0, max(waiting, size) - 20)  # 100 each second
        now += 0.2
    assert sizes[0] == MIN_HINTS
    assert sizes[-1] == pytest.approx(100 * WINDOW_S, rel=0.01)
    assert min(sizes[4:]) >= 20, "the workers never wait for a tick"


def test_the_window_shrinks_when_the_units_get_slower_and_is_bounded() -> None:
    window = Window()
    window.size(0, workers=2, now=0.0)
    window.pushed(100_000)
    assert window.size(0, workers=2, now=0.2) == MAX_HINTS
    steps = 0
    while window.size(0, workers=2, now=0.2) > MIN_HINTS and steps < 250:
        steps += 1
    assert steps < 250
    assert 0 < DECAY < 1


@pytest.mark.parametrize(("pushed", "waiting", "taken"), [(97, 100, 0), (97, 60, 40), (97, 0, 100), (37, 50, 0)])
def test_what_was_taken_is_what_waited_and_was_pushed_less_what_waits(pushed: int, waiting: int, taken: int) -> None:
    window = Window()
    window.size(3, workers=0, now=0.0)
    window.pushed(pushed - 7)
    window.pushed(7)
    assert window.size(waiting, workers=0, now=2.0) == max(MIN_HINTS, int(taken / 2.0 * WINDOW_S))


def test_hints_that_are_pushed_before_the_first_look_count() -> None:
    window = Window()
    window.pushed(30)
    assert window.size(10, workers=0, now=0.0) == 20 / SHORTEST_S * WINDOW_S


def test_each_worker_has_hints_whatever_the_rate_is() -> None:
    workers = MIN_HINTS
    assert Window().size(0, workers=workers, now=0.0) == HINTS_PER_WORKER * workers
    assert Window().size(0, workers=MAX_HINTS, now=0.0) == MAX_HINTS
