"""Checkpoints and arguments of trainings by open_clip.

At the end of an epoch open_clip writes `epoch_N.pt` in place, and then the same content as `epoch_latest.pt`, which it
replaces atomically. `--resume latest` takes only the latter.
"""

from __future__ import annotations

import ast
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embq.core.errors import InputError
from embq.core.storage.beneath import read_small, require_regular
from embq.core.storage.durable import drop

if TYPE_CHECKING:
    import torch


PARAMS = "params.txt"

_OWN_WORDS = frozenset({"model", "pretrained", "image_interpolation", "image_resize_mode", "cache_dir", "train_data"})
"""Arguments that are words: what looks like a number or a list in them is none."""


class Arguments(dict[str, Any]):
    """Arguments of a training: name with underscores -> value; None for those that open_clip had by default."""

    def __missing__(self, name: str) -> None:
        return None

    @classmethod
    def read(cls, path: Path) -> Arguments:
        """The arguments in a file of lines `name: value`, which open_clip writes with `str`.

        Raises InputError if the file names no model.
        """
        try:
            lines = read_small(path).decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path} cannot be read: {error}", next_step="give the folder of the training, or --model"
            ) from error
        pairs = (line.partition(": ") for line in lines)
        given = cls({name: _value(name, text) for name, mark, text in pairs if mark})
        if not given["model"]:
            raise InputError(
                f"{path} names no model", next_step="say it: --model NAME, as it was given to the training"
            )
        return given


def _value(name: str, text: str) -> Any:
    if text == "None":
        return None
    if name in _OWN_WORDS:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


_OF_AN_EPOCH = re.compile(r"epoch_(\d+)\.pt")
_OF_DDP = "module."


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The weights of a training at the end of an epoch.

    Attributes:
        path: of the file.
        epoch: epochs that were over; None if the file does not say.
        weights: name -> tensor, with the names of the model itself.
        params: the arguments of the training; None if no such file lies beside it.
    """

    path: Path
    epoch: int | None
    weights: Mapping[str, torch.Tensor]
    params: Path | None


def open_checkpoint(given: Path) -> Checkpoint:
    """Read a checkpoint, or the latest one of a training's folder, without running code from it.

    Raises InputError if there is none or the file is not one.
    """
    path = given if given.is_file() else latest_in(given)
    content = _loaded(path)
    weights = content.get("state_dict", content)
    if not isinstance(weights, Mapping) or not weights or not all(_is_tensor(weight) for weight in weights.values()):
        raise InputError(
            f"{path} holds no weights of a model", next_step="give an epoch_N.pt of open_clip, or its training's folder"
        )
    if all(name.startswith(_OF_DDP) for name in weights):
        weights = {name.removeprefix(_OF_DDP): tensor for name, tensor in weights.items()}
    epoch = _epoch_in(content) if weights is not content else None
    params = path.resolve().parent.parent / PARAMS
    return Checkpoint(
        path=path,
        epoch=epoch,
        weights=weights,
        params=params if params.is_file() else None,
    )


def latest_in(folder: Path) -> Path:
    """The checkpoint with most epochs of a training's folder, or of its `checkpoints`; InputError without one."""
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such file or folder", next_step="check the path of the checkpoint")
    place = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    numbered, latest = _numbered(place), place / LATEST
    if latest.is_file() and (_epoch_in(_loaded(latest)) or 0) > max(numbered, default=0):
        return latest
    if numbered:
        return numbered[max(numbered)]
    raise InputError(
        f"{folder}: holds no checkpoint such as {CHECKPOINTS}/epoch_1.pt",
        next_step="open_clip writes the first one when an epoch is over: train on, or give another folder",
    )


def _epoch_in(content: Mapping[str, Any]) -> int | None:
    return epoch if isinstance(epoch := content.get("epoch"), int) else None


def _loaded(path: Path) -> Mapping[str, Any]:
    import torch

    try:
        # Memory-mapped, because two thirds of the file belong to the optimizer.
        content = torch.load(require_regular(path), map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} holds more than weights, and embq runs no code from a checkpoint: {_first_line(error)}",
            next_step="give a checkpoint that open_clip wrote, epoch_N.pt",
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise InputError(
            f"{path} is no whole checkpoint: {_first_line(error)}",
            next_step="the training may have been killed while it wrote: give the one of the epoch before",
        ) from error
    if not isinstance(content, Mapping):
        raise InputError(f"{path} holds no weights of a model", next_step="give an epoch_N.pt of open_clip")
    return content


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


CHECKPOINTS = "checkpoints"
LATEST = "epoch_latest.pt"


def epochs_done(folder: Path) -> int:
    """Epochs whose checkpoint is complete: the file is a zip archive, which ends with its directory."""
    return max(_complete(folder), default=0)


def bring_forward(folder: Path) -> None:
    """Make `epoch_latest.pt` the newest complete checkpoint, if a kill came between the two files of an epoch.

    It becomes a hard link, which open_clip replaces as any file. Damaged files are left where they are.
    """
    latest, numbered = folder / CHECKPOINTS / LATEST, _complete(folder)
    if not numbered or _was_written_last(latest, numbered[max(numbered)]):
        return
    latest_epoch = _epoch_of(latest)
    newer = sorted((epoch for epoch in numbered if epoch > latest_epoch), reverse=True)
    newest = next((numbered[epoch] for epoch in newer if _epoch_of(numbered[epoch]) == epoch), None)
    if newest is None:
        return
    temporary = latest.with_name(f".{LATEST}.{os.getpid()}")
    drop(temporary)
    with suppress(OSError):  # a disk without links: the epoch is trained again
        os.link(newest, temporary)
        os.rename(temporary, latest)


def _numbered(folder: Path) -> dict[int, Path]:
    """Epoch -> its checkpoint in a folder."""
    return {int(match[1]): path for path in folder.glob("epoch_*.pt") if (match := _OF_AN_EPOCH.fullmatch(path.name))}


def _complete(folder: Path) -> dict[int, Path]:
    """Epoch -> its checkpoint of a training, if that is complete."""
    return {epoch: path for epoch, path in _numbered(folder / CHECKPOINTS).items() if zipfile.is_zipfile(path)}


def _was_written_last(latest: Path, newest: Path) -> bool:
    """True if no kill came between the two files; so large files are read only after one."""
    return latest.exists() and latest.stat().st_mtime_ns >= newest.stat().st_mtime_ns and zipfile.is_zipfile(latest)


def _epoch_of(path: Path) -> int:
    """Finished epochs of a checkpoint; 0 if its checksums or its content are wrong."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return 0
        content = _loaded(path)
        return _epoch_in(content) or 0 if {"state_dict", "optimizer"} <= content.keys() else 0
    except (OSError, zipfile.BadZipFile, InputError):
        return 0
