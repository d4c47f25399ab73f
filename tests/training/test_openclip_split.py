"""Split of shards over readers: what embq says of an epoch is what open_clip's own loader does."""

from __future__ import annotations

import contextlib
import gc
import re
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from embq.core.errors import InputError
from embq.training.openclip.split import Split
from tests.support.models.clip import captioned_shards


def epochs_of(folder: Path, split: Split, epochs: int) -> list[Counter[str]]:
    """Times that open_clip's loader gives each sample in each epoch, over all processes, which take turns here."""
    import torch
    from open_clip_train.data import get_wds_dataset

    from embq.training.openclip.open_clip_patches import keys_beside_samples, shards_that_end

    seen: list[Counter[str]] = [Counter() for _ in range(epochs)]
    for rank in range(split.processes):
        args = Namespace(
            train_data=f"{folder}/train-{{000000..{len(split.counts) - 1:06d}}}.tar",
            train_num_samples=sum(split.counts),
            train_data_upsampling_factors=None,
            dataset_resampled=False,
            seed=0,
            batch_size=split.batch_size,
            workers=split.loader_workers,
            world_size=split.processes,
        )
        with pytest.MonkeyPatch.context() as environment, shards_that_end(), keys_beside_samples():
            environment.setenv("RANK", str(rank))
            environment.setenv("WORLD_SIZE", str(split.processes))
            data = get_wds_dataset(
                args, lambda image: torch.zeros(1), is_train=True, tokenizer=lambda text: torch.zeros(1, 1)
            )
            for epoch, counts in enumerate(seen):
                data.set_epoch(epoch)
                for _, _, _, keys in data.dataloader:
                    counts.update(keys)
        del data
    gc.collect()  # webdataset closes no shard that it has not read to its end
    return seen


@pytest.mark.parametrize(
    ("counts", "processes", "workers", "batch", "exact"),
    [
        ([12, 12, 12], 1, 0, 9, True),
        ([5, 7, 6], 1, 1, 9, True),  # one reader takes whatever shards there are
        ([6] * 4, 2, 2, 3, True),
        ([6] * 4, 2, 0, 4, True),
        ([6] * 4, 2, 2, 4, False),  # a reader's 6 are no multiple of 4
        ([4, 8, 4, 8], 2, 0, 4, False),  # a process gets 8, 12 or 16
        ([6] * 3, 2, 0, 3, False),
        ([7, 7], 1, 0, 4, False),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_epoch_is_exact_where_embq_says_so(
    tmp_path: Path, counts: list[int], processes: int, workers: int, batch: int, exact: bool
) -> None:
    split = Split(counts=counts, processes=processes, loader_workers=workers, batch_size=batch)
    assert split.is_exact == exact
    seen = epochs_of(captioned_shards(tmp_path / "shards", counts), split, epochs=3)
    all_once = {f"{number:06d}": 1 for number in range(sum(counts))}
    assert all(epoch == all_once for epoch in seen) == exact


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_keys_are_kept_of_what_is_trained_on_and_validation_is_as_open_clip_makes_it(tmp_path: Path) -> None:
    import torch
    from open_clip_train import main

    from embq.training.openclip.open_clip_patches import recorded_keys, shards_that_end

    shards = captioned_shards(tmp_path / "shards", [4, 4])
    args = Namespace(
        train_data=f"{shards}/train-{{000000..000001}}.tar",
        val_data=f"{shards}/train-000000.tar",
        dataset_type="webdataset",
        train_num_samples=8,
        val_num_samples=4,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        imagenet_val=None,
        imagenet_v2=None,
        seed=0,
        batch_size=4,
        workers=0,
        rank=0,
        world_size=1,
    )
    plain = (lambda image: torch.zeros(1),) * 2
    with shards_that_end(), recorded_keys(tmp_path / "keys"):
        data = main.get_data(args, plain, tokenizer=lambda text: torch.zeros(1, 1))
        sizes = {name: [len(batch) for batch in data[name].dataloader] for name in ("train", "val")}
    assert sizes == {"train": [2, 2], "val": [2]}
    assert len((tmp_path / "keys" / "epoch-0-rank-0.txt").read_text().splitlines()) == 8
    del data
    gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_without_its_cure_the_loader_ends_at_the_end_of_the_first_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure means that open_clip or webdataset has changed, and `shards_that_end` can go."""
    monkeypatch.setattr("embq.training.openclip.open_clip_patches.shards_that_end", contextlib.nullcontext)
    split = Split(counts=[3, 3], processes=1, loader_workers=0, batch_size=3)
    with pytest.raises(KeyError, match="fname"):
        epochs_of(captioned_shards(tmp_path / "shards", [3, 3]), split, epochs=1)
    gc.collect()


def test_readers_that_would_never_fill_a_batch_are_told_of() -> None:
    split = Split(counts=[4, 30, 30, 30], processes=2, loader_workers=1, batch_size=40)
    assert split.fewest == 34
    with pytest.raises(InputError, match="never fill a batch of 40") as caught:
        split.check()
    assert "--batch-size 34" in caught.value.next_step
    Split(counts=[4, 30, 30, 30], processes=2, loader_workers=1, batch_size=34).check()


def test_fewer_shards_than_readers_are_told_of() -> None:
    with pytest.raises(InputError, match="3 shards are too few for 8 readers") as caught:
        Split(counts=[10] * 3, processes=2, loader_workers=4, batch_size=2).check()
    assert "--workers 1" in caught.value.next_step
    with pytest.raises(InputError) as caught:
        Split(counts=[10] * 3, processes=4, loader_workers=0, batch_size=2).check()
    assert "--num-devices 3" in caught.value.next_step
    with pytest.raises(InputError) as caught:
        Split(counts=[10] * 3, processes=4, loader_workers=4, batch_size=2).check()
    assert "--workers 1 and at most --num-devices 3" in caught.value.next_step
    Split(counts=[10] * 3, processes=3, loader_workers=1, batch_size=2).check()


@pytest.mark.parametrize(
    ("counts", "processes", "workers", "batch", "step"),
    [
        ([18] * 5, 1, 4, 16, "--workers 1 --batch-size 10, 15, 18 or 9"),
        ([18] * 5, 1, 1, 16, "--batch-size 10, 15, 18 or 9"),
        ([18] * 5, 2, 1, 15, "shards of 15 --samples-per-shard"),
        ([17] * 5, 2, 1, 15, "fewer --num-devices"),
    ],
)
def test_what_would_be_exact_is_said(counts: list[int], processes: int, workers: int, batch: int, step: str) -> None:
    split = Split(counts=counts, processes=processes, loader_workers=workers, batch_size=batch)
    with pytest.raises(InputError, match="--exact") as caught:
        split.check_exact()
    words = set(step.replace(",", "").split()) - {"or", "of"}
    assert words <= set(re.sub(r"[,;()`]", "", caught.value.next_step).split())


def test_what_is_suggested_is_exact() -> None:
    for batch in (1, 7, 40, 1000):
        split = Split(counts=[36] * 6, processes=3, loader_workers=2, batch_size=batch)
        if split.is_exact:
            continue
        with pytest.raises(InputError) as caught:
            split.check_exact()
        for number in numbers(caught.value.next_step):
            assert Split(counts=[36] * 6, processes=3, loader_workers=2, batch_size=number).is_exact


def test_what_is_suggested_of_other_shards_is_exact() -> None:
    with pytest.raises(InputError) as caught:
        Split(counts=[18] * 5, processes=2, loader_workers=4, batch_size=15).check_exact()
    shards, _, training = caught.value.next_step.partition("--workers 1")
    for size in numbers(shards):
        for batch in numbers(training):
            assert Split(counts=[size] * (90 // size), processes=2, loader_workers=1, batch_size=batch).is_exact


def numbers(text: str) -> list[int]:
    found = [int(word) for word in text.replace(",", "").split() if word.isdecimal()]
    assert found
    return found
