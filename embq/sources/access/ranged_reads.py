"""Reads files behind URLs by parallel ranged requests, each checked for its length and retried if that may help."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from embq.core.errors import SourceError
from embq.sources.access.filesystems import bare, filesystem, is_unreached, translate
from embq.sources.access.urls import host_of, is_http
from embq.sources.interface import SAMPLE_MAX_BYTES, Memory, Moved, unwatched

PARALLEL = 8
"""Requests at a time for one file, as object stores need several connections to fill a network card."""

SMALL_BYTES, LARGE_BYTES = 1 << 20, 8 << 20
"""Ranges start small, so that a slow line makes progress within a worker's time for one step, and grow on fast ones."""

FAST_S = 1.0
"""A range that came within this time may be twice as long next."""

PAUSES_S = (0.2, 0.5, 1.0, 2.0)
"""Pauses between attempts, each up to half longer at random. The worker's reader waits longer."""

UNREACHED_PAUSE_S = 0.5
"""Longest pause where no connection is made: planning would wait for a misspelt host."""

UNREACHED_S = 5.0
"""Time for which a host to which no connection was made is not tried again: a plan may name many files of it."""

_UNREACHED: dict[str, tuple[float, OSError]] = {}
"""Host -> when it was tried last, and why it was not reached."""

T = TypeVar("T")

_WITHOUT_RANGES: set[str] = set()
"""Servers that ignore ranges and send the whole file."""


def with_retries(url: str, request: Callable[[], T]) -> T:
    """The result of `request`, with retries if the storage may only be busy; else SourceError."""
    if _UNREACHED and (last := _UNREACHED.get(host_of(url))) and time.monotonic() - last[0] < UNREACHED_S:
        raise translate(url, last[1])
    for pause in (*PAUSES_S, None):
        try:
            return request()
        except SourceError:
            raise
        except Exception as error:
            translated = translate(url, error)
            if not translated.transient or pause is None:
                raise translated from error
            if pause > UNREACHED_PAUSE_S and is_unreached(error):
                _UNREACHED[host_of(url)] = time.monotonic(), OSError(error.errno, error.strerror)
                raise translated from error
            time.sleep(pause * random.uniform(1.0, 1.5))
    raise AssertionError("unreachable")


def load(url: str, size: int, on_progress: Moved = unwatched) -> Memory:
    """All `size` bytes of a file, by parallel requests; SourceError if other bytes came."""
    if size == 0:
        return b""
    if host_of(url) in _WITHOUT_RANGES:
        return _load_at_once(url, size)
    buffer = mmap.mmap(-1, size)
    with memoryview(buffer) as view:
        for start, piece in _pieces(url, 0, size):
            if host_of(url) in _WITHOUT_RANGES:
                break
            view[start : start + len(piece)] = piece
            on_progress()
        else:
            return buffer
    return _load_at_once(url, size)


def _pieces(url: str, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of the ranges between two offsets, in order, with `PARALLEL` of them under way."""
    under_way: deque[tuple[int, Future[bytes]]] = deque()
    length = SMALL_BYTES

    def timed(at: int, end: int) -> bytes:
        nonlocal length
        began = time.monotonic()
        data = read_range(url, at, end)
        fast = time.monotonic() - began < FAST_S
        length = min(LARGE_BYTES, 2 * (end - at)) if fast else SMALL_BYTES
        return data

    try:
        if start < stop:  # alone: it tells whether the server knows ranges
            end = min(stop, start + length)
            yield start, timed(start, end)
            start = end
        while start < stop or under_way:
            while start < stop and len(under_way) < PARALLEL:
                end = min(stop, start + length)
                under_way.append((start, _pool().submit(timed, start, end)))
                start = end
            at, future = under_way.popleft()
            yield at, future.result()
    finally:
        for _, future in under_way:
            future.cancel()


def read_range(url: str, start: int, stop: int) -> bytes:
    """The bytes from `start` up to `stop`; SourceError `source_unreadable` (transient) if others came."""
    if start >= stop:
        return b""

    def request() -> bytes:
        data = filesystem(url).cat_file(bare(url), start=start, end=stop)
        if len(data) != stop - start:
            # More than was asked for: the server knows no ranges, and has sent all of it.
            if is_http(url) and len(data) >= stop:
                _WITHOUT_RANGES.add(host_of(url))
                return bytes(data[start:stop])
            raise EOFError(f"{len(data)} bytes came instead of {stop - start}")
        return bytes(data)

    return with_retries(url, request)


def _load_at_once(url: str, size: int) -> bytes:
    """All of a file from an http server that knows no ranges."""

    def request() -> bytes:
        data = bytes(filesystem(url).cat_file(bare(url), most=size))
        if len(data) != size:
            raise EOFError(f"{len(data) if len(data) < size else 'more'} bytes came instead of {size}")
        return data

    return with_retries(url, request)


class RangesAhead:
    """Ranges of a file for `embq.core.storage.objects.RangedFile`; fetches ahead while it is read in order.

    Args:
        size: its bytes.
        first, last: the part that will be read in order; nothing beyond it is fetched ahead.
        on_progress: called for each range that has come in.
    """

    _AHEAD = 3
    _KEPT = 8

    def __init__(self, url: str, size: int, *, first: int, last: int, on_progress: Moved) -> None:
        self._url, self._size, self._on_progress = url, size, on_progress
        self._first, self._last = first, last
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._content: Memory | None = None

    def read_range(self, start: int, stop: int) -> bytes | memoryview:
        """See `embq.core.storage.objects.Ranges`; in the part that is read in order, at most to the end of a block."""
        if self._content is None and host_of(self._url) in _WITHOUT_RANGES:
            self._content = load(self._url, self._size, self._on_progress)
        if self._content is not None:
            return self._content[start:stop]
        if self._first <= start < self._last:
            number, inside = divmod(start - self._first, SMALL_BYTES)
            return memoryview(self._block(number))[inside : inside + stop - start]
        data = read_range(self._url, start, stop)
        self._on_progress()
        return data

    def _block(self, number: int) -> bytes:
        in_order = number - 1 in self._blocks or not self._blocks
        for index in range(number, number + (self._AHEAD if in_order else 0) + 1):
            start = self._first + index * SMALL_BYTES
            if index not in self._blocks and start < self._last:
                stop = min(self._last, start + SMALL_BYTES)
                self._blocks[index] = _pool().submit(read_range, self._url, start, stop)
        future = self._blocks[number]
        fresh = not future.done()
        data = future.result()
        if fresh:
            self._on_progress()
        while len(self._blocks) > self._KEPT:
            self._blocks.popitem(last=False)
        return data


_POOL_LOCK = threading.Lock()
_POOL: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_POOL.clear)  # a forked process has none of its parent's threads


def _pool() -> ThreadPoolExecutor:
    """The threads of all requests of this process: enough for two files at a time."""
    with _POOL_LOCK:
        if not _POOL:
            _POOL.append(ThreadPoolExecutor(2 * PARALLEL, thread_name_prefix="embq-storage"))
    return _POOL[0]


def fetch_all(urls: list[str], sizes: list[int | None], on_progress: Moved) -> Iterator[bytes | SourceError]:
    """The content of many small files in order, several at a time; an error in the place of one that cannot be read.

    Raises SourceError if the storage does not answer: that concerns all of them.

    Args:
        sizes: bytes of each, more than which are not fetched; None fetches a file of any size up to a sample's limit.
    """
    calls = [partial(_small, url, size) for url, size in zip(urls, sizes, strict=True)]
    under_way: deque[Future[bytes | SourceError]] = deque()

    def first() -> bytes | SourceError:
        result = under_way.popleft().result()
        if isinstance(result, SourceError) and result.transient:
            raise result
        on_progress()
        return result

    for number, call in enumerate(calls):
        under_way.append(_pool().submit(call))
        if number >= 2 * PARALLEL:
            yield first()
    while under_way:
        yield first()


def _small(url: str, size: int | None) -> bytes | SourceError:
    most = SAMPLE_MAX_BYTES if size is None else size

    def request() -> bytes:
        data = _beginning(url, most)
        if len(data) <= most:
            return data
        if size is None:
            raise SourceError(f"{url}: has more than {most} bytes", code="too_large")
        raise SourceError(f"{url}: had {size} bytes when planned, and has more now", code="source_changed")

    try:
        return b"" if most > SAMPLE_MAX_BYTES else with_retries(url, request)
    except SourceError as error:
        return error


def _beginning(url: str, most: int) -> bytes:
    """A file of up to `most` bytes, or that many and one more of a larger one."""
    storage, name = filesystem(url), bare(url)
    if is_http(url):
        return bytes(storage.cat_file(name, most=most))
    try:
        return bytes(storage.cat_file(name, start=0, end=most + 1))
    except FileNotFoundError:
        raise
    except Exception:
        if storage.info(name).get("size") == 0:  # it has no first byte that a range could begin with
            return b""
        raise
