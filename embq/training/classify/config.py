"""The settings of a training of a classifier: each field of `Config` is a flag of `embq train classify`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypeVar

import click

from embq.app.cli.sections import section
from embq.training.run.options import COUNT, DEVICE, FROM_0, flag, option, options_of, required

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

BELOW_1 = click.FloatRange(0, 1, max_open=True)


class Resume(Enum):
    """Effect of a changed setting on a training that is resumed."""

    REFUSED = "other weights are learnt: refused"
    EPOCH = "other samples reach each process: an interrupted epoch begins anew"
    FREE = "nothing of what is learnt changes"


def _setting(default: T, help_: str, kind: Any = None, *, resume: Resume = Resume.REFUSED, **extra: Any) -> T:
    """A field with its option, and the effect of a change on a training that is resumed."""
    return option(default, help_, kind, metadata={"resume": resume}, **extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One training. The help text of a field is its description.

    `shards` is in any form that `open_shards` takes; `device` is "cuda" or "cpu".
    """

    shards: str
    out: str = required(
        "Folder of this training.",
        click.Path(file_okay=False),
        metadata={"resume": Resume.FREE},
        name="--output",
        short="-o",
    )
    validation: str = _setting(
        "", "Shards to measure on after each epoch.  [none]", metavar="SHARDS", resume=Resume.FREE
    )
    classes: str = _setting(
        "",
        "Class names by index, a JSON list.  [the classes.json beside the shards]",
        metavar="FILE",
        resume=Resume.FREE,
    )
    arch: str = _setting(
        "resnet18",
        "Model: timm:NAME, torchvision:NAME, or NAME of either, timm first.",
        metavar="NAME",
        name="--model",
        short="-m",
    )
    start: str = _setting(
        "",
        "Initial weights, a safetensors file; nothing is ever downloaded.  [random weights]",
        click.Path(dir_okay=False),
        metavar="FILE",
        resume=Resume.FREE,
    )
    epochs: int = _setting(90, "Passes over the training set.", COUNT)
    batch_size: int = _setting(32, "Samples per step of each process.", COUNT)
    image_size: int = _setting(224, "Width and height of the model's input, in pixels.", click.IntRange(min=8))
    loader_workers: int = _setting(
        4, "Worker processes per device, which read and decode.", FROM_0, resume=Resume.EPOCH, name="--workers"
    )
    shuffle_buffer: int = _setting(1000, "Samples in the shuffle buffer of each worker.", COUNT, metavar="N")
    epoch_samples: int | None = _setting(
        None, "Samples per epoch, of all processes together.  [as sizes.json says]", COUNT, metavar="N"
    )
    splitshards: bool = _setting(
        False, "Exact epochs: each sample once.  [shards drawn with replacement]", is_flag=True
    )
    lr: float = _setting(0.1, "Peak learning rate; it decays to 0 as a cosine.", click.FloatRange(min=0, min_open=True))
    momentum: float = _setting(0.9, "Momentum of SGD.", BELOW_1)
    weight_decay: float = _setting(1e-4, "Weight decay of SGD, on all weights.", click.FloatRange(min=0))
    warmup_steps: int = _setting(0, "Steps of linear warm-up of the learning rate.", FROM_0, metavar="N")
    label_smoothing: float = _setting(0.0, "Label smoothing: part of the target spread over all classes.", BELOW_1)
    clip: float = _setting(0.0, "Clip gradients to this norm.  [off]", click.FloatRange(min=0), metavar="NORM")
    precision: str = _setting(
        "",
        "Compute precision; weights stay fp32.  [bf16 if the GPU supports it, else fp32]",
        click.Choice(["", "fp32", "bf16", "fp16"]),
        metavar="fp32|bf16|fp16",
    )
    seed: int = _setting(0, "Random seed for weights, sample order, augmentation and dropout.", int)
    checkpoint_minutes: float = _setting(
        10.0,
        "Minutes between checkpoints within an epoch; each epoch ends with one too. 0 writes one after every step.",
        click.FloatRange(min=0),
        metavar="M",
        resume=Resume.FREE,
    )
    log_every: int = _setting(20, "Steps between lines of the log.", COUNT, metavar="N", resume=Resume.FREE)
    max_failures: float = _setting(
        0.01,
        "Part of an epoch's samples that may be unreadable before the training stops.",
        click.FloatRange(0, 1),
        metavar="PART",
        resume=Resume.FREE,
    )
    log_keys: bool = _setting(
        False, "Record in OUT/keys which samples each process trained on.", is_flag=True, resume=Resume.FREE
    )
    device: str = _setting("cuda", "Device to train on.", DEVICE, resume=Resume.FREE)

    def arguments(self) -> list[str]:
        """The command line that gives this config, for the processes of the training."""
        flags: list[str] = []
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name == "shards" or value is None or value is False or value == "":
                continue
            flags += [flag(entry)] if value is True else [f"{flag(entry)}={value}"]
        return [*flags, "--", self.shards]


def classify_options(function: F) -> F:
    """The shards, and the options of `Config` but --device, which the options of the launchers have too."""
    options = section("Training")(options_of(Config, without="device")(function))
    return click.argument("shards", type=click.Path())(options)


def differences(recorded: Mapping[str, Any], now: Config, resume: Resume = Resume.REFUSED) -> list[str]:
    """Settings of one kind that have changed, as flags with both values.

    The shards are left out, because their content is compared instead.
    """
    changeable = [entry for entry in fields(now) if entry.name != "shards" and entry.metadata["resume"] is resume]
    return [
        f"{flag(entry)} {_shown(recorded[entry.name])}, now {_shown(getattr(now, entry.name))}"
        for entry in changeable
        if entry.name in recorded and recorded[entry.name] != getattr(now, entry.name)
    ]


def _shown(value: object) -> str:
    if value is None or value is False or value == "":
        return "not given"
    return "given" if value is True else json.dumps(value)
