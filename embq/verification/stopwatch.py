"""Seconds by what they were spent on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


class Stopwatch:
    """Counts the seconds of each kind of work; those of work within other work are counted once, as the inner one's.

    Attributes:
        seconds: by kind, in the order in which they began.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._kinds: list[str] = []
        self._since = clock()

    @contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """The block does work of this kind."""
        self._turn()
        self._kinds.append(kind)
        self.seconds.setdefault(kind, 0.0)
        try:
            yield
        finally:
            self._turn()
            self._kinds.pop()

    def each(self, kind: str, items: Iterable[Item]) -> Iterator[Item]:
        """The items; making each of them is work of this kind."""
        iterator = iter(items)
        while True:
            with self.on(kind):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def _turn(self) -> None:
        now = self._clock()
        if self._kinds:
            self.seconds[self._kinds[-1]] += now - self._since
        self._since = now
