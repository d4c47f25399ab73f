"""The learning rate over the steps of a training."""

from __future__ import annotations

import math

import pytest

from embq.training.classify.inputs import Schedule

SCHEDULE = Schedule(highest=0.4, warmup=10, epoch_steps=25, epochs=4)


def test_it_rises_in_a_line_to_its_highest() -> None:
    assert [SCHEDULE.lr(0, step) for step in range(10)] == pytest.approx([0.04 * step for step in range(1, 11)])


def test_from_there_it_falls_as_half_a_cosine_to_nearly_nothing() -> None:
    rates = [SCHEDULE.lr(epoch, step) for epoch in range(4) for step in range(25)][10:]
    assert rates[0] == pytest.approx(0.4)
    assert rates == sorted(rates, reverse=True)
    assert rates[45] == pytest.approx(0.2)
    assert 0 < rates[-1] == pytest.approx(0.2 * (1 + math.cos(math.pi * 89 / 90)))


def test_an_epoch_that_takes_longer_for_one_process_is_not_a_step_ahead() -> None:
    assert SCHEDULE.lr(1, 30) == SCHEDULE.lr(1, 24)
    assert SCHEDULE.lr(1, 30) > SCHEDULE.lr(2, 0)


def test_without_warm_up_it_begins_at_its_highest() -> None:
    assert Schedule(highest=0.1, warmup=0, epoch_steps=1, epochs=1).lr(0, 0) == pytest.approx(0.1)
