"""`embq bench images`: finds the bottleneck for a user's images, and the cores needed."""

from __future__ import annotations

import json
from typing import Any

import click

from embq.cli.options import (
    batch_size_option,
    decode_option,
    devices_option,
    json_option,
    precision_option,
    prepare_threads_option,
)
from embq.cli.run_options import INPUT_FORMATS


@click.command(
    "images",
    epilog="Example: embq bench images 'shards/*.tar' -m open_clip:ViT-B-32/laion2b_s34b_b79k --decode cpu-fast",
)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--model", "-m", required=True, metavar="SPEC", help="Model that embeds the images.")
@precision_option
@decode_option
@devices_option
@click.option(
    "--samples",
    type=click.IntRange(min=1, max=20_000),
    default=2000,
    show_default=True,
    metavar="N",
    help="Most images to sample from the inputs; at most 512 MB.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=3600),
    default=6.0,
    show_default=True,
    metavar="S",
    help="Approximate duration for each stage; all together twice as long.",
)
@prepare_threads_option
@batch_size_option
@click.option(
    "--input-format", type=click.Choice(sorted(INPUT_FORMATS)), help="Format of the inputs.  [by their names]"
)
@click.option("--image-key", default="", metavar="LIST", help="Extensions of images in shards and folders.  [all]")
@click.option("--image-column", default="", metavar="NAME", help="Column of images or of image paths.")
@json_option
def command(inputs: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Find the bottleneck of embedding the images of INPUT on this machine: reading, decoding or the device.

    Measures each stage alone and all together with a sample of the images, in this process and with the code of
    workers, but without broker and writer. Takes about a minute and writes nothing.
    """
    from core import benchmark_record
    from core.errors import Exit
    from core.service.stopping import StopFlag
    from embq.bench import conduct
    from embq.bench.images import ImageBenchOptions, measure
    from sources.options import ReadOptions, extension_list

    (device, *_), _ = conduct.on_one(options["devices"], options["model"])
    asked = ImageBenchOptions(
        inputs=inputs,
        model=options["model"],
        precision=conduct.chosen_precision(options["precision"], [device]),
        decode=options["decode"],
        device=device,
        options=ReadOptions(
            image_column=options["image_column"],
            image_keys=extension_list(options["image_key"]),
            kind=INPUT_FORMATS[options["input_format"]] if options["input_format"] else "",
        ),
        samples=options["samples"],
        seconds=options["seconds"],
        threads=options["prepare_threads"],
        batch_size=options["batch_size"],
    )
    stopped = StopFlag()
    stopped.install()

    def look() -> None:
        if stopped():
            raise KeyboardInterrupt

    conduct.warn_of_load()
    found = measure(asked, lambda what: click.echo(what, err=True), look)
    if as_json:
        click.echo(json.dumps({"schema": 1, **benchmark_record.described("images", found.describe())}))
    else:
        click.echo("\n".join(found.lines()))
    return Exit.DONE
