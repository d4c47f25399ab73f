"""`embq train`: models from shards, and from their checkpoints models that the workers load."""

from __future__ import annotations

import click

from embq.lazy import Lazy


@click.group("train", cls=Lazy, later={}, epilog="Example: embq train --help")
def command() -> None:
    """Train on the shards that are embedded, and embed with what was trained."""
