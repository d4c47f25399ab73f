"""Maps a function over items with a pool of processes that end with this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from embq.core.errors import OutputError
from embq.core.process.children import die_with_parent

AHEAD = 2
"""Items that wait for each process, so that none waits for an item."""

STOPPING = (signal.SIGINT, signal.SIGTERM)

T = TypeVar("T")
R = TypeVar("R")


def each(function: Callable[[T], R], items: Iterable[T], processes: int, *, connects: bool = False) -> Iterator[R]:
    """Results of a function for each item, in the order in which they are ready.

    Args:
        function: at module level, or a partial of one that is.
        processes: how many; 1 works in this one.
        connects: whether the function reads over a network. Connections are not handed on to processes that are
            forked, nor the threads that serve them, so these begin anew, which takes a second.

    Raises what the function raises, after what had begun has ended; OutputError if a process was killed.
    """
    if processes == 1:
        yield from map(function, items)
        return
    # Forked they begin at once, with what is imported here.
    context = multiprocessing.get_context("spawn" if connects else "fork")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(os.getpid(),))
    remaining = iter(items)
    with _signals_delayed():
        under_way: set[Future[R]] = {pool.submit(function, item) for item in islice(remaining, AHEAD * processes)}
    try:
        while under_way:
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
                under_way |= {pool.submit(function, item) for item in islice(remaining, 1)}
    except BrokenProcessPool as error:
        raise OutputError(
            "a process of this command was killed, perhaps because memory ran out",
            code="process_killed",
            next_step="run the same command again; --workers 1 needs the least memory",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _signals_delayed() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block is over, in processes that are forked in it until `_begin`."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin(parent: int) -> None:
    """In a new process: ignore Ctrl-C, end by SIGTERM, and end with the parent.

    A handler of SIGTERM that the parent has would be inherited, and the pool waits for ever for a process that it
    cannot terminate.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    die_with_parent(parent)
