"""Who does the units of a stage: this process, some processes of this machine, or workers behind a broker."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from core import errors
from core.errors import EmbqError
from core.process.children import die_with_parent
from core.settings import child_environment
from indexer.process import do
from indexer.sidecar import Sidecar, find
from indexer.units import IndexUnit

ATTEMPTS = 3
"""After so many processes that ended with a unit in hand, another one is not worth trying."""

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
        threads: of each.
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
        threads = [
            threading.Thread(target=self._serve, args=(f"local-{number}", waiting, answers, halt), daemon=True)
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
                    raise errors.OutputError(f"{unit.sidecar} is not there after its unit was done")
                done(unit, sidecar)
        finally:
            halt.set()
            for thread in threads:
                thread.join()

    def _serve(
        self,
        name: str,
        waiting: queue.SimpleQueue[IndexUnit | None],
        answers: queue.SimpleQueue[tuple[IndexUnit, EmbqError | None] | None],
        halt: threading.Event,
    ) -> None:
        child = UnitProcess(name, threads=self._threads, memory_bytes=self._memory_bytes)
        try:
            while (unit := waiting.get()) is not None and not halt.is_set():
                answers.put((unit, self._attempted(child, unit, halt)))
        finally:
            child.close()
            answers.put(None)

    def _attempted(self, child: UnitProcess, unit: IndexUnit, halt: threading.Event) -> EmbqError | None:
        status: int | None = None
        for _ in range(ATTEMPTS):
            try:
                return child.do(unit, halt)
            except ChildEndedError as ended:
                status = ended.status
                if halt.is_set():
                    break
        return errors.OutputError(
            f"the process that did the unit {unit.number} of the stage {unit.stage} ended {ATTEMPTS} times, "
            f"with status {status}",
            next_step="where memory ran out, give a smaller --current-memory-available or fewer --workers",
            code="index_process",
        )


class ChildEndedError(Exception):
    """A unit process has ended while it had a unit in hand."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status


class UnitProcess:
    """One process that does units, started when it is first needed."""

    def __init__(self, name: str, *, threads: int, memory_bytes: int) -> None:
        self._name = name
        self._threads = threads
        self._memory_bytes = memory_bytes
        self.process: subprocess.Popen[str] | None = None

    def do(self, unit: IndexUnit, halt: threading.Event) -> EmbqError | None:
        """Have a unit done; gives the error that it ended with. ChildEndedError where the process died, or `halt`."""
        if self.process is None:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "indexer.process"),
                    *("--worker", self._name, "--threads", str(self._threads), "--memory", str(self._memory_bytes)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=child_environment(OMP_NUM_THREADS=str(self._threads)),
                preexec_fn=die_with_parent,
            )
            threading.Thread(target=_kill_when, args=(self.process, halt), daemon=True).start()
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(unit.describe()) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self.process = None
            raise ChildEndedError(process.wait())
        return told_error(json.loads(line))

    def close(self) -> None:
        """Let the process end."""
        if self.process is not None and self.process.stdin is not None:
            with self.process:
                self.process.stdin.close()
            self.process = None


def _kill_when(process: subprocess.Popen[str], halt: threading.Event) -> None:
    while process.poll() is None:
        if halt.wait(0.2):
            process.kill()
            return


def told_error(answer: dict[str, Any]) -> EmbqError | None:
    """The error in what a unit process said; None where the unit is done."""
    said = answer.get("error")
    if said is None:
        return None
    kind = getattr(errors, str(said.get("kind")), EmbqError)
    if not (isinstance(kind, type) and issubclass(kind, EmbqError)) or kind in (errors.SourceError, errors.SampleError):
        kind = EmbqError
    error: EmbqError = kind(said["message"], next_step=said["next_step"], code=said["code"])
    return error


def local(workers: int, *, threads: int, memory_bytes: int) -> Runner:
    """What does units on this machine: this process where one is enough.

    Args:
        threads: of all of them together.
        memory_bytes: the same.
    """
    if workers <= 1:
        return InProcess(threads=threads, memory_bytes=memory_bytes)
    return Processes(workers, threads=max(1, threads // workers), memory_bytes=memory_bytes // workers)


__all__ = ["ChildEndedError", "InProcess", "Processes", "Runner", "UnitProcess", "local", "told_error"]
