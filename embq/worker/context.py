"""The objects of a worker process that all of its services share."""

from __future__ import annotations

import os
from dataclasses import dataclass

import redis

from embq.core.broker.client import ANSWER_S, connect
from embq.core.service.stopping import StopFlag
from embq.core.settings import Settings, machine_name
from embq.worker.claim.input_locality import InputLocality
from embq.worker.claim.scheduler import Scheduler
from embq.worker.meter.progress_board import ProgressBoard
from embq.worker.supervisor.protocol import ReportPipe, WorkerOptions


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
    report: ReportPipe
    locality: InputLocality

    def identity(self) -> dict[str, str | int]:
        """Fields of a worker's report that are the same whatever it serves."""
        return {
            "name": self.options.name,
            "device": self.options.device,
            "host": machine_name(),
            "pid": os.getpid(),
            "version": self.options.version,
            "serves": self.options.run,
        }

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
