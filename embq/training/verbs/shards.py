"""`embq shards`: make, count, verify and serve webdataset shards."""

from __future__ import annotations

import click

from embq.app.cli.lazy_group import LazyGroup

LATER = {
    "convert": ("embq.training.verbs.shards_convert", "Write pictures as shards, with their classes and captions."),
    "sum": ("embq.training.verbs.shards_sum", "Contract names of shards to brace expressions, with samples and bytes."),
    "verify": ("embq.training.verbs.shards_verify", "Verify shards and the files beside them."),
    "serve": ("embq.training.verbs.shards_serve", "Serve shards to other machines over HTTP."),
}


@click.group("shards", cls=LazyGroup, later=LATER, epilog="Example: embq shards sum ./shards")
def command() -> None:
    """Make, count, verify and serve webdataset shards for training and embedding."""
