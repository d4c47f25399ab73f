"""Runners of units: in this process, or in processes of this machine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from embq.core.errors import EmbqError, OutputError, error_of
from embq.core.process.children import ChildEndedError, JsonChild, python
from embq.indexer.index_files.files import to_json
from embq.indexer.stages.process import do
from embq.indexer.stages.units import IndexUnit, Sidecar, find

ATTEMPTS = 3
"""After so many processes that ended with a unit in hand, another one is not worth trying."""

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
        waiting: queue.SimpleQueue[IndexUnit | None] = queue.SimpleQueue()
        answers: queue.SimpleQueue[tuple[IndexUnit, EmbqError | None] | None] = queue.SimpleQueue()
        for unit in units:
            waiting.put(unit)
        count = min(self._count, len(units))
        for _ in range(count):
            waiting.put(None)
        halt = threading.Event()
        each = max(1, self._threads // count)
        threads = [
            threading.Thread(target=self._serve, args=(f"local-{number}", each, waiting, answers, halt), daemon=True)
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            ended = 0
            while ended < count:
                answer = answers.get()
                if answer is None:
                    ended += 1
                    continue
                unit, error = answer
                sidecar = None if error is not None else find(unit)
                if error is not None:
                    raise error
                if sidecar is None:
                    raise OutputError(f"{unit.sidecar} is not there after its unit was done")
                done(unit, sidecar)
        finally:
            halt.set()
            for thread in threads:
                thread.join()

    def _serve(
        self,
        name: str,
        threads: int,
        waiting: queue.SimpleQueue[IndexUnit | None],
        answers: queue.SimpleQueue[tuple[IndexUnit, EmbqError | None] | None],
        halt: threading.Event,
    ) -> None:
        options = ("--worker", name, "--threads", str(threads), "--memory", str(self._memory_bytes))
        command = python("-m", "embq.indexer.stages.process", *options)
        child = JsonChild(command, OMP_NUM_THREADS=str(threads))
        try:
            while (unit := waiting.get()) is not None and not halt.is_set():
                answers.put((unit, self._attempted(child, unit, halt)))
        finally:
            child.close()
            answers.put(None)

    def _attempted(self, child: JsonChild, unit: IndexUnit, halt: threading.Event) -> EmbqError | None:
        ended = ""
        for _ in range(ATTEMPTS):
            child.ask(to_json(unit))
            try:
                while (reply := child.answer(LOOK_S)) is None:
                    if halt.is_set():
                        child.kill()
                        return None  # no caller waits for it
                return error_of(reply["error"]) if "error" in reply else None
            except ChildEndedError as error:
                ended = str(error)
        return OutputError(
            f"the process that did the unit {unit.number} of the stage {unit.stage} died {ATTEMPTS} times, "
            f"at last it {ended}",
            next_step="where memory ran out, give a smaller --current-memory-available or fewer --workers",
            code="index_process",
        )


def local(workers: int, *, threads: int, memory_bytes: int) -> Runner:
    """Runner of this machine: this process where one is enough.

    Args:
        threads: of all of them together.
        memory_bytes: the same.
    """
    if workers <= 1:
        return InProcess(threads=threads, memory_bytes=memory_bytes)
    return Processes(workers, threads=threads, memory_bytes=memory_bytes // workers)
