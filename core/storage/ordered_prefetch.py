"""The content of many small files in order, up to the first that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from core.storage.beneath import read_bytes
from core.storage.paths import Place

AT_ONCE = 16
"""Objects that are asked for at a time, once a log has turned out to be long."""


def contents(root: Place, names: Iterator[str], *, most_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Each name below `root` with its content, in order, up to the first that is not there.

    OSError where one cannot be read; raises as `core.storage.beneath.read_bytes` does, too.

    On an object store more are asked for at once the longer it goes on. So a look at the end of a log is one request,
    and a long log is not read at the pace of one answer after the other.
    """

    def content(name: str) -> bytes | None:
        try:
            return read_bytes(root, name, most_bytes=most_bytes)
        except FileNotFoundError:
            return None

    with ExitStack() as stack:
        pool, size = ThreadPoolExecutor(AT_ONCE), 1
        stack.callback(pool.shutdown, cancel_futures=True)
        while batch := list(islice(names, size)):
            found = map(content, batch) if size == 1 else pool.map(content, batch)
            for name, data in zip(batch, found, strict=True):
                if data is None:
                    return
                yield name, data
            size = 1 if isinstance(root, Path) else min(AT_ONCE, 2 * size)
