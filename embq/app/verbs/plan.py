"""`embq plan`: time, cost and needs of a run on devices, before anything is started."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import click

from embq.app.cli.run_options import content_options
from embq.app.cli.sections import SectionedCommand, option, section
from embq.app.cli.shared_options import broker_option, json_option, settings_with, threads_option
from embq.core.errors import UsageError


@click.command(
    "plan", cls=SectionedCommand, epilog="Example: embq plan photos -m open_clip:ViT-B-32/openai --gpus 8xH100,4xL4"
)
@click.argument("inputs", type=click.Path(readable=False), nargs=-1, metavar="[INPUT]...")
@section("Devices")
@option(
    "--gpus", required=True, metavar="LIST", help="Devices: 8xH100,4xL4; 4x8xA100 for 4 machines of 8; cpu for one."
)
@threads_option
@option("--storage-gbps", "gbps", type=click.FloatRange(min=0), default=0.0, help="Gbit/s of the storage.  [no limit]")
@option("--prices", type=click.Path(), help="TOML file with the price of an hour of each card: H100 = 2.5.")
@section("Rows without INPUT")
@option("--image-count", "images", type=click.FloatRange(min=1), help="Number of images.")
@option("--text-count", "texts", type=click.FloatRange(min=1), help="Number of texts.")
@option("--bytes-per-image", "--bytes-per-text", "bytes_each", type=click.FloatRange(min=1), help="Mean size of one.")
@content_options
@broker_option
@json_option
def command(inputs: tuple[str, ...], gpus: str, prices: str | None, broker: str, as_json: bool, **options: Any) -> None:
    """Tell time, cost, limit and needs of a run on devices that need not be there. Nothing is written or sent.

    INPUT is counted as by `embq run --dry-run`, or --image-count or --text-count names its rows. Speeds are those that
    the broker or this machine has measured, else those of an H100, scaled to the card. Each figure names its source.
    """
    from embq.app.cli.authorization import configured_broker
    from embq.app.cli.run_options import request_from
    from embq.app.planning.fleet_plan import lines
    from embq.app.planning.request_plan import planned, prices_of
    from embq.app.planning.speeds import cards_of

    images, texts, bytes_each = (options.pop(name) for name in ("images", "texts", "bytes_each"))
    if bool(inputs) + bool(images) + bool(texts) != 1 or bool(inputs) == bool(bytes_each):
        raise UsageError(
            "the rows are not clear",
            next_step="name INPUT, or --image-count and --bytes-per-image, or --text-count and --bytes-per-text",
        )
    named = None if inputs else ("image" if images else "text", images or texts, bytes_each)
    cards, client = cards_of(gpus), configured_broker(settings_with(broker))
    settings = {"threads": options.pop("threads"), "gbps": options.pop("gbps"), "prices": prices_of(prices, cards)}
    with tempfile.TemporaryDirectory() as folder:  # of an output that is not there
        request = request_from(inputs, {**options, "output": f"{folder}/out", "priority": None})
        plan = planned(request, cards, client, named=named, **settings)
    click.echo(json.dumps(plan) if as_json else "\n".join(lines(plan)))
