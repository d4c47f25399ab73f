"""What keeps open_clip 3.3's training from running, or from saying that it did not, mended in this process only.

Nothing is changed in the installed package, and everything is put back behind the training.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from core.errors import OutputError


@contextmanager
def noted_failures(folder: Path | None) -> Iterator[None]:
    """Each rank has a file `rank-R.txt` of lines `shard<tab>member`; the member is "" of a shard that is damaged.

    It is there from the beginning, so that who counts knows of which ranks there is something to count; each epoch and
    each start adds its own lines. None notes nothing, and then nothing is changed.
    """
    if folder is None:
        yield
        return
    from open_clip_train import data

    get_shards, read_shards = data.get_wds_dataset, data.tarfile_to_samples_nothrow

    def with_notes(args: Any, *rest: Any, **options: Any) -> Any:
        path = folder / f"rank-{args.rank}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:  # a training is worth more than its notes
            logging.warning("%s cannot be written: %s", path, error.strerror)
            return get_shards(args, *rest, **options)
        note = partial(log_and_note, path)
        # open_clip's reader of training shards was given its `log_and_continue` when it was defined.
        with (
            replaced(data, "log_and_continue", note),
            replaced(data, "tarfile_to_samples_nothrow", partial(read_shards, handler=note)),
        ):
            return get_shards(args, *rest, **options)

    with replaced(data, "get_wds_dataset", with_notes):
        yield


def log_and_note(path: Path, error: Exception) -> bool:
    """In place of `log_and_continue` of open_clip_train/data.py; at module level, so that loader workers can get it."""
    shard, member = name_of(error)
    try:
        # In one write at the end, whichever loader worker comes first.
        to = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(to, f"{shard}\t{member}\n".encode())
        finally:
            os.close(to)
    except OSError as refused:
        logging.warning("%s cannot be written: %s", path, refused.strerror)
    return log_by_name(error)


def noted(folder: Path) -> tuple[int, list[tuple[str, str]]]:
    """(ranks that have noted, each shard and member that one of them could not read, in order)."""
    files = [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("rank-*.txt")]
    found = {
        (shard, member) for text in files for line in text.splitlines() for shard, _, member in [line.partition("\t")]
    }
    return len(files), sorted(found)


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


UNREADABLE = "Handling webdataset error"
"""What open_clip logs of a sample or a shard that it could not read, and leaves out; only process 0 has a log."""


@contextmanager
def cured() -> Iterator[None]:
    """open_clip's training with all cures of this file."""
    with ExitStack() as cures:
        for cure in ALL:
            cures.enter_context(cure())
        yield


@contextmanager
def distributed_on_cpus() -> Iterator[None]:
    """Several processes train on CPUs.

    open_clip gives DistributedDataParallel the CPU as `device_ids`, which it refuses for a module on CPUs (pytorch
    #100243, and torch's documentation: None there). They are left out for such a module, and for no other.
    """
    from torch import nn

    class OnAnyDevice(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module, device_ids: Any = None, **options: Any) -> None:
            on_cpus = all(weights.device.type == "cpu" for weights in module.parameters())
            super().__init__(module, device_ids=None if on_cpus else device_ids, **options)

    with replaced(nn.parallel, "DistributedDataParallel", OnAnyDevice):
        yield


@contextmanager
def a_group_that_is_there() -> Iterator[None]:
    """Processes that were brought together already, as those of Ray Train are, train in the group that they have.

    open_clip makes one whatever is there, which torch refuses: "trying to initialize the default process group twice".
    """
    from torch import distributed

    make = distributed.init_process_group

    def join(*args: Any, **options: Any) -> None:
        if not distributed.is_initialized():
            make(*args, **options)

    with replaced(distributed, "init_process_group", join):
        yield


@contextmanager
def shards_that_end() -> Iterator[None]:
    """`--dataset-type webdataset` reads beyond its first shard.

    webdataset marks the end of each shard by an empty sample since 0.2.96, in which open_clip looks for a file name:
    KeyError: 'fname' (webdataset #384, open_clip #935).
    """
    from open_clip_train import data

    with replaced(data, "tar_file_expander", partial(data.tar_file_expander, eof_value=None)):
        yield


@contextmanager
def samples_by_name() -> Iterator[None]:
    """The log names the sample that cannot be decoded.

    open_clip logs the `repr` of webdataset's error, whose shard and key are no arguments of it: `DecodingError()`.
    """
    from open_clip_train import data

    with replaced(data, "log_and_continue", log_by_name):
        yield


def log_by_name(error: Exception) -> bool:
    """In place of `log_and_continue` of open_clip_train/data.py; at module level, so that loader workers can get it."""
    shard, member = name_of(error)
    said = f"{shard} {member}: {type(error.__cause__).__name__}" if member else repr(error)
    logging.warning("%s (%s). Ignoring.", UNREADABLE, said)
    return True


def name_of(error: Exception) -> tuple[str, str]:
    """(shard, member) of what could not be read; the member is "" where it is the shard itself.

    webdataset puts the shard behind the arguments of an error that is none of its own.
    """
    from webdataset.autodecode import DecodingError

    if isinstance(error, DecodingError):
        return str(error.url), f"{error.key}.{error.k}"
    return str(error.args[-1] if error.args else "a shard"), ""


@contextmanager
def checkpoints_that_fail() -> Iterator[None]:
    """A checkpoint that cannot be written is told as such: of a full disk torch says "unexpected pos" and no more."""
    import torch

    save = torch.save

    def told(content: Any, path: Any, *rest: Any, **options: Any) -> None:
        try:
            save(content, path, *rest, **options)
        except (OSError, RuntimeError) as error:
            raise OutputError(
                f"{path} cannot be written: {str(error).splitlines()[0]}",
                next_step="make room, and give the same command again: it goes on from its epoch_latest.pt, if any",
            ) from error

    with replaced(torch, "save", told):
        yield


@contextmanager
def no_training_twice() -> Iterator[None]:
    """A folder that holds a training already stops all ranks, with a message and a status that is not 0.

    open_clip stops rank 0 only (the check of open_clip #180), with a status that `python -m` drops, and leaves the
    others in their first collective. Rank 0 looks, because it makes the log, and all ranks hear what it saw.
    """
    from open_clip_train import main

    begin = main.init_distributed_device

    def begin_anew(args: Namespace) -> Any:
        device = begin(args)
        log = _log_of(args)
        found = [bool(log) and args.resume != "latest" and os.path.exists(log)]
        if args.distributed and not args.horovod:
            import torch

            torch.distributed.broadcast_object_list(found, src=0)
        if found[0]:
            raise OutputError(
                f"{os.path.dirname(log)} holds a training already",
                next_step="use another --name or --logs, or go on with the one that is there: --resume latest",
            )
        return device

    with replaced(main, "init_distributed_device", begin_anew):
        yield


ALL = (
    distributed_on_cpus,
    a_group_that_is_there,
    shards_that_end,
    samples_by_name,
    checkpoints_that_fail,
    no_training_twice,
)


def _log_of(args: Namespace) -> str:
    """Where rank 0 will log; "" where the name is made of the time, and so is new."""
    return "" if args.name is None else os.path.join(args.logs, args.name, "out-0" if args.log_local else "out.log")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a module is another one for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
