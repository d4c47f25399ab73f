"""`embq shards`: webdataset shards from pictures, and what is in a folder of them."""

from __future__ import annotations

import click

from embq.lazy import Lazy


@click.group("shards", cls=Lazy, later={}, epilog="Example: embq shards --help")
def command() -> None:
    """Make, count, check and serve webdataset shards, for training and for embedding alike."""
