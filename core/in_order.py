"""The content of many small files in order, up to the first that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from core.places import Place

AT_ONCE = 16
"""Objects that are asked for at a time, once a log has turned out to be long."""


def contents(paths: Iterator[Place]) -> Iterator[tuple[Place, bytes]]:
    """Each path with its content, in order, up to the first that is not there; OSError where one cannot be read.

    On an object store more are asked for at once the longer it goes on. So a look at the end of a log is one request,
    and a long log is not read at the pace of one answer after the other.
    """
    with ExitStack() as stack:
        pool, size = ThreadPoolExecutor(AT_ONCE), 1
        stack.callback(pool.shutdown, cancel_futures=True)
        while batch := list(islice(paths, size)):
            found = map(_content, batch) if size == 1 else pool.map(_content, batch)
            for path, data in zip(batch, found, strict=True):
                if data is None:
                    return
                yield path, data
            size = 1 if isinstance(batch[0], Path) else min(AT_ONCE, 2 * size)


def _content(path: Place) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
