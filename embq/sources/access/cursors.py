"""Keeps the read position between units, in files that can only be read forwards.

A slice of a compressed file, or of a row group, is reached by reading everything before it. The units of a file mostly
come to a worker in order, so each process keeps one position and reads such a file about once, not once per unit.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, Protocol, TypeVar

from embq.core.errors import SourceError
from embq.core.units import Unit
from embq.sources.access.files import require_same, source_errors, stat_file
from embq.sources.interface import Moved


class Cursor(Protocol):
    """A read position in a source.

    Attributes:
        position: next row or byte.
        on_progress: called for each piece that comes in; set anew by each unit.
    """

    position: int
    on_progress: Moved

    def close(self) -> None:
        """Close the file."""
        ...


C = TypeVar("C", bound=Cursor)


class LastCursor(Generic[C]):
    """The last cursor of this process, if it ended well."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cached: tuple[Hashable, C] | None = None
        atexit.register(self.drop)

    @contextmanager
    def at(self, unit: Unit, start: int, on_progress: Moved, make: Callable[[], C]) -> Iterator[C]:
        """A cursor at or before `start`; it is kept where the block ends well.

        The unit's source must be the version that was planned, before and after; SourceError `source_changed`, or as
        `source_errors` raises it.
        """
        require_same(unit, stat_file(unit.source).version, "source_changed")
        key = (unit.kind, unit.source, unit.etag, unit.options)
        with self._lock:
            cached, self._cached = self._cached, None
        if cached is not None and (cached[0] != key or cached[1].position > start):
            _close(cached[1])
            cached = None
        cursor = cached[1] if cached is not None else make()
        cursor.on_progress = on_progress
        try:
            on_progress()
            with source_errors(unit.source):
                yield cursor
            require_same(unit, stat_file(unit.source).version, "source_changed")
        except BaseException:
            _close(cursor)
            raise
        with self._lock:
            other, self._cached = self._cached, (key, cursor)
        if other is not None:
            _close(other[1])

    def drop(self) -> None:
        """Close the cursor that is kept."""
        with self._lock:
            cached, self._cached = self._cached, None
        if cached is not None:
            _close(cached[1])


def _close(cursor: Cursor) -> None:
    with suppress(SourceError, OSError):  # its data was checked as it was read
        cursor.close()
