"""Which samples open_clip's training was made of: their keys reach the loop beside pixels and tokens, and are kept.

open_clip's loader drops keys, and also what it cannot read: it logs a line and takes another sample in its place. Only
what the loop was given tells what was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from training.openclip.cures import replaced


@contextmanager
def recorded_keys(folder: Path | None) -> Iterator[None]:
    """Each rank writes a file `epoch-E-rank-R.txt` of lines `shard<tab>key`, in the order of the training's steps.

    Of training on shards; None records nothing, and then nothing is changed.
    """
    if folder is None:
        yield
        return
    from open_clip_train import data

    get_shards = data.get_wds_dataset

    def with_keys(args: Any, preprocess: Any, is_train: bool, **options: Any) -> Any:
        if not is_train:
            return get_shards(args, preprocess, is_train, **options)
        with keys_beside_samples():
            train = get_shards(args, preprocess, is_train, **options)
        train.dataloader = Recorded(train, folder, args.rank)
        return train

    with replaced(data, "get_wds_dataset", with_keys):
        yield


@contextmanager
def keys_beside_samples() -> Iterator[None]:
    """Pipelines that are made meanwhile give (image, text, [shard, key]) where open_clip asked for (image, text)."""
    import webdataset

    to_tuple = webdataset.to_tuple

    def beside(*fields: str) -> Any:
        return to_tuple(*fields, "__url__", "__key__")

    with replaced(webdataset, "to_tuple", beside):
        yield


class Recorded:
    """open_clip's loader of training samples; what it gives is written down before a step is made of it.

    Attributes:
        num_batches: of an epoch.
        num_samples: of an epoch, of all ranks.
    """

    def __init__(self, data: Any, folder: Path, rank: int) -> None:
        self._loader = data.dataloader
        self._epoch = data.shared_epoch
        self._folder = folder
        self._rank = rank
        self.num_batches: int = data.dataloader.num_batches
        self.num_samples: int = data.dataloader.num_samples

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"epoch-{self._epoch.get_value()}-rank-{self._rank}.txt"
        # An epoch that was interrupted begins anew, and so does its file.
        with open(path, "w", encoding="utf-8") as file:
            for images, texts, shards, keys in self._loader:
                file.writelines(f"{shard}\t{key}\n" for shard, key in zip(shards, keys, strict=True))
                file.flush()
                yield images, texts
