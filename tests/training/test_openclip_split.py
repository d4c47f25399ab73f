"""Who reads what: what embq says of an epoch is what open_clip's own loader does."""

from __future__ import annotations

import contextlib
import gc
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from core.errors import InputError
from tests.tiny_clip import captioned_shards
from training.openclip.split import Split


def epochs_of(folder: Path, split: Split, epochs: int) -> list[Counter[str]]:
    """How often open_clip's loader gives each sample in each epoch, over all processes; one after the other here."""
    import torch
    from open_clip_train.data import get_wds_dataset

    from training.openclip.cures import shards_that_end
    from training.openclip.keys import keys_beside_samples

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
def test_without_its_cure_the_loader_ends_at_the_end_of_the_first_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where this fails, open_clip or webdataset has changed, and `shards_that_end` can go."""
    monkeypatch.setattr("training.openclip.cures.shards_that_end", contextlib.nullcontext)
    split = Split(counts=[3, 3], processes=1, loader_workers=0, batch_size=3)
    with pytest.raises(KeyError, match="fname"):
        epochs_of(captioned_shards(tmp_path / "shards", [3, 3]), split, epochs=1)
    gc.collect()


def test_readers_that_would_never_fill_a_batch_are_told_of() -> None:
    split = Split(counts=[4, 30, 30, 30], processes=2, loader_workers=1, batch_size=40)
    assert split.fewest == 34
    with pytest.raises(InputError, match="read for ever") as caught:
        split.check()
    assert "--batch-size 34" in caught.value.next_step
    Split(counts=[4, 30, 30, 30], processes=2, loader_workers=1, batch_size=34).check()


def test_fewer_shards_than_readers_are_told_of() -> None:
    with pytest.raises(InputError, match="3 shards are too few for 8 readers") as caught:
        Split(counts=[10] * 3, processes=2, loader_workers=4, batch_size=2).check()
    assert "--loader-workers 1" in caught.value.next_step
    with pytest.raises(InputError) as caught:
        Split(counts=[10] * 3, processes=4, loader_workers=0, batch_size=2).check()
    assert "--processes 3" in caught.value.next_step


@pytest.mark.parametrize(
    ("counts", "processes", "workers", "batch", "step"),
    [
        ([18] * 5, 1, 4, 16, "--loader-workers 1 --batch-size 10, 15, 18 or 9"),
        ([18] * 5, 1, 1, 16, "--batch-size 10, 15, 18 or 9"),
        ([18] * 5, 2, 1, 15, "shards of 15"),
        ([17] * 5, 2, 1, 15, "fewer --processes"),
    ],
)
def test_what_would_be_exact_is_said(counts: list[int], processes: int, workers: int, batch: int, step: str) -> None:
    split = Split(counts=counts, processes=processes, loader_workers=workers, batch_size=batch)
    with pytest.raises(InputError, match="--exact") as caught:
        split.check_exact()
    words = set(step.replace(",", "").split()) - {"or", "of"}
    assert words <= set(caught.value.next_step.replace(",", "").replace(";", "").split())


def test_what_is_suggested_is_exact() -> None:
    for batch in (1, 7, 40, 1000):
        split = Split(counts=[36] * 6, processes=3, loader_workers=2, batch_size=batch)
        if split.is_exact:
            continue
        with pytest.raises(InputError) as caught:
            split.check_exact()
        for number in (int(word) for word in caught.value.next_step.replace(",", "").split() if word.isdecimal()):
            assert Split(counts=[36] * 6, processes=3, loader_workers=2, batch_size=number).is_exact
