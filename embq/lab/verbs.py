"""`embq bench`: measures the speed of this machine against workers, devices, unit size and images."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from embq.app.cli.lazy_group import LazyGroup
from embq.app.cli.run_options import INPUT_FORMATS
from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import (
    batch_size_option,
    decode_option,
    devices_option,
    json_option,
    model_option,
    option_group,
    precision_option,
    threads_option,
)
from embq.app.cli.verb_table import BENCH_VERBS

experiment_options = option_group(
    model_option(
        "Model that embeds the texts.  [minilm if it is installed, else stub:384?ms_per_sample=10]", default=""
    ),
    precision_option,
    option(
        "--texts",
        default="",
        metavar="FILE",
        help="Texts to embed, in any format of `embq run`.  [docstrings of Python's standard library]",
    ),
    option(
        "--records",
        type=click.IntRange(min=1),
        help="Records of each run; texts are repeated as needed.  [as many as fit in --seconds]",
    ),
    option(
        "--seconds",
        type=click.FloatRange(min=0.1, max=3600),
        default=8.0,
        metavar="S",
        help="Approximate duration of each run.",
    ),
    option("--replicates", type=click.IntRange(min=2, max=100), default=3, metavar="R", help="Runs of each condition."),
    devices_option,
    option(
        "--corpus-size", type=click.IntRange(min=1), help="Records of your corpus: estimate the days that it takes."
    ),
    option("--seed", type=int, default=0, help="Random seed for the order of runs and texts."),
    option(
        "--output",
        "-o",
        default="embq-bench",
        type=click.Path(file_okay=False),
        help="Folder for the figures and the plot; earlier ones are replaced.",
    ),
    json_option,
)
"""Options of every experiment."""

unit_size_option = option("--unit-size", type=click.IntRange(min=1, max=100_000), default=16, help="Samples per unit.")


def numbers(most: int) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
    """A callback for a list such as 1,2,4,8: sorted, each once, none above `most`."""

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
        parts = [part.strip() for part in value.split(",") if part.strip()]
        values = sorted({int(part) for part in parts if part.isascii() and part.isdigit()})
        if not values or len(values) < len(set(parts)) or not 1 <= values[0] <= values[-1] <= most:
            raise click.BadParameter(f"{value!r} is not a list such as 1,2,4 of numbers from 1 to {most:,}", ctx, param)
        return tuple(values)

    return parse


@click.group(
    "bench",
    cls=LazyGroup,
    later=BENCH_VERBS,
    epilog="Examples: embq bench workers | embq bench devices --devices cuda:0,cuda:1,cuda:2 | embq bench unit-size",
)
def command() -> None:
    """Measure the speed of this machine against workers, devices and unit size.

    `images` finds the bottleneck for your own images. Each other experiment runs the services of `embq run` in a
    temporary folder; the model is loaded and warmed up before the first measurement. A table is printed, and figures
    and a plot are written to a folder.
    """


@command.command("workers", cls=SectionedCommand, epilog="Example: embq bench workers --model minilm --counts 1,2,4,8")
@option(
    "--counts",
    default="1,2,4,8",
    metavar="LIST",
    callback=numbers(64),
    help="Worker processes on the device, one condition each.",
)
@unit_size_option
@experiment_options
def workers(counts: tuple[int, ...], unit_size: int, **options: Any) -> int:
    """Measure speed and memory of 1, 2, 4 and 8 workers on one device."""
    from embq.lab import conduct, experiments

    devices, model = conduct.on_one(options["devices"], options["model"])
    return conduct.conduct(
        experiments.worker_conditions(devices, counts, unit_size), experiments.worker_result, model, options
    )


@command.command(
    "devices",
    cls=SectionedCommand,
    epilog="Example: embq bench devices --devices sim:10,sim:1,sim:1 --model 'stub:384?ms_per_sample=10'",
)
@unit_size_option
@experiment_options
def devices(unit_size: int, **options: Any) -> int:
    """Measure several devices together, one worker on each, and compare with the sum of their speeds alone.

    Where there is only one device, three are simulated: sim:10,sim:1,sim:1, the first ten times as fast as the others.
    """
    from embq.lab import conduct, experiments

    chosen, model = conduct.on_several(options["devices"], options["model"])
    return conduct.conduct(experiments.device_conditions(chosen, unit_size), experiments.device_result, model, options)


@command.command(
    "unit-size", cls=SectionedCommand, epilog="Example: embq bench unit-size --model minilm --sizes 1,10,100,1000"
)
@option(
    "--sizes",
    default="1,10,100,1000",
    metavar="LIST",
    callback=numbers(100_000),
    help="Records per unit, one condition each.",
)
@experiment_options
def unit_size(sizes: tuple[int, ...], **options: Any) -> int:
    """Measure the speed against the number of records per unit."""
    from embq.lab import conduct, experiments

    devices, model = conduct.on_all(options["devices"], options["model"])
    return conduct.conduct(
        experiments.unit_size_conditions(devices, sizes), experiments.unit_size_result, model, options
    )


@command.command(
    "images",
    cls=SectionedCommand,
    epilog="Example: embq bench images 'shards/*.tar' -m open_clip:ViT-B-32/laion2b_s34b_b79k --decode cpu-fast",
)
@click.argument("inputs", type=click.Path(readable=False), nargs=-1, required=True, metavar="INPUT...")
@model_option("Model that embeds the images.", required=True)
@precision_option
@decode_option
@devices_option
@option(
    "--samples",
    type=click.IntRange(min=1, max=20_000),
    default=2000,
    help="Samples of the inputs, at most; 512 MB at most.",
)
@option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=3600),
    default=6.0,
    metavar="S",
    help="Approximate duration for each stage; all together twice as long.",
)
@threads_option
@batch_size_option
@option("--input-format", type=click.Choice(sorted(INPUT_FORMATS)), help="Format of the inputs.  [by their names]")
@option(
    "--image-key",
    default="",
    metavar="LIST",
    help="Image extensions in shards and folders, in order of preference: 'jpg;png'.  [all known]",
)
@option("--image-column", default="", metavar="NAME", help="Column of images, or of their paths in the folder.")
@json_option
def images(inputs: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Find the bottleneck of embedding the images of INPUT on this machine: reading, decoding or the device.

    Measures each stage alone and all together with a sample of the images, in this process and with the code of
    workers, but without broker and writer. Takes about a minute and writes nothing.
    """
    from embq.core import benchmark_record
    from embq.core.errors import Exit
    from embq.lab import conduct
    from embq.lab.images import ImageBenchOptions, measure
    from embq.sources.reader_options import ReadOptions, extension_list

    (device, *_), _ = conduct.on_one(options["devices"], options["model"])
    bench_options = ImageBenchOptions(
        inputs=inputs,
        model=options["model"],
        precision=conduct.chosen_precision(options["precision"], [device]),
        decode=options["decode"],
        device=device,
        read_options=ReadOptions(
            image_column=options["image_column"],
            image_keys=extension_list(options["image_key"]),
            kind=INPUT_FORMATS[options["input_format"]] if options["input_format"] else "",
        ),
        samples=options["samples"],
        seconds=options["seconds"],
        threads=options["threads"],
        batch_size=options["batch_size"],
    )
    conduct.warn_of_load()
    result = measure(bench_options, lambda step: click.echo(step, err=True), conduct.until_stopped())
    if as_json:
        click.echo(json.dumps({"schema": 1, **benchmark_record.described("images", result.describe())}))
    else:
        click.echo("\n".join(result.lines()))
    return Exit.DONE
