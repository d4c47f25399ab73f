"""Exact epochs: every sample of the shards once over all processes, whatever divides by what, in few small batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embq.training.data.batch import Batch, Failure, View
from embq.training.data.epochs import exact_epoch, regrouped, validation_samples
from embq.training.data.loader import WorkerBatch
from embq.training.data.split import dealt, permuted
from embq.training.shards.shard_set import Shards
from tests.training.small_shards import CLASSES, key_of, write_shards

VIEW = View(batch_size=4, image_size=16, seed=11, shuffle_buffer=10, classes=CLASSES)


def of_all_ranks(shards: Shards, view: View, epoch: int) -> list[list[Batch]]:
    return [list(exact_epoch(shards, replace(view, rank=rank), epoch=epoch)) for rank in range(view.world)]


def keys(ranks: Sequence[Sequence[Batch]]) -> list[str]:
    return [key for batches in ranks for batch in batches for key in batch.keys]


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    st.sets(st.integers(0, 40)),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_every_sample_comes_once_or_fails_once(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], bad: set[int], world: int, batch_size: int
) -> None:
    shards = write_shards(tmp_path_factory.mktemp("exact"), counts, {number: {"jpg": b""} for number in bad})
    view = replace(VIEW, world=world, batch_size=batch_size)
    for epoch in range(2):
        ranks = of_all_ranks(shards, view, epoch)
        failed = [failure.key for batches in ranks for batch in batches for failure in batch.failed]
        assert sorted(keys(ranks) + failed) == [key_of(number) for number in range(sum(counts))]
        assert set(failed) == {key_of(number) for number in bad if number < sum(counts)}
        for batches in ranks:
            assert_few_are_small([len(batch) for batch in batches], batch_size)


def assert_few_are_small(sizes: Sequence[int], batch_size: int) -> None:
    """The fewest batches that it takes, and none of one sample where there are more."""
    if sizes in ([], [0]):
        return
    assert max(sizes) <= batch_size
    assert len(sizes) == -(-sum(sizes) // batch_size)
    if batch_size > 2 and sum(sizes) > 1:
        assert min(sizes) > 1


@pytest.mark.parametrize("loader_workers", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_every_sample_comes_once_from_loader_workers_too(tmp_path: Path, world: int, loader_workers: int) -> None:
    """5 shards for up to 6 loader workers: one of them has nothing to read."""
    shards = write_shards(tmp_path, [7, 18, 1, 30, 12])
    view = replace(VIEW, world=world, loader_workers=loader_workers)
    ranks = of_all_ranks(shards, view, 0)
    assert sorted(keys(ranks)) == [key_of(number) for number in range(68)]
    for batches in ranks:
        assert_few_are_small([len(batch) for batch in batches], 4)


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_process_without_a_shard_has_an_epoch_of_no_batches(tmp_path: Path, loader_workers: int) -> None:
    shards = write_shards(tmp_path, [5, 6])
    ranks = of_all_ranks(shards, replace(VIEW, world=3, loader_workers=loader_workers), 0)
    assert sorted(len(batches) for batches in ranks) == [0, 2, 2]


def test_each_process_gets_other_shards_in_another_epoch(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [2] * 8)
    view = replace(VIEW, world=2)
    firsts = [frozenset(keys(of_all_ranks(shards, view, epoch)[:1])) for epoch in range(4)]
    assert len(set(firsts)) == 4


def test_the_order_within_an_epoch_mixes_neighbours(tmp_path: Path) -> None:
    order = keys([list(exact_epoch(write_shards(tmp_path, [200]), VIEW, epoch=0))])
    assert sum(int(b) == int(a) + 1 for a, b in pairwise(order)) < 40


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_validation_sees_every_sample_once_and_always_the_same(tmp_path: Path, loader_workers: int) -> None:
    shards = write_shards(tmp_path, [7, 18, 1])
    view = replace(VIEW, world=2, loader_workers=loader_workers)
    ranks = [list(validation_samples(shards, replace(view, rank=rank))) for rank in range(2)]
    assert sorted(keys(ranks)) == [key_of(number) for number in range(26)]
    again = list(validation_samples(shards, replace(view, seed=99)))
    assert all(torch.equal(one.images, other.images) for one, other in zip(ranks[0], again, strict=True))
    if not loader_workers:
        assert keys(ranks[1:]) == [key_of(number) for number in (*range(7), 25)]


# --- who reads which shards ---


def steps(hands: Sequence[Sequence[str]], counts: Mapping[str, int], batch_size: int) -> list[int]:
    return [-(-sum(counts[url] for url in hand) // batch_size) for hand in hands]


def in_turn(urls: Sequence[str], parts: int) -> list[list[str]]:
    return [list(urls[part::parts]) for part in range(parts)]


def worst(counts: Mapping[str, int], parts: int, batch_size: int) -> tuple[int, int]:
    """(the most steps of a process in 50 epochs where shards go round in turn, and where they are dealt by size)."""
    orders = [permuted(list(counts), 0, epoch) for epoch in range(50)]
    turns = max(max(steps(in_turn(urls, parts), counts, batch_size)) for urls in orders)
    return turns, max(max(steps(dealt(urls, parts, counts), counts, batch_size)) for urls in orders)


def test_shards_of_unequal_size_are_dealt_so_that_no_process_has_much_more_than_another() -> None:
    counts = {f"{size}.tar": size for size in (13, 7, 22, 5, 18)}
    urls = list(counts)
    assert steps(in_turn(urls, 2), counts, 1) == [53, 12]
    assert dealt(urls, 2, counts) == [["7.tar", "22.tar", "5.tar"], ["13.tar", "18.tar"]]
    assert worst(counts, 2, 1) == (53, 34)
    assert worst(counts, 2, 4) == (14, 9)
    assert worst(counts, 3, 1) == (40, 23)


def test_shards_of_one_size_go_round_in_turn_and_so_do_those_of_which_nothing_is_known() -> None:
    urls = [f"{number}.tar" for number in range(11)]
    for counts in ({}, dict.fromkeys(urls, 1000)):
        assert dealt(urls, 3, counts) == in_turn(urls, 3)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_where_all_but_the_last_shard_are_of_one_size_nobody_has_more_or_less_to_do(world: int) -> None:
    counts = {f"{number:06d}.tar": 1000 for number in range(1281)} | {"001281.tar": 167}
    turns, by_size = worst(counts, world, 256)
    assert turns == by_size


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 6))
def test_every_shard_is_dealt_once_in_the_order_of_the_epoch(sizes: list[int], parts: int) -> None:
    counts = {f"{number:06d}.tar": size for number, size in enumerate(sizes)}
    hands = dealt(list(counts), parts, counts)
    assert sorted(url for hand in hands for url in hand) == list(counts)
    assert all(hand == sorted(hand) for hand in hands)
    loads = [sum(counts[url] for url in hand) for hand in hands]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_loader_workers_of_a_process_share_its_samples_evenly(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [13, 7, 22, 5, 18])
    view = replace(VIEW, world=2, loader_workers=2, shuffle_buffer=0)
    for rank in range(2):
        of_streams: Counter[int] = Counter()
        for batch in exact_epoch(shards, replace(view, rank=rank), epoch=0):
            of_streams |= dict(batch.reached)
        assert sorted(of_streams.values()) == ([12, 22] if sum(of_streams.values()) == 34 else [13, 18])


# --- what is left of each loader worker's stream ---

BATCH = 4

STREAMS = st.lists(st.text(alphabet="..x", max_size=11), min_size=1, max_size=4)
"""For each stream its items: a dot is a sample, an x a failure."""


def sent(streams: Sequence[str]) -> list[WorkerBatch]:
    """The messages of loader workers of streams, in the order in which a loader gives them."""
    messages = [messages_of(number, items) for number, items in enumerate(streams)]
    return [row[turn] for turn in range(12) for row in messages if turn < len(row)]


def messages_of(stream: int, items: str) -> list[WorkerBatch]:
    found, begin = [], 0
    for end in range(1, len(items) + 1):
        if items[begin:end].count(".") == BATCH or end == len(items):
            found.append(message(stream, items, begin, end))
            begin = end
    return found


def message(stream: int, items: str, begin: int, end: int) -> WorkerBatch:
    positions = [at for at in range(begin + 1, end + 1) if items[at - 1] == "."]
    return WorkerBatch(
        stream=stream,
        pixels=torch.tensor([20 * stream + at for at in positions], dtype=torch.uint8).view(-1, 1, 1, 1),
        labels=positions,
        keys=[f"{stream}/{at}" for at in positions],
        shards=[""] * len(positions),
        positions=positions,
        failed=[
            (at, Failure(shard="", key=f"{stream}/{at}", code="corrupt", message=""))
            for at in range(begin + 1, end + 1)
            if items[at - 1] == "x"
        ],
        read=end,
    )


@given(STREAMS)
def test_what_loader_workers_leave_is_shared_out_again(streams: list[str]) -> None:
    batches = list(regrouped(sent(streams), View(batch_size=BATCH, image_size=1, loader_workers=len(streams))))
    every = [f"{stream}/{at}" for stream, items in enumerate(streams) for at in range(1, len(items) + 1)]
    told = Counter(key for batch in batches for key in [*batch.keys, *(failure.key for failure in batch.failed)])
    assert told == Counter(every)
    for batch in batches:
        assert [20 * int(key[0]) + int(key[2:]) for key in batch.keys] == batch.pixels.flatten().tolist()
        assert [int(key[2:]) for key in batch.keys] == batch.labels.tolist()
    assert_few_are_small([len(batch) for batch in batches], BATCH)
    assert all(len(batch) for batch in batches[:-1])


@given(STREAMS)
def test_a_batch_tells_exactly_how_far_it_and_its_failures_go(streams: list[str]) -> None:
    """A batch covers the part of a stream that no earlier one does: neither less nor more is read again."""
    reached = dict.fromkeys(range(len(streams)), 0)
    for batch in regrouped(sent(streams), View(batch_size=BATCH, image_size=1, loader_workers=len(streams))):
        there = {tuple(map(int, key.split("/"))) for key in [*batch.keys, *(failure.key for failure in batch.failed)]}
        covered = {(stream, at) for stream, end in batch.reached for at in range(reached[stream] + 1, end + 1)}
        assert covered == there
        reached |= dict(batch.reached)
    assert reached == {stream: len(items) for stream, items in enumerate(streams)}
