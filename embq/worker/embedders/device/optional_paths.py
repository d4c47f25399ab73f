"""Optional code paths of this process: those that it must not try, and those on trial or in use.

A kernel that faults leaves a CUDA context in which nothing works any more, so the process ends. The supervisor is told
of each path before it is tried, and starts the next process without those of this one. A process serves one
device, so this is kept once for a process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

FLAT = "flat"
"""Batches of texts without padding, see `embq.worker.embedders.text.forward`."""


class OptionalPaths:
    """Names of ways.

    Attributes:
        without: ways that must not be tried.
        tell: called with the names of all ways that are on trial or in use, whenever these change.
    """

    def __init__(self) -> None:
        self.without: frozenset[str] = frozenset()
        self.tell: Callable[[Collection[str]], None] = lambda _: None
        self._taken: set[str] = set()

    def clear(self) -> None:
        """Forget the ways of a model that is not loaded any more."""
        self._taken.clear()
        self.tell(())

    def try_out(self, name: str) -> None:
        """Say that a way is tried from now on."""
        self.tell(sorted({*self._taken, name}))

    def settle(self, name: str, *, is_taken: bool) -> None:
        """Say whether a way that was tried is used from now on. Not to be called where it broke the device."""
        if is_taken:
            self._taken.add(name)
        self.tell(sorted(self._taken))


PATHS = OptionalPaths()
"""Optional paths of this process."""
