"""Bars in a terminal or a notebook."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

Item = TypeVar("Item")

MUCH = 2_000
"""Items from which a bar is shown if nothing else is asked for."""


def shown(items: Iterable[Item], total: int | None, *, enabled: bool | None) -> Iterator[Item]:
    """The items, with a bar of those that were taken.

    Args:
        total: number of items; None if it is not known.
        enabled: None for a bar in a terminal or a notebook, if there is much.
    """
    if enabled is None:
        enabled = (total is None or total >= MUCH) and somebody_looks()
    if not enabled:
        yield from items
        return
    with tqdm_of_place()(items, total=total, unit="rows", smoothing=0.1) as bar:
        yield from bar


def tqdm_of_place() -> Any:
    """The bar for a terminal or a notebook. The first import of it, by any library, warns in a notebook that lacks
    ipywidgets, where a bar of text does; so it is imported here before the libraries of models are.
    """
    from tqdm import TqdmWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)
        from tqdm.auto import tqdm
    return tqdm


def somebody_looks() -> bool:
    """Whether this is a terminal or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class Bar:
    """A bar of the samples of a run.

    Args:
        enabled: None for a bar in a terminal or a notebook.
    """

    def __init__(self, enabled: bool | None) -> None:
        self._enabled = somebody_looks() if enabled is None else enabled
        self._bar: Any = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int, total: int | None, note: str) -> None:
        """Show how many samples of how many are done, and a note of the run's state."""
        if not self._enabled:
            return
        if self._bar is None:
            self._bar = tqdm_of_place()(unit="rows")
        self._bar.total = total
        self._bar.set_description(note or None, refresh=False)
        self._bar.update(done - self._bar.n)
