"""Resampled epochs: shards drawn uniformly with replacement, by each loader worker of each process for itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from embq.core.errors import InputError
from embq.training.data.batch import Batch, View
from embq.training.data.epochs import resampled_epoch
from embq.training.shards.shard_set import Shards, open_shards
from tests.training.small_shards import CLASSES, key_of, write_shard, write_shards

VIEW = View(batch_size=10, image_size=8, seed=5, shuffle_buffer=0, classes=CLASSES)

SHARDS = 10

CHI_SQUARE_OF_9 = 27.88
"""Chi-square of 9 degrees of freedom that is exceeded by chance once in a thousand."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """One sample each, so that samples show draws."""
    return write_shards(tmp_path_factory.mktemp("drawn"), [1] * SHARDS)


def draws(batches: Iterable[Batch]) -> list[str]:
    return [key for batch in batches for key in batch.keys]


def chi_square(counts: Iterable[int], expected: float) -> float:
    return sum((count - expected) ** 2 / expected for count in counts)


def test_shards_are_drawn_uniformly_and_with_replacement(shards: Shards) -> None:
    drawn = draws(resampled_epoch(shards, VIEW, epoch=0, batches=200))
    assert len(drawn) == 2000
    assert chi_square((Counter(drawn)[key_of(n)] for n in range(SHARDS)), 200) < CHI_SQUARE_OF_9
    # Uniform also after each shard, the same one again included: one draw says nothing of the next one.
    pairs = Counter(pairwise(drawn))
    repeats = sum(count for (one, other), count in pairs.items() if one == other)
    assert 150 < repeats < 250  # 200 expected, with a standard deviation of 13
    assert len(pairs) == SHARDS * SHARDS


def test_processes_loader_workers_and_epochs_draw_independently(shards: Shards) -> None:
    """The first draws of 6 streams in 20 epochs are uniform too, and no two streams are alike."""
    firsts: list[str] = []
    for epoch in range(20):
        ranks = [replace(VIEW, rank=rank, world=6) for rank in range(6)]
        streams = [tuple(draws(resampled_epoch(shards, view, epoch=epoch, batches=1))) for view in ranks]
        assert len(set(streams)) == 6
        firsts += [key for stream in streams for key in stream[:5]]
    assert chi_square((Counter(firsts)[key_of(n)] for n in range(SHARDS)), 60) < CHI_SQUARE_OF_9


def test_two_loader_workers_draw_otherwise_and_give_a_batch_each_in_turn(shards: Shards) -> None:
    view = replace(VIEW, loader_workers=2)
    batches = list(resampled_epoch(shards, view, epoch=0, batches=5))
    assert [batch.reached[0][0] for batch in batches] == [0, 1, 0, 1, 0]
    assert len({tuple(batch.keys) for batch in batches}) == 5


@pytest.mark.parametrize("loader_workers", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 2])
def test_every_process_makes_the_same_number_of_full_steps(shards: Shards, loader_workers: int, rank: int) -> None:
    view = replace(VIEW, rank=rank, world=3, loader_workers=loader_workers)
    assert [len(batch) for batch in resampled_epoch(shards, view, epoch=0, batches=7)] == [10] * 7


def test_a_large_shard_gives_all_its_samples_when_it_is_drawn(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [3, 7])
    drawn = draws(resampled_epoch(shards, VIEW, epoch=0, batches=30))
    numbers = [int(key) for key in drawn]
    follows = {2: {0, 3}, 9: {0, 3}}
    assert all(b in follows.get(a, {a + 1}) for a, b in pairwise(numbers))


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_shards_of_nothing_but_failures_end_with_a_message_instead_of_never(
    tmp_path: Path, loader_workers: int
) -> None:
    shards = write_shards(tmp_path, [4], {number: {"jpg": b"nothing"} for number in range(4)})
    with pytest.raises(
        InputError, match=r"1000 samples one after the other failed; the first is 0000\d of .*s-000.tar"
    ):
        list(resampled_epoch(shards, replace(VIEW, loader_workers=loader_workers), epoch=0, batches=2))


def test_empty_shards_end_with_a_message_instead_of_never(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the shards hold no sample"):
        list(resampled_epoch(write_shards(tmp_path / "told", [0, 0]), VIEW, epoch=0, batches=2))
    alone = open_shards(str(write_shard(tmp_path / "alone.tar", {})))
    assert alone.counts is None
    with pytest.raises(InputError, match="there is no sample in it"):
        list(resampled_epoch(alone, VIEW, epoch=0, batches=2))
