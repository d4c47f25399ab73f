"""A way to compute is as good as its vectors are near to fp32, and not as they are near to another way's."""

from __future__ import annotations

import math

import pytest

from embq.worker.embedders.device.trial import PROBES, AccuracyCheck, places
from tests.support.lazy import lazy

torch = lazy("torch")


DIM = 64


def exact() -> torch.Tensor:
    return torch.randn(PROBES, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def turned(vectors: torch.Tensor, error: float, seed: int, spread: float = 0.0) -> torch.Tensor:
    """The vectors, each with this error (1 - cosine) in a direction of its own.

    Args:
        spread: of the logarithms of the errors, around that of `error`.
    """
    generator = torch.Generator().manual_seed(seed)
    aside = torch.randn(vectors.shape, generator=generator, dtype=torch.float64)
    unit = torch.nn.functional.normalize(vectors)
    aside = torch.nn.functional.normalize(aside - (aside * unit).sum(1, keepdim=True) * unit)
    errors = error * (spread * torch.randn(len(vectors), 1, generator=generator, dtype=torch.float64)).exp()
    return (1 - errors) * unit + (1 - (1 - errors) ** 2).sqrt() * aside


def test_two_ways_that_are_as_far_from_fp32_as_each_other_are_as_good_however_far_they_are_apart() -> None:
    usual, other = (turned(exact(), 1e-4, seed, spread=0.5) for seed in (1, 2))
    apart = 1 - torch.nn.functional.cosine_similarity(usual, other).min()
    assert apart > 1e-4, "a bar of 0.9999 between the two would refuse it"
    assert not AccuracyCheck(usual, exact()).refusal(other)
    assert not AccuracyCheck(usual, exact()).refusal(exact())


@pytest.mark.parametrize(("ratio", "is_refused"), [(0.2, False), (1.4, False), (1.6, True), (2.0, True), (50.0, True)])
def test_a_way_with_half_as_much_error_more_is_refused(ratio: float, is_refused: bool) -> None:
    nearness = AccuracyCheck(turned(exact(), 1e-5, 1), exact())
    way = turned(exact(), ratio * 1e-5, 2)
    assert nearness.ratio(way) == pytest.approx(ratio, rel=1e-6)
    assert bool(nearness.refusal(way)) == is_refused


@pytest.mark.parametrize("row", [0, PROBES - 1])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, 100.0])
def test_one_wrong_row_is_enough(row: int, value: float) -> None:
    way = turned(exact(), 1e-6, 2)
    way[row] = value
    assert AccuracyCheck(turned(exact(), 1e-5, 1), exact()).refusal(way)


def test_a_row_that_is_a_little_worse_by_chance_is_not() -> None:
    way = turned(exact(), 1e-5, 2)
    way[3:4] = turned(exact()[3:4], 6e-5, 3)
    assert not AccuracyCheck(turned(exact(), 1e-5, 1), exact()).refusal(way)


@pytest.mark.parametrize(("error", "is_refused"), [(1e-12, False), (1e-9, False), (5e-7, True)])
def test_in_fp32_a_way_may_add_in_another_order_and_not_round_to_tf32(error: float, is_refused: bool) -> None:
    assert bool(AccuracyCheck(exact(), exact()).refusal(turned(exact(), error, 1))) == is_refused


def test_rows_of_which_the_usual_way_gives_no_number_say_nothing() -> None:
    usual = turned(exact(), 1e-5, 1)
    usual[2] = torch.nan
    way = usual.clone()
    way[2] = 1.0
    assert not AccuracyCheck(usual, exact()).refusal(way)
    assert "no finite" in AccuracyCheck(torch.full_like(usual, torch.nan), exact()).refusal(way)


@pytest.mark.parametrize("rows", [1, 5, PROBES, 257])
def test_the_first_and_the_last_row_are_compared(rows: int) -> None:
    found = places(rows).tolist()
    assert (found[0], found[-1]) == (0, rows - 1)
    assert len(set(found)) == len(found) == min(rows, PROBES)
