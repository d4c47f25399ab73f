"""The input of a training, checked before anything starts, and its learning rates."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embq.core.errors import InputError
from embq.training.classify.config import Config
from embq.training.shards.names import folder_of
from embq.training.shards.shard_set import Shards, open_shards
from embq.training.shards.sizes import CLASSES, classes_beside

if TYPE_CHECKING:
    from embq.training.classify.process_group import GroupMember
    from embq.training.data.batch import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Learning rate by step: linear warm-up, then half a cosine (SGDR, arXiv:1608.03983, without restarts).

    Attributes:
        highest: reached at the end of the warm-up.
        warmup: steps that it takes.
        epoch_steps: steps of one epoch; in an exact epoch of unequal parts, those of a process with a mean part.
        epochs: of the training.
    """

    highest: float
    warmup: int
    epoch_steps: int
    epochs: int

    @property
    def steps(self) -> int:
        """Steps of the training."""
        return self.epochs * self.epoch_steps

    def lr(self, epoch: int, step: int) -> float:
        """The learning rate of a step, both counted from 0; steps after `epoch_steps` have that of the last."""
        done = epoch * self.epoch_steps + min(step, self.epoch_steps - 1)
        if done < self.warmup:
            return self.highest * (done + 1) / self.warmup
        part = (done - self.warmup) / max(1, self.steps - self.warmup)
        return self.highest * 0.5 * (1 + math.cos(math.pi * part))


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPlan:
    """The input of a training.

    Attributes:
        shards: the training set.
        validation: what is measured on; None for nothing.
        classes: names by index.
        epoch_samples: samples of an epoch, of all processes.
    """

    shards: Shards
    validation: Shards | None
    classes: list[str]
    epoch_samples: int

    def schedule(self, config: Config, world: int) -> Schedule:
        """The learning rates for a number of processes."""
        return Schedule(
            highest=config.lr,
            warmup=config.warmup_steps,
            epoch_steps=max(1, -(-self.epoch_samples // (config.batch_size * world))),
            epochs=config.epochs,
        )

    def view(self, config: Config, member: GroupMember) -> View:
        """The part of the shards that a process reads, and how it reads it."""
        from embq.training.data.batch import View

        return View(
            rank=member.rank,
            world=member.world,
            loader_workers=config.loader_workers,
            batch_size=config.batch_size,
            image_size=config.image_size,
            seed=config.seed,
            shuffle_buffer=config.shuffle_buffer,
            classes=len(self.classes),
            pin_memory=member.device.type == "cuda",
        )


def planned(config: Config) -> InputPlan:
    """Find shards and classes; InputError or UsageError for what is missing or does not fit."""
    shards = open_shards(config.shards)
    classes = _classes(config.classes, shards, config.shards)
    return InputPlan(
        shards=shards,
        validation=_validation(config, classes),
        classes=classes,
        epoch_samples=shards.epoch_samples(config.epoch_samples, "--splitshards" if config.splitshards else ""),
    )


def check_spread(config: Config, plan: InputPlan, world: int) -> str:
    """A note on processes without shards in an exact epoch; "" if all have some."""
    readers, shards = world * max(1, config.loader_workers), len(plan.shards.urls)
    if not config.splitshards or shards >= readers:
        return ""
    idle = [str(rank) for rank in range(shards, world)]
    whose = (
        "some loader workers read nothing"
        if not idle
        else f"process {idle[0]} trains on nothing"
        if len(idle) == 1
        else f"processes {', '.join(idle)} train on nothing"
    )
    return (
        f"{shards} shards for {world} processes with {config.loader_workers} loader workers each: {whose}; fewer "
        "--workers or --num-devices use them all, or more shards (`embq shards convert --samples-per-shard`)"
    )


def _classes(path: str, shards: Shards, expression: str) -> list[str]:
    if path:
        try:
            names = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"--classes {path} cannot be read: {error}", next_step=_CLASSES_ARE) from error
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not names:
            raise InputError(f"--classes {path} is no list of names", next_step=_CLASSES_ARE)
        return names
    class_names = classes_beside(folder_of(shards.urls[0]))
    if not class_names:
        raise InputError(
            f"{expression}: beside the shards there is no {CLASSES}, so the number of classes is not known",
            next_step=f"give --classes FILE; {_CLASSES_ARE}",
        )
    return class_names


_CLASSES_ARE = 'it is a JSON list of names, the first of class 0: ["ant", "bee"]'


def _validation(config: Config, classes: list[str]) -> Shards | None:
    if not config.validation:
        return None
    shards = open_shards(config.validation)
    theirs = classes_beside(folder_of(shards.urls[0]))
    if theirs is not None and theirs != classes:
        first = next((i for i, (a, b) in enumerate(zip(theirs, classes, strict=False)) if a != b), None)
        differ = (
            f"{len(theirs)} classes instead of {len(classes)}"
            if first is None
            else f"class {first} is {theirs[first]!r} there, and {classes[first]!r} in the training set"
        )
        raise InputError(
            f"--validation {config.validation} is of other classes: {differ}",
            next_step="convert the validation pictures with the classes of the training set "
            "(`embq shards convert --classes`)",
        )
    return shards
