"""`embq train`: models from shards, and from their checkpoints models that the workers load."""

from __future__ import annotations

import click

from embq.cli.lazy_group import LazyGroup

LATER = {
    "classify": ("training.verbs.classify", "Train a classifier of timm or torchvision on shards."),
    "openclip": ("training.verbs.openclip", "Train an OpenCLIP model, by open_clip's own entry point."),
    "export": ("training.verbs.export", "Write a checkpoint as a folder that the workers load."),
}


@click.group(
    "train",
    cls=LazyGroup,
    later=LATER,
    epilog="Example: embq train classify shards --validation val-shards --out resnet18",
)
def command() -> None:
    """Train on the shards that are embedded, and embed with what was trained."""
