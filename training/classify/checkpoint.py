"""Checkpoints: all that a step changes, at one step, complete under its name or not there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import OutputError
from core.storage.durable import drop, fsync_folder, publish
from training.classify.writing import writing

_NAME = re.compile(r"epoch-(\d{4,})-step-(\d{8,})\.pt")

KEPT = 2
"""The newest ones; and the newest at the beginning of an epoch, for the case that only that one is of use."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Moment:
    """Where in a training something is: before step `step` of epoch `epoch`, both counted from 0."""

    epoch: int
    step: int

    @property
    def name(self) -> str:
        """Of the checkpoint."""
        return f"epoch-{self.epoch:04d}-step-{self.step:08d}.pt"

    def __str__(self) -> str:
        """For people: epochs from 1, steps as the log has them."""
        if self.step:
            return f"before step {self.step} of epoch {self.epoch + 1}"
        return f"after epoch {self.epoch}" if self.epoch else "before the first step"


def moments(folder: Path) -> list[Moment]:
    """The moments at which there are checkpoints, the newest first."""
    found = [_NAME.fullmatch(path.name) for path in folder.glob("epoch-*.pt")]
    return sorted((Moment(epoch=int(name[1]), step=int(name[2])) for name in found if name), reverse=True)


def save(folder: Path, moment: Moment, state: Mapping[str, Any]) -> None:
    """Write a checkpoint, durably, and drop those that it makes superfluous."""
    import torch

    temporary = folder / f".{moment.name}.{os.getpid()}"
    try:
        with writing(folder / moment.name, (OSError, RuntimeError)):  # torch's writer raises the latter
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(dict(state), temporary)
            publish(temporary, folder / moment.name)
    finally:
        drop(temporary)
    _drop_old(folder)


def load(folder: Path, moment: Moment) -> dict[str, Any]:
    """What was saved, on the CPU. Nothing in the file is executed. OutputError where it is damaged."""
    import torch

    path = folder / moment.name
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle raise what they like for a damaged file
        raise OutputError(
            f"the checkpoint {path} cannot be read: {type(error).__name__}",
            next_step="remove it; the same command then goes on from the one before",
        ) from error
    return state


def drop_after(folder: Path, moment: Moment) -> None:
    """Drop, durably, the checkpoints behind a moment from which the training goes on."""
    later = [one for one in moments(folder) if one > moment]
    for one in later:
        drop(folder / one.name)
    if later:
        fsync_folder(folder)


def _drop_old(folder: Path) -> None:
    there = moments(folder)
    beginning = next((moment for moment in there if moment.step == 0), None)
    for moment in there[KEPT:]:
        if moment != beginning:
            drop(folder / moment.name)
    for litter in folder.glob(".epoch-*"):  # of a process that was killed while it wrote
        drop(litter)
