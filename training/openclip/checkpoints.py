"""The checkpoints of a training by open_clip, of which the newest that is whole is the one to go on from.

At the end of an epoch open_clip writes `epoch_N.pt` under its final name, and then the same again as `epoch_latest.pt`,
which is replaced as a whole. `--resume latest` takes only that.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from core.storage.durable import drop

CHECKPOINTS = "checkpoints"
LATEST = "epoch_latest.pt"


def epochs_done(folder: Path) -> int:
    """Epochs of which the checkpoint in a training's folder was written to its end.

    The file is a zip archive, whose directory stands there.
    """
    return max(_numbered(folder), default=0)


def bring_forward(folder: Path) -> None:
    """Have `epoch_latest.pt` be the newest whole checkpoint, where a kill came between the two files of an epoch.

    It becomes another name of that file, which open_clip replaces as any other. A file that is cut, or lost a part
    when its machine went down, is left where it is.
    """
    latest, numbered = folder / CHECKPOINTS / LATEST, _numbered(folder)
    if not numbered or _was_written_last(latest, numbered[max(numbered)]):
        return
    known = _epoch_of(latest)
    newer = sorted((epoch for epoch in numbered if epoch > known), reverse=True)
    whole = next((numbered[epoch] for epoch in newer if _epoch_of(numbered[epoch]) == epoch), None)
    if whole is None:
        return
    temporary = latest.with_name(f".{LATEST}.{os.getpid()}")
    drop(temporary)
    with suppress(OSError):  # a disk without links: the epoch is trained again
        os.link(whole, temporary)
        os.rename(temporary, latest)


def _numbered(folder: Path) -> dict[int, Path]:
    """Epochs, and their checkpoints that have an end."""
    found = {path.stem.rpartition("_")[2]: path for path in (folder / CHECKPOINTS).glob("epoch_*.pt")}
    return {int(name): path for name, path in found.items() if name.isdecimal() and zipfile.is_zipfile(path)}


def _was_written_last(latest: Path, newest: Path) -> bool:
    """Whether it is as it always is but for a kill; so big files are only read where that came."""
    return latest.exists() and latest.stat().st_mtime_ns >= newest.stat().st_mtime_ns and zipfile.is_zipfile(latest)


def _epoch_of(path: Path) -> int:
    """Epochs that a checkpoint was made after; 0 where it is not whole, every bit by its checksum."""
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return 0
        content: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return int(content["epoch"]) if {"state_dict", "optimizer"} <= content.keys() else 0
    except (OSError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError, EOFError, ValueError, KeyError):
        return 0
