"""`embq train classify`: train a classifier on shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from embq.app.cli.sections import SectionedCommand
from embq.app.cli.shared_options import json_option
from embq.training.classify.config import Config, classify_options
from embq.training.launch.launch_options import launch_options

if TYPE_CHECKING:
    from embq.training.launch.launch_options import Where


@click.command(
    "classify",
    cls=SectionedCommand,
    epilog="Example: embq train classify 'shards/train-{000000..001281}.tar' --validation 'shards/val-*.tar' "
    "--model timm:resnet50 --splitshards --output resnet50",
)
@classify_options
@launch_options
@json_option
def command(where: Where, as_json: bool, **flags: Any) -> int:
    """Train a classifier of timm or torchvision on SHARDS.

    SHARDS is a shard, a brace expression, a pattern, a folder or a URL, or several of them joined by ::. The same
    command resumes an interrupted training at the very next batch. Weights are never downloaded.
    """
    from embq.training.classify.inputs import planned
    from embq.training.launch.launcher import launch

    config = Config(device=where.device, **flags)
    planned(config)  # raises before any process is started
    inputs = [path for path in (config.shards, config.validation, config.classes, config.start) if path]
    return launch(
        "embq.training.classify", [*(["--json"] if as_json else []), *config.arguments()], where, inputs=inputs
    )
