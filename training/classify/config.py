"""What one training of a classifier is, as its flags say it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

SHARE = click.FloatRange(0, 1)
COUNT = click.IntRange(min=1)


def classify_options(function: F) -> F:
    """Every field of `Config` but `device`, which the launchers ask for too."""
    for decorate in reversed((*_input_options(), *_step_options(), *_learning_options(), *_keeping_options())):
        function = decorate(function)
    return function


def _input_options() -> tuple[Callable[[F], F], ...]:
    """What is trained on what, and where it is kept."""
    return (
        click.argument("shards"),
        click.option("--out", "-o", required=True, type=click.Path(file_okay=False), help="Folder of this training."),
        click.option(
            "--validation", default="", metavar="SHARDS", help="Shards to measure on after each epoch.  [none]"
        ),
        click.option(
            "--classes",
            default="",
            metavar="FILE",
            help="Names of the classes, by index.  [the classes.json beside the shards]",
        ),
        click.option(
            "--arch",
            default="resnet18",
            show_default=True,
            metavar="NAME",
            help="timm:NAME, torchvision:NAME, or NAME of either, timm first.",
        ),
        click.option(
            "--start",
            default="",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Begin with the weights of this safetensors file; nothing is ever downloaded.  [random weights]",
        ),
    )


def _step_options() -> tuple[Callable[[F], F], ...]:
    """Which samples come in a step and in an epoch, and how they are read."""
    return (
        click.option("--epochs", default=90, show_default=True, type=COUNT, help="How often to go through all."),
        click.option(
            "--batch-size", default=32, show_default=True, type=COUNT, help="Samples of a process in one step."
        ),
        click.option(
            "--image-size", default=224, show_default=True, type=click.IntRange(min=8), help="Pixels on each side."
        ),
        click.option(
            "--loader-workers",
            default=4,
            show_default=True,
            type=click.IntRange(min=0),
            help="Processes that read and decode, for each that trains.",
        ),
        click.option(
            "--shuffle-buffer",
            default=1000,
            show_default=True,
            type=COUNT,
            metavar="N",
            help="Samples among which a loader worker draws the next one.",
        ),
        click.option(
            "--epoch-samples",
            default=None,
            type=COUNT,
            metavar="N",
            help="Samples of an epoch, of all processes together.  [what sizes.json says]",
        ),
        click.option(
            "--splitshards", is_flag=True, help="Exact epochs: each sample once.  [shards drawn with replacement]"
        ),
    )


def _learning_options() -> tuple[Callable[[F], F], ...]:
    """How the weights change."""
    return (
        click.option(
            "--lr",
            default=0.1,
            show_default=True,
            type=click.FloatRange(min=0, min_open=True),
            help="Highest learning rate; it falls to 0 as a cosine.",
        ),
        click.option(
            "--momentum", default=0.9, show_default=True, type=click.FloatRange(0, 1, max_open=True), help="Of SGD."
        ),
        click.option(
            "--weight-decay", default=1e-4, show_default=True, type=click.FloatRange(min=0), help="Of SGD, on all."
        ),
        click.option(
            "--warmup-steps",
            default=0,
            show_default=True,
            type=click.IntRange(min=0),
            metavar="N",
            help="Steps in which the learning rate rises to its highest.",
        ),
        click.option(
            "--label-smoothing",
            default=0.0,
            show_default=True,
            type=click.FloatRange(0, 1, max_open=True),
            help="Part of the target that is spread over all classes.",
        ),
        click.option(
            "--clip",
            default=0.0,
            type=click.FloatRange(min=0),
            metavar="NORM",
            help="Cut gradients to this norm.  [as they are]",
        ),
        click.option(
            "--precision",
            default="",
            type=click.Choice(["", "fp32", "bf16", "fp16"]),
            metavar="fp32|bf16|fp16",
            help="What is computed in; weights stay fp32.  [bf16 where the GPU has it, else fp32]",
        ),
        click.option("--seed", default=0, show_default=True, type=int, help="Of weights, orders and augmentation."),
    )


def _keeping_options() -> tuple[Callable[[F], F], ...]:
    """What is kept and told of it."""
    return (
        click.option(
            "--checkpoint-minutes",
            default=10.0,
            show_default=True,
            type=click.FloatRange(min=0),
            metavar="M",
            help="Between two checkpoints; each epoch ends with one too. 0 keeps one after every step.",
        ),
        click.option(
            "--log-every",
            default=20,
            show_default=True,
            type=COUNT,
            metavar="N",
            help="Steps between lines of the log.",
        ),
        click.option(
            "--max-failures",
            default=0.01,
            show_default=True,
            type=SHARE,
            metavar="PART",
            help="Part of an epoch's samples that may be unreadable before the training stops.",
        ),
        click.option("--log-keys", is_flag=True, help="Note in OUT/keys which samples each process trained on."),
    )


def device_option(function: F) -> F:
    """--device, for a process that is told by whoever started it."""
    return click.option(
        "--device", default="cuda", show_default=True, type=click.Choice(["cuda", "cpu"]), help="What computes."
    )(function)


ANEW = {"resume": "epoch"}
"""Another value changes who reads what, but not what is learnt of it: an interrupted epoch begins anew."""
FREE = {"resume": "free"}
"""Another value changes nothing of what is learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One training. A field without a mark decides what is learnt: a checkpoint goes on with the same value only.

    Attributes:
        shards: the training set, in any form that `open_shards` takes.
        out: the folder of the training.
        validation: shards to measure on after each epoch; "" for none.
        classes: a classes.json; "" for the one beside the shards.
        arch: `timm:NAME`, `torchvision:NAME`, or NAME, looked for in that order.
        start: a safetensors file with the weights to begin with; "" for random ones.
        epochs: how often the training set is gone through.
        batch_size: samples of one process in one step.
        image_size: pixels on each side of what the model sees.
        loader_workers: processes that read and decode, for each process that trains; 0 for none.
        shuffle_buffer: samples among which a loader worker draws the next one.
        epoch_samples: samples of one epoch, of all processes; None for what sizes.json says.
        splitshards: exact epochs, each sample once; else resampled ones.
        lr: the highest learning rate.
        momentum: of SGD.
        weight_decay: of SGD.
        warmup_steps: steps in which the learning rate rises; from there on it falls as a cosine, to 0.
        label_smoothing: part of the target that is spread over all classes.
        clip: highest norm of the gradient; 0 for any.
        precision: fp32, bf16 or fp16; "" for bf16 where the GPU computes in it, else fp32.
        seed: of weights, orders, augmentation and dropout.
        checkpoint_minutes: between two checkpoints within an epoch; each epoch ends with one too.
        log_every: steps from one line of the log to the next.
        max_failures: part of an epoch's samples that may be unreadable before the training stops.
        log_keys: whether to note in OUT/keys which samples each process trained on.
        device: "cuda" or "cpu".
    """

    shards: str
    out: str = field(metadata=FREE)
    validation: str = field(default="", metadata=FREE)
    classes: str = field(default="", metadata=FREE)
    arch: str = "resnet18"
    start: str = field(default="", metadata=FREE)
    epochs: int = 90
    batch_size: int = 32
    image_size: int = 224
    loader_workers: int = field(default=4, metadata=ANEW)
    shuffle_buffer: int = 1000
    epoch_samples: int | None = None
    splitshards: bool = False
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup_steps: int = 0
    label_smoothing: float = 0.0
    clip: float = 0.0
    precision: str = ""
    seed: int = 0
    checkpoint_minutes: float = field(default=10.0, metadata=FREE)
    log_every: int = field(default=20, metadata=FREE)
    max_failures: float = field(default=0.01, metadata=FREE)
    log_keys: bool = field(default=False, metadata=FREE)
    device: str = field(default="cuda", metadata=FREE)

    def arguments(self) -> list[str]:
        """The flags that say this, for another process of the same training."""
        said: list[str] = []
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "shards" or value is None or value is False or value == "":
                continue
            said += [flag(one.name)] if value is True else [f"{flag(one.name)}={value}"]
        return [*said, "--", self.shards]

    def to_json(self) -> dict[str, Any]:
        """Every field by its name."""
        return asdict(self)


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def differences(before: Mapping[str, Any], now: Config) -> list[str]:
    """The flags that would change what a training learns, with both values; other shards are found by their content."""
    return _differing(before, now, {})


def rereads(before: Mapping[str, Any], now: Config) -> list[str]:
    """The flags that change only who reads what, with both values."""
    return _differing(before, now, ANEW)


def _differing(before: Mapping[str, Any], now: Config, mark: Mapping[str, str]) -> list[str]:
    marked = [one.name for one in fields(now) if one.metadata == mark and one.name != "shards"]
    return [
        f"{flag(name)} {_shown(before[name])}, now {_shown(getattr(now, name))}"
        for name in marked
        if name in before and before[name] != getattr(now, name)
    ]


def _shown(value: object) -> str:
    return (
        "not given"
        if value is None or value is False or value == ""
        else "given"
        if value is True
        else json.dumps(value)
    )
