"""`embq train classify`: a classifier from shards, on one device or many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from embq.cli.options import json_option
from training.classify.config import Config, classify_options
from training.launch.options import launch_options

if TYPE_CHECKING:
    from training.launch.options import Where


@click.command(
    "classify",
    epilog="Example: embq train classify 'shards/train-{000000..001281}.tar' --validation 'shards/val-*.tar' "
    "--arch timm:resnet50 --splitshards --out resnet50",
)
@classify_options
@launch_options
@json_option
def command(where: Where, as_json: bool, **said: Any) -> int:
    """Train a classifier of timm or torchvision on SHARDS.

    SHARDS are shards, braces, a pattern, a folder or a URL, several joined by ::. A training that was interrupted goes
    on exactly where it was: give the same command again. Weights are never downloaded.
    """
    from training.classify.plan import planned
    from training.launch.launcher import launch

    config = Config(device=where.device, **said)
    planned(config)  # what can be told before many processes are started
    inputs = [given for given in (config.shards, config.validation, config.classes, config.start) if given]
    return launch("training.classify", [*(["--json"] if as_json else []), *config.arguments()], where, inputs=inputs)
