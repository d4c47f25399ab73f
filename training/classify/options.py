"""The flags of a training, for `embq train classify` and for the processes that it starts: one list."""

from __future__ import annotations

from collections.abc import Callable
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
