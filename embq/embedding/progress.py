"""A bar of items in a terminal or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

MUCH = 2_000
"""Items from which a bar is shown where nothing else is asked for."""


def shown(items: Iterable[Item], total: int | None, *, wanted: bool | None) -> Iterator[Item]:
    """The items, with a bar of those that were taken.

    Args:
        total: number of items; None where it is not known.
        wanted: None for a bar in a terminal or a notebook, where there is much.
    """
    if wanted is None:
        wanted = (total is None or total >= MUCH) and (sys.stderr.isatty() or "ipykernel" in sys.modules)
    if not wanted:
        yield from items
        return
    from tqdm.auto import tqdm

    with tqdm(items, total=total, unit="rows", smoothing=0.1) as bar:
        yield from bar
