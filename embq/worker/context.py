"""Options of a worker process, and the objects that all of its services share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import redis

from embq.core.broker.client import ANSWER_S, connect
from embq.core.run.run_info import WorkerDefaults
from embq.core.service.stopping import StopFlag
from embq.core.settings import Settings
from embq.worker.claim.input_locality import InputLocality
from embq.worker.claim.scheduler import Scheduler
from embq.worker.meter.progress_board import ProgressBoard
from embq.worker.supervisor.report_pipe import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Command-line options of a worker process, set by the supervisor.

    Attributes:
        name: worker name, unique for ever.
        device: "cpu", "cuda:N" or "sim:SPEED", as the machine calls it: for logs, metrics and `embq status`.
        run: serve only this run; "" serves every run.
        prefetch: remote files that are fetched before their units' turn.
        threads: threads that decode and tokenise.
        batch_size: samples per batch; 0 leaves it to the embedder.
        transport: "auto", "payload" or "staging".
        drain_s: time to finish begun units after a stop was asked for.
        report_fd: where `embq.worker.supervisor.report_pipe` writes; -1 for nowhere.
        progress_fd: memory that is shared with the supervisor, see `embq.worker.meter.progress_board`; -1 for none.
        version: of embq, as the supervisor has it.
        without: optional ways to compute that are left out, with commas between them, see
        `embq.worker.supervisor.slot`. threads_chosen: whether the user chose `threads`; else a run may.
        siblings: processes of the same supervisor that compute, this one included: they share the machine's memory.
    """

    name: str
    device: str
    run: str
    prefetch: int
    threads: int
    batch_size: int
    transport: str
    drain_s: float
    report_fd: int
    progress_fd: int
    version: str
    siblings: int = 1
    threads_chosen: bool = False
    without: str = ""

    @property
    def torch_device(self) -> str:
        """Name of the device in torch: this process sees no other GPU, see `embq.worker.supervisor.slot`."""
        return "cuda:0" if self.device.startswith("cuda") else self.device

    def with_defaults(self, defaults: WorkerDefaults) -> WorkerOptions:
        """These options, with the defaults of a run for those that the user did not choose."""
        threads = 0 if self.threads_chosen else defaults.prepare_threads
        return replace(self, batch_size=self.batch_size or defaults.batch_size, threads=threads or self.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The objects of one worker process that its services share.

    Attributes:
        stopped: whether the process is to end.
        scheduler: says whose turn it is.
        board: steps in progress, which the supervisor reads.
        report: pipe to the supervisor.
        locality: knows which inputs are on this machine.
    """

    options: WorkerOptions
    settings: Settings
    stopped: StopFlag
    scheduler: Scheduler
    board: ProgressBoard
    report: Report
    locality: InputLocality

    def connect(self, answer_s: float = ANSWER_S) -> redis.Redis:
        """A new client, which the caller closes. It waits for an unreachable broker until the drain timeout has passed.

        Args:
            answer_s: how long one answer may take.
        """
        return connect(
            self.settings.broker_url,
            password=self.settings.broker_password,
            patient=True,
            give_up=lambda: self.stopped.longer_than(self.options.drain_s),
            answer_s=answer_s,
        )
