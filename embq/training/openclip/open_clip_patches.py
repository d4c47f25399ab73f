"""Patches of open_clip 3.3's training within a `with` block: for defects, records of samples, and shards over http.

The installed package is not changed, and every attribute is restored after the block.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import webdataset
from open_clip_train import data, main, zero_shot
from torch import distributed, nn
from webdataset.autodecode import DecodingError
from webdataset.gopen import gopen_schemes

from embq.core.errors import OutputError
from embq.training.data.reading import open_shard
from embq.training.openclip.models import checked_model

UNREADABLE = "Handling webdataset error"
"""Start of open_clip's log line for a sample or shard that it could not read and leaves out. Only rank 0 has a log."""


@contextmanager
def patched() -> Iterator[None]:
    """All patches of defects, and of reading over http."""
    with ExitStack() as patches:
        for patch in ALL:
            patches.enter_context(patch())
        yield


def distributed_on_cpus() -> AbstractContextManager[object]:
    """Leave out `device_ids` for a module on the CPU, where DistributedDataParallel refuses them (pytorch #100243)."""

    class OnAnyDevice(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module, device_ids: Any = None, **options: Any) -> None:
            on_cpus = all(weights.device.type == "cpu" for weights in module.parameters())
            super().__init__(module, device_ids=None if on_cpus else device_ids, **options)

    return mock.patch.object(nn.parallel, "DistributedDataParallel", OnAnyDevice)


def a_group_that_is_there() -> AbstractContextManager[object]:
    """Keep a process group that exists already, as under Ray Train; open_clip would initialise it a second time."""
    make = distributed.init_process_group

    def join(*args: Any, **options: Any) -> None:
        if not distributed.is_initialized():
            make(*args, **options)

    return mock.patch.object(distributed, "init_process_group", join)


def shards_that_end() -> AbstractContextManager[object]:
    """Read beyond the first shard with `--dataset-type webdataset`.

    Since 0.2.96 webdataset marks the end of a shard by an empty sample, in which open_clip looks for a file name:
    KeyError: 'fname' (webdataset #384, open_clip #935).
    """
    return mock.patch.object(data, "tar_file_expander", partial(data.tar_file_expander, eof_value=None))


def shards_over_http() -> AbstractContextManager[object]:
    """Read shards behind http by embq's client, with its limits and repeated requests; webdataset would start curl."""
    return mock.patch.dict(gopen_schemes, dict.fromkeys(("http", "https"), lambda url, *_, **__: open_shard(url)))


def samples_by_name() -> AbstractContextManager[object]:
    """Name the sample that cannot be decoded in the log; open_clip logs no more than `DecodingError()`."""
    return mock.patch.object(data, "log_and_continue", log_by_name)


def log_by_name(error: Exception) -> bool:
    """Replaces `log_and_continue` of open_clip_train/data.py; at module level, so that loader workers can import it."""
    shard, member = name_of(error)
    what = f"{shard} {member}: {type(error.__cause__).__name__}" if member else repr(error)
    logging.warning("%s (%s). Ignoring.", UNREADABLE, what)
    return True


def name_of(error: Exception) -> tuple[str, str]:
    """(shard, member) that could not be read; the member is "" for a whole shard.

    webdataset appends the shard to the arguments of an error that is not its own.
    """
    if isinstance(error, DecodingError):
        return str(error.url), f"{error.key}.{error.k}"
    return str(error.args[-1] if error.args else "a shard"), ""


def checkpoints_that_fail() -> AbstractContextManager[object]:
    """Raise OutputError for a checkpoint that cannot be written; for a full disk torch raises "unexpected pos"."""
    save = torch.save

    def checked(content: Any, path: Any, *rest: Any, **options: Any) -> None:
        try:
            save(content, path, *rest, **options)
        except (OSError, RuntimeError) as error:
            raise OutputError(
                f"{path} cannot be written: {str(error).splitlines()[0]}",
                next_step="make room, and give the same command again: it goes on from its epoch_latest.pt, if any",
            ) from error

    return mock.patch.object(torch, "save", checked)


def no_training_twice() -> AbstractContextManager[object]:
    """Stop all ranks if the folder holds a training already.

    open_clip stops rank 0 only (open_clip #180), with a status that `python -m` drops, and leaves the others in their
    first collective. Rank 0, which writes the log, looks for it, and broadcasts what it found.
    """
    begin = main.init_distributed_device

    def begin_anew(args: Namespace) -> Any:
        device = begin(args)
        log = _log_of(args)
        exists = [bool(log) and args.resume != "latest" and os.path.exists(log)]
        if args.distributed and not args.horovod:
            torch.distributed.broadcast_object_list(exists, src=0)
        if exists[0]:
            raise OutputError(
                f"{os.path.dirname(log)} holds a training already",
                next_step="use another --name or --logs, or go on with the one that is there: --resume latest",
            )
        return device

    return mock.patch.object(main, "init_distributed_device", begin_anew)


@contextmanager
def checked_models() -> Iterator[None]:
    """Load models and tokenisers from the files that were checked; `args.model` and params.txt keep the name."""

    def checked(load: Callable[..., Any]) -> Callable[..., Any]:
        return lambda name, *rest, **options: load(checked_model(name, options.get("cache_dir")), *rest, **options)

    create = checked(main.create_model_and_transforms)
    with (
        mock.patch.object(main, "get_tokenizer", checked(main.get_tokenizer)),
        mock.patch.object(zero_shot, "get_tokenizer", checked(zero_shot.get_tokenizer)),
        mock.patch.object(main, "create_model_and_transforms", create),
    ):
        yield


ALL = (
    checked_models,
    shards_over_http,
    distributed_on_cpus,
    a_group_that_is_there,
    shards_that_end,
    samples_by_name,
    checkpoints_that_fail,
    no_training_twice,
)


def _log_of(args: Namespace) -> str:
    """Path of rank 0's log; "" if its name is made of the time, and so is new."""
    return "" if args.name is None else os.path.join(args.logs, args.name, "out-0" if args.log_local else "out.log")


def noted_failures(folder: Path | None) -> AbstractContextManager[object]:
    """Record what each rank, with its loader workers, could not read: a file `rank-R.txt` of lines `shard<tab>member`.

    open_clip logs it on rank 0 only. The member is "" for a damaged shard. The file exists from the start, so that
    ranks on hosts without a common folder are noticed; each epoch and each start appends to it. None records nothing.
    """
    if folder is None:
        return nullcontext()
    get_shards, read_shards = data.get_wds_dataset, data.tarfile_to_samples_nothrow

    def with_notes(args: Any, *rest: Any, **options: Any) -> Any:
        path = folder / f"rank-{args.rank}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:  # the training continues without the record
            logging.warning("%s cannot be written: %s", path, error.strerror)
            return get_shards(args, *rest, **options)
        note = partial(log_and_note, path)
        # open_clip's reader of training shards was given its `log_and_continue` when it was defined.
        with (
            mock.patch.object(data, "log_and_continue", note),
            mock.patch.object(data, "tarfile_to_samples_nothrow", partial(read_shards, handler=note)),
        ):
            return get_shards(args, *rest, **options)

    return mock.patch.object(data, "get_wds_dataset", with_notes)


def log_and_note(path: Path, error: Exception) -> bool:
    """Replaces `log_and_continue` of open_clip_train/data.py; at module level, so that loader workers can import it."""
    shard, member = name_of(error)
    try:
        # Loader workers append to the same file, each in one write.
        to = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(to, f"{shard}\t{member}\n".encode())
        finally:
            os.close(to)
    except OSError as refused:
        logging.warning("%s cannot be written: %s", path, refused.strerror)
    return log_by_name(error)


def recorded_keys(folder: Path | None) -> AbstractContextManager[object]:
    """Record the samples of each step: a file `epoch-E-rank-R.txt` of lines `shard<tab>key` per rank, in order.

    open_clip's loader drops keys, and replaces what it cannot read by another sample, so only what the loop was given
    tells what was trained on. None records nothing.
    """
    if folder is None:
        return nullcontext()
    get_shards = data.get_wds_dataset

    def with_keys(args: Any, preprocess: Any, is_train: bool, **options: Any) -> Any:
        if not is_train:
            return get_shards(args, preprocess, is_train, **options)
        with keys_beside_samples():
            train = get_shards(args, preprocess, is_train, **options)
        train.dataloader = Recorded(train, folder, args.rank)
        return train

    return mock.patch.object(data, "get_wds_dataset", with_keys)


def keys_beside_samples() -> AbstractContextManager[object]:
    """Make pipelines yield (image, text, shard, key) where open_clip asks for (image, text)."""
    to_tuple = webdataset.to_tuple

    def beside(*fields: str) -> Any:
        return to_tuple(*fields, "__url__", "__key__")

    return mock.patch.object(webdataset, "to_tuple", beside)


class Recorded:
    """open_clip's loader of training samples, which records each batch before its step.

    Attributes:
        num_batches: batches of an epoch.
        num_samples: samples of an epoch, of all ranks.
    """

    def __init__(self, train: Any, folder: Path, rank: int) -> None:
        self._loader = train.dataloader
        self._epoch = train.shared_epoch
        self._folder = folder
        self._rank = rank
        self.num_batches: int = train.dataloader.num_batches
        self.num_samples: int = train.dataloader.num_samples

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"epoch-{self._epoch.get_value()}-rank-{self._rank}.txt"
        # An interrupted epoch starts over, and so does its file.
        with open(path, "w", encoding="utf-8") as file:
            for images, texts, shards, keys in self._loader:
                file.writelines(f"{shard}\t{key}\n" for shard, key in zip(shards, keys, strict=True))
                file.flush()
                yield images, texts
