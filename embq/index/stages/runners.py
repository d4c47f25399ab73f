"""Runners of units: in this process, or in processes of this machine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from typing import Protocol

from embq.core.errors import OutputError, error_of
from embq.core.process.children import ChildEndedError, JsonChild
from embq.index.index_files.files import to_json
from embq.index.plan.build_options import memory_option
from embq.index.stages.process import do
from embq.index.stages.units import IndexUnit, Sidecar, find

ATTEMPTS = 3
"""After this many processes that ended with a unit in hand, another one is not worth trying."""

LOOK_S = 0.2
"""Interval at which a waiting thread checks whether the stage was abandoned."""

Done = Callable[[IndexUnit, Sidecar], None]


class Runner(Protocol):
    """Does units."""

    def run(self, units: Sequence[IndexUnit], done: Done) -> None:
        """Do all of these units, which belong to one stage; `done` is called for each as it is done, in any order.

        Raises the EmbqError of the first that cannot be done.
        """
        ...


class InProcess:
    """Does one unit after the other, here."""

    def __init__(self, *, threads: int, memory_bytes: int) -> None:
        self._threads = threads
        self._memory_bytes = memory_bytes

    def run(self, units: Sequence[IndexUnit], done: Done) -> None:
        """See `Runner`."""
        for unit in units:
            done(unit, do(unit, threads=self._threads, memory_bytes=self._memory_bytes, worker="here"))


class Processes:
    """Does units side by side in processes of this machine. A process that dies is replaced, and its unit done again.

    Args:
        count: processes.
        threads: of all of them together; a stage with fewer units than processes has more for each.
        memory_bytes: that each may take.
    """

    def __init__(self, count: int, *, threads: int, memory_bytes: int) -> None:
        self._count = count
        self._threads = threads
        self._memory_bytes = memory_bytes

    def run(self, units: Sequence[IndexUnit], done: Done) -> None:
        """See `Runner`."""
        count = min(self._count, len(units))
        threads = max(1, self._threads // count)
        children = [self._child(f"local-{number}", threads) for number in range(count)]
        idle: queue.SimpleQueue[JsonChild] = queue.SimpleQueue()
        for child in children:
            idle.put(child)
        halt = threading.Event()

        def attempt(unit: IndexUnit) -> None:
            child = idle.get()
            try:
                _attempt(child, unit, halt)
            finally:
                idle.put(child)

        with ThreadPoolExecutor(count) as pool:
            attempts = {pool.submit(attempt, unit): unit for unit in units}
            try:
                for ended in as_completed(attempts):
                    ended.result()
                    if (sidecar := find(unit := attempts[ended])) is None:
                        raise OutputError(f"{unit.sidecar} is not there after its unit was done")
                    done(unit, sidecar)
            finally:
                halt.set()
                for future in attempts:
                    future.cancel()
                wait(attempts)
                for child in children:
                    child.close()

    def _child(self, name: str, threads: int) -> JsonChild:
        options = ("--worker", name, "--threads", str(threads), "--memory", str(self._memory_bytes))
        return JsonChild("-m", "embq.index.stages.process", *options, OMP_NUM_THREADS=str(threads))


def _attempt(child: JsonChild, unit: IndexUnit, halt: threading.Event) -> None:
    """Have a process do a unit; raises its EmbqError. Returns early where `halt` is set: no caller waits for it."""
    why = ""
    for _ in range(ATTEMPTS):
        child.send(to_json(unit))
        try:
            while (reply := child.answer(LOOK_S)) is None:
                if halt.is_set():
                    child.kill()
                    return
            if "error" in reply:
                raise error_of(reply["error"])
            return
        except ChildEndedError as error:
            why = str(error)
    raise OutputError(
        f"the process that did the unit {unit.number} of the stage {unit.stage} died {ATTEMPTS} times, "
        f"at last it {why}",
        next_step=f"where memory ran out, give a smaller {memory_option()} or fewer --workers",
        code="index_process",
    )


def local(workers: int, *, threads: int, memory_bytes: int) -> Runner:
    """Runner of this machine: this process if one is enough.

    Args:
        threads: of all of them together.
        memory_bytes: the same.
    """
    if workers <= 1:
        return InProcess(threads=threads, memory_bytes=memory_bytes)
    return Processes(workers, threads=threads, memory_bytes=memory_bytes // workers)
