"""Going on where the last slice ended, in files that can only be read forwards.

A slice of a compressed file, or of a row group, is reached through all that stands before it. The units of a file come
to a worker mostly in order. So each process keeps the one place where it stopped last, and reads every such file about
once, instead of once for each unit.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, Protocol, TypeVar

from core.errors import SourceError
from core.units import Unit
from sources.access.files import require_same, source_errors, stat_file
from sources.interface import Moved


class Cursor(Protocol):
    """A place in a source.

    Attributes:
        position: what comes next, in the unit of the source (a row, a byte).
        moved: called for each piece that comes in; set anew by each unit.
    """

    position: int
    moved: Moved

    def close(self) -> None:
        """Let go of the file."""
        ...


C = TypeVar("C", bound=Cursor)


class LastCursor(Generic[C]):
    """The place where this process stopped last, at most one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[Hashable, C] | None = None
        atexit.register(self.drop)

    @contextmanager
    def at(self, unit: Unit, start: int, moved: Moved, make: Callable[[], C]) -> Iterator[C]:
        """A cursor at or before `start`; it is kept where the block ends well.

        The unit's source must be the version that was planned, before and after; SourceError `source_changed`, or as
        `source_errors` gives it.
        """
        require_same(unit, stat_file(unit.source).version, "source_changed")
        key = (unit.kind, unit.source, unit.etag, unit.options)
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None and (kept[0] != key or kept[1].position > start):
            _close(kept[1])
            kept = None
        cursor = kept[1] if kept is not None else make()
        cursor.moved = moved
        try:
            moved()
            with source_errors(unit.source):
                yield cursor
            require_same(unit, stat_file(unit.source).version, "source_changed")
        except BaseException:
            _close(cursor)
            raise
        with self._lock:
            other, self._kept = self._kept, (key, cursor)
        if other is not None:
            _close(other[1])

    def drop(self) -> None:
        """Let go of what is kept."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            _close(kept[1])


def _close(cursor: Cursor) -> None:
    with suppress(SourceError, OSError):  # what it has given was checked when it was given
        cursor.close()
