"""`embq train`: train models on shards, and export them for the workers."""

from __future__ import annotations

import click

from embq.app.cli.lazy_group import LazyGroup

LATER = {
    "classify": ("embq.training.verbs.classify", "Train a classifier of timm or torchvision on shards."),
    "openclip": ("embq.training.verbs.openclip", "Train an OpenCLIP model with open_clip's own training."),
    "export": ("embq.training.verbs.export", "Write a checkpoint as a folder that the workers load."),
}


@click.group(
    "train",
    cls=LazyGroup,
    later=LATER,
    epilog="Example: embq train classify shards --validation val-shards --output resnet18",
)
def command() -> None:
    """Train models on shards, and export them to embed with."""
