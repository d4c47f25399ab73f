"""`embq bench`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from embq.cli.lazy_group import LazyGroup
from embq.cli.options import devices_option, json_option, option_group, precision_option
from embq.verbs.bench_images import command as images

CHUNKS = 20_648_877
"""Chunks of the English Wikipedia that were embedded on three cards when the queue was first tried."""


experiment_options = option_group(
    click.option(
        "--model",
        "-m",
        default="",
        metavar="SPEC",
        help="What embeds the texts.  [minilm where it is installed, else stub:384?ms_per_sample=10]",
    ),
    precision_option,
    click.option(
        "--texts",
        default="",
        metavar="FILE",
        help="Texts to embed, in any form that `embq run` reads.  [docstrings of Python's own library]",
    ),
    click.option(
        "--records",
        type=click.IntRange(min=1),
        default=None,
        metavar="N",
        help="Records of each run; texts are repeated if need be.  [as many as --seconds allow]",
    ),
    click.option(
        "--seconds",
        type=click.FloatRange(min=0.1, max=3600),
        default=8.0,
        show_default=True,
        metavar="S",
        help="What each run takes, about, by the speed of the warm-up.",
    ),
    click.option(
        "--replicates",
        type=click.IntRange(min=2, max=100),
        default=3,
        show_default=True,
        metavar="R",
        help="Runs of each condition.",
    ),
    devices_option,
    click.option(
        "--chunks",
        type=click.IntRange(min=1),
        default=CHUNKS,
        show_default=True,
        metavar="N",
        help="Say how long so many would take.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of the order of runs and texts."),
    click.option(
        "--out",
        "-o",
        default="embq-bench",
        show_default=True,
        type=click.Path(file_okay=False),
        help="Folder for the figures and the picture; those of an earlier time are replaced.",
    ),
    json_option,
)
"""What all experiments have in common."""

unit_size_option = click.option(
    "--unit-size",
    type=click.IntRange(min=1, max=100_000),
    default=16,
    show_default=True,
    metavar="N",
    help="Records per unit.",
)


def numbers(most: int) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
    """A callback for a list such as 1,2,4,8: sorted, each once, none above `most`."""

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
        parts = [part.strip() for part in value.split(",") if part.strip()]
        found = sorted({int(part) for part in parts if part.isascii() and part.isdigit()})
        if not found or len(found) < len(set(parts)) or not 1 <= found[0] <= found[-1] <= most:
            raise click.BadParameter(f"{value!r} is not a list such as 1,2,4 of numbers from 1 to {most:,}", ctx, param)
        return tuple(found)

    return parse


@click.group(
    "bench",
    cls=LazyGroup,
    later={"mmoclip": ("training.verbs.mmoclip", "The MMoCLIP benchmark: ViT-L-14 on 3.2 million made-up pairs.")},
    epilog="Examples: embq bench workers | embq bench devices --devices cuda:0,cuda:1,cuda:2 | embq bench unit-size",
)
def command() -> None:
    """Measure this machine: what more workers bring, what several devices do together, how large units should be.

    `images` says what limits your own images. Each other experiment runs the services of `embq run` in a temporary
    folder. The model is loaded, and has embedded something, before the first run is timed. A table goes to stdout;
    figures and a picture go to a folder.
    """


@command.command("workers", epilog="Example: embq bench workers --model minilm --counts 1,2,4,8")
@click.option(
    "--counts",
    default="1,2,4,8",
    show_default=True,
    metavar="LIST",
    callback=numbers(64),
    help="Worker processes on the device, one condition each.",
)
@unit_size_option
@experiment_options
def workers(counts: tuple[int, ...], unit_size: int, **options: Any) -> int:
    """What 1, 2, 4 and 8 workers do on one device: speed, and memory."""
    from embq.bench import conduct, workers

    devices, model = conduct.on_one(options["devices"], options["model"])
    return conduct.conduct(workers.conditions(devices, counts, unit_size), workers.account, model, options)


@command.command(
    "devices", epilog="Example: embq bench devices --devices sim:10,sim:1,sim:1 --model 'stub:384?ms_per_sample=10'"
)
@unit_size_option
@experiment_options
def devices(unit_size: int, **options: Any) -> int:
    """Whether several devices, one worker on each, are as fast together as the sum of what each does alone.

    Where there is only one device, three are simulated: sim:10,sim:1,sim:1, one ten times as fast as the others.
    """
    from embq.bench import conduct, devices

    chosen, model = conduct.on_several(options["devices"], options["model"])
    return conduct.conduct(devices.conditions(chosen, unit_size), devices.account, model, options)


@command.command("unit-size", epilog="Example: embq bench unit-size --model minilm --sizes 1,10,100,1000")
@click.option(
    "--sizes",
    default="1,10,100,1000",
    show_default=True,
    metavar="LIST",
    callback=numbers(100_000),
    help="Records per unit, one condition each.",
)
@experiment_options
def unit_size(sizes: tuple[int, ...], **options: Any) -> int:
    """How the speed depends on the number of records that a worker takes from the queue at once."""
    from embq.bench import conduct, unit_size

    devices, model = conduct.on_all(options["devices"], options["model"])
    return conduct.conduct(unit_size.conditions(devices, sizes), unit_size.account, model, options)


command.add_command(images)
