"""Where the checkpoint of a training by open_clip lies, and what is in it."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import InputError
from training.export.params import PARAMS

if TYPE_CHECKING:
    import torch

CHECKPOINTS = "checkpoints"
LATEST = "epoch_latest.pt"
_OF_AN_EPOCH = re.compile(r"epoch_(\d+)\.pt")
_OF_DDP = "module."


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The weights of a training at the end of an epoch.

    Attributes:
        path: of the file.
        epoch: epochs that were over; None where the file does not say.
        weights: name -> tensor, with the names of the model itself.
        params: the arguments of the training; None where no such file lies beside it.
    """

    path: Path
    epoch: int | None
    weights: Mapping[str, torch.Tensor]
    params: Path | None


def open_checkpoint(given: Path) -> Checkpoint:
    """The checkpoint of a file, or the latest one of a training's folder.

    Only weights, numbers and texts are loaded, and nothing that a pickle could run. Raises InputError, with a next
    step, where there is none or the file is not one.
    """
    path = given if given.is_file() else latest_in(given)
    content = _loaded(path)
    weights = content.get("state_dict", content)
    if not isinstance(weights, Mapping) or not weights or not all(_is_tensor(one) for one in weights.values()):
        raise InputError(
            f"{path} holds no weights of a model", next_step="give an epoch_N.pt of open_clip, or its training's folder"
        )
    if all(name.startswith(_OF_DDP) for name in weights):
        weights = {name.removeprefix(_OF_DDP): tensor for name, tensor in weights.items()}
    epoch = content.get("epoch") if weights is not content else None
    params = path.resolve().parent.parent / PARAMS
    return Checkpoint(
        path=path,
        epoch=epoch if isinstance(epoch, int) else None,
        weights=weights,
        params=params if params.is_file() else None,
    )


def latest_in(folder: Path) -> Path:
    """The file with the most epochs of a training's folder, or of its `checkpoints`; InputError where there is none."""
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such file or folder", next_step="check the path of the checkpoint")
    place = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    numbered = {int(found[1]): path for path in place.iterdir() if (found := _OF_AN_EPOCH.fullmatch(path.name))}
    latest = place / LATEST
    if latest.is_file() and _epoch_of(latest) > max(numbered, default=0):
        return latest
    if numbered:
        return numbered[max(numbered)]
    raise InputError(
        f"{folder}: holds no checkpoint such as {CHECKPOINTS}/epoch_1.pt",
        next_step="open_clip writes the first one when an epoch is over: train on, or give another folder",
    )


def _epoch_of(path: Path) -> int:
    return int(_loaded(path).get("epoch", 0))


def _loaded(path: Path) -> Mapping[str, Any]:
    import torch

    try:
        # Mapped, because two thirds of the file are the optimizer's.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
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
