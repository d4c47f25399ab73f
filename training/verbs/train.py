"""`embq train`: models from shards, and from their checkpoints models that the workers load."""

from __future__ import annotations

import click

from embq.lazy import Lazy

LATER = {
    "export": ("training.verbs.export", "Write a checkpoint as a folder that the workers load."),
}


@click.group("train", cls=Lazy, later=LATER, epilog="Example: embq train export ./clip ./clip-model")
def command() -> None:
    """Train on the shards that are embedded, and embed with what was trained."""
