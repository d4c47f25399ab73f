"""Fetches whole files of units to come while an earlier unit is embedded.

Only a shortcut: if it fails, the reader asks the storage itself. A fetched file is used only if it still is the
planned version when its turn comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

from embq.core.errors import SourceError
from embq.core.process.limits import decoded_bytes
from embq.core.service.log import Events
from embq.core.units import Unit
from embq.sources.access import listings, ranged_reads
from embq.sources.interface import Memory, Moved

AHEAD_BYTES = 1 << 30
"""Most bytes of files to come: two shards of 10,000 images of 50 kB. Larger files are read in their turn."""

AHEAD_SHARE = 4
"""Files to come take at most this fraction (1/N) of the memory that a reader may use for one file."""

log = Events("sources")


class ReadAhead:
    """Fetches files behind URLs, one after the other, each by parallel requests, in a thread of its own.

    Memory: the files that were begun and not taken, at most `most_bytes` in all, and the pieces of requests under way,
    at most `ranged_reads.PARALLEL` times `ranged_reads.LARGE_BYTES`, 64 MB.
    """

    def __init__(self, most_bytes: int = AHEAD_BYTES) -> None:
        self._most_bytes = min(most_bytes, decoded_bytes() // AHEAD_SHARE)
        self._lock = threading.Lock()
        self._begun: dict[tuple[str, str], _Fetch] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embq-ahead")
        self._closed = False

    @property
    def held_bytes(self) -> int:
        """Bytes of the files that were begun and not taken."""
        with self._lock:
            return self._held()

    def _held(self) -> int:
        return sum(fetch.size for fetch in self._begun.values())

    def begin(self, unit: Unit, is_wanted: Callable[[], bool]) -> bool:
        """Fetch the file of a unit that is its whole file, if there is room; False if there is none.

        Args:
            is_wanted: asked for each piece that comes in; once it is False, the rest is not asked for.
        """
        key, size = (unit.source, unit.etag), unit.stop or 0
        self.let_go()
        with self._lock:
            if key in self._begun:
                return True
            if self._closed or size + self._held() > self._most_bytes:
                return False
            fetch = self._begun[key] = _Fetch(unit, size, is_wanted)
            fetch.future = self._thread.submit(fetch.run)
            fetch.future.add_done_callback(fetch.wake)
        return True

    def pop(self, unit: Unit, on_progress: Moved) -> Memory | None:
        """The unit's file, waited for if it is on its way; None if the caller has to read it.

        Args:
            on_progress: called whenever bytes have come in.
        """
        with self._lock:
            fetch = self._begun.pop((unit.source, unit.etag), None)
        if fetch is None or fetch.future is None or fetch.future.cancel():
            return None
        return fetch.result(on_progress)

    def let_go(self) -> None:
        """Drop files that are not wanted any more."""
        with self._lock:
            for key, fetch in list(self._begun.items()):
                if not fetch.is_wanted():
                    self._begun.pop(key).abandon()

    def close(self) -> None:
        """Stop fetching, and drop all files."""
        with self._lock:
            self._closed = True
            for fetch in self._begun.values():
                fetch.abandon()
            self._begun.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the block, readers of this thread take fetched files from here."""
        token = _IN_USE.set(self)
        try:
            yield
        finally:
            _IN_USE.reset(token)


_IN_USE: ContextVar[ReadAhead | None] = ContextVar("_IN_USE", default=None)


def fetched(unit: Unit, on_progress: Moved) -> Memory | None:
    """The unit's file if it was fetched before its turn, see `ReadAhead.pop`; else None."""
    ahead = _IN_USE.get()
    return None if ahead is None else ahead.pop(unit, on_progress)


class _Abandoned(Exception):
    """The rest is not wanted."""


class _Fetch:
    def __init__(self, unit: Unit, size: int, is_wanted: Callable[[], bool]) -> None:
        self.unit, self.size = unit, size
        self.future: Future[Memory | None] | None = None
        self._is_wanted, self._abandoned = is_wanted, False
        self._pieces = self._reported = 0
        self._changed = threading.Condition()

    def is_wanted(self) -> bool:
        return not self._abandoned and self._is_wanted()

    def abandon(self) -> None:
        self._abandoned = True

    def run(self) -> Memory | None:
        """The file; None if it is not the planned one, cannot be read, or is not wanted any more."""
        try:
            if not self.is_wanted():
                return None
            status = listings.stat(self.unit.source)
            if (status.version, status.size) != (self.unit.etag, self.size):
                return None
            return ranged_reads.load(self.unit.source, status.size, self._on_progress)
        except _Abandoned:
            return None
        except SourceError as error:  # the reader will get and report the same
            log.info("read_ahead_failed", source=self.unit.source, why=error.message)
            return None

    def result(self, on_progress: Moved) -> Memory | None:
        """Wait for the result of `run`; `on_progress` is called for bytes that come in."""
        future, self._reported = self.future, 0
        assert future is not None
        while not future.done():
            with self._changed:
                self._changed.wait_for(lambda: self._pieces > self._reported or future.done())
                came, self._reported = self._pieces > self._reported, self._pieces
            if came:
                on_progress()
        return future.result()

    def wake(self, _: object) -> None:
        """Wake the thread that waits in `result`."""
        with self._changed:
            self._changed.notify_all()

    def _on_progress(self) -> None:
        if not self.is_wanted():
            raise _Abandoned
        with self._changed:
            self._pieces += 1
            self._changed.notify_all()
