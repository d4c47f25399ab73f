"""`embq shards`: webdataset shards from pictures, and what is in a folder of them."""

from __future__ import annotations

import click

from embq.cli.lazy_group import LazyGroup

LATER = {
    "convert": ("training.verbs.shards_convert", "Write pictures as shards, with their classes and captions."),
    "sum": ("training.verbs.shards_sum", "Say many shards as few brace expressions, with their samples and bytes."),
    "verify": ("training.verbs.shards_verify", "Read shards to their ends, and check what is in them."),
    "serve": ("training.verbs.shards_serve", "Let other machines read shards over HTTP."),
}


@click.group("shards", cls=LazyGroup, later=LATER, epilog="Example: embq shards sum ./shards")
def command() -> None:
    """Make, count, check and serve webdataset shards, for training and for embedding alike."""
