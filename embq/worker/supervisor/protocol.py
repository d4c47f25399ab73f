"""Protocol of a supervisor and its worker processes: options at the start, and reports through a pipe afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from embq.core.process.limits import cores
from embq.core.run.run_info import USUAL_BATCH_SIZE, USUAL_THREADS_PER_CORE, WorkerDefaults

PIPE_BYTES = 4096
"""Most bytes that a pipe takes atomically, so that the supervisor reads whole lines (pipe(7), PIPE_BUF)."""

State = Literal["idle", "loading", "serving"]
"""State of a process, one of `embq.core.queue.heartbeats.STATES`: it waits for work, loads a model, or has one that has
embedded something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of a worker process, which it gets as JSON. Those without a default are the same for a whole fleet.

    Attributes:
        name: worker name, unique for ever.
        device: "cpu", "cuda:N" or "sim:SPEED", as the machine calls it: for logs, metrics and `embq status`.
        run: serve only this run, and end when it is over; "" serves every run until stopped.
        prefetch: remote files that are fetched before their units' turn.
        threads: threads that decode and tokenise.
        threads_chosen: whether the user chose `threads`; else a run may.
        batch_size: samples per batch; 0 leaves it to the embedder.
        transport: "auto", "payload" or "staging".
        drain_s: time to finish begun units after a stop was asked for.
        version: of embq, as the supervisor has it.
        report_fd: pipe for `ReportPipe`; -1 for none.
        progress_fd: memory that is shared with the supervisor, see `embq.worker.meter.progress_board`; -1 for none.
        siblings: processes of the same supervisor that compute, this one included: they share the machine's memory.
        without: optional compute paths that are left out, see `embq.worker.supervisor.slot.PathMemory`.
    """

    run: str
    prefetch: int
    threads: int
    batch_size: int
    transport: str
    drain_s: float
    version: str
    threads_chosen: bool = False
    name: str = ""
    device: str = ""
    report_fd: int = -1
    progress_fd: int = -1
    siblings: int = 1
    without: Collection[str] = ()

    @property
    def torch_device(self) -> str:
        """Name of the device in torch: this process sees no other GPU, see `embq.worker.supervisor.slot`."""
        return "cuda:0" if self.device.startswith("cuda") else self.device

    def with_defaults(self, defaults: WorkerDefaults) -> WorkerOptions:
        """These options, with the defaults of a run for those that the user did not choose."""
        threads = 0 if self.threads_chosen else min(defaults.prepare_threads, USUAL_THREADS_PER_CORE * cores())
        batch_size = self.batch_size or min(defaults.batch_size, USUAL_BATCH_SIZE)
        return replace(self, batch_size=batch_size, threads=threads or self.threads)


class ReportPipe:
    """Reports of this process to its supervisor, a line of JSON each.

    Args:
        descriptor: the pipe to it; -1 for nowhere.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._state = ""
        self._has_finished = False

    def state(self, state: State) -> None:
        """Report the state, if it has changed."""
        if state != self._state:
            self._state = state
            self._write({"state": state})

    def finished(self) -> None:
        """Report, once, that this process has finished a unit."""
        if not self._has_finished:
            self._has_finished = True
            self._write({"finished": True})

    def refuse(self, model: str, why: str) -> None:
        """Report a model that cannot be loaded here, and the reason."""
        if not self._write({"model": model, "why": why[:1000]}):
            self._write({"model": model[:500], "why": "its log tells"})

    def end(self, why: str, next_step: str = "") -> None:
        """Report why this process ends, and the next step; shown to the user if the device is given up."""
        self._write({"ends": why[:300], "next": next_step[:300]})

    def paths(self, names: Collection[str]) -> None:
        """Report the optional compute paths that are tried or used, see `embq.worker.supervisor.slot.PathMemory`."""
        self._write({"paths": list(names)})

    def _write(self, message: Mapping[str, object]) -> bool:
        """Whether the line fits into the pipe in one piece."""
        line = f"{json.dumps(message)}\n".encode()
        if len(line) > PIPE_BYTES:
            return False
        if self._descriptor >= 0:
            os.write(self._descriptor, line)
        return True
