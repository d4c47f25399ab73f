"""A loaded model at work: wires the stages of the pipeline together, and takes them apart in order."""

from __future__ import annotations

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import redis

from core import hints
from core.broker import ANSWER_S, RESULT_S, connect
from core.errors import OutputError
from core.hints import Hint
from core.models import ModelConfig
from core.registry import Rate, report_rate
from core.scripts import load_scripts
from core.settings import Settings
from core.stopping import StopFlag
from core.units import Unit
from sources.kinds import fetchable
from worker.attribution import Attribution
from worker.embed import EmbedStage
from worker.embedders.base import Embedder
from worker.embedders.hardware import device_name
from worker.fetch import Fetcher
from worker.heartbeat import Heartbeat
from worker.hold import MOST_AHEAD, Hold
from worker.pipeline import Pipeline
from worker.progress import PULSE, ProgressBoard
from worker.publish import PublishStage
from worker.read import ReadStage
from worker.rq_worker import HintWorker
from worker.scheduler import Scheduler, Turn
from worker.sight import Sight
from worker.stats import Stats
from worker.trace import Trace
from worker.work import Leases

WAITING, LOADING, READY = b"W", b"L", b"R"
"""What the process tells its supervisor through a pipe: it waits for work; loads a model; the model is loaded and has
embedded something. Between them stand lines of JSON, each between two line ends: see `Report.refuse`."""
PIPE_BYTES = 4096
"""What a pipe takes at once, so that the supervisor reads no half of it (pipe(7), PIPE_BUF)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the supervisor asks of a worker process.

    Attributes:
        name: worker name, unique for ever.
        device: "cpu", "cuda:N" or "sim:SPEED".
        run: serve only this run; "" serves every run.
        prefetch: remote files that are fetched before their units' turn.
        threads: threads that decode and tokenise.
        batch_size: samples per batch; 0 leaves it to the embedder.
        transport: "auto", "payload" or "staging".
        drain_s: time to finish begun units after a stop was asked for.
        report_fd: where READY goes; -1 for nowhere.
        progress_fd: memory that is shared with the supervisor, see `worker.progress`; -1 for none.
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


class Report:
    """Tells the supervisor what this process is at.

    Args:
        descriptor: the pipe to it; -1 for nowhere.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._said = b""

    def say(self, word: bytes) -> None:
        """Say WAITING, LOADING or READY, where that was not said last."""
        if self._descriptor >= 0 and word != self._said:
            self._said = word
            os.write(self._descriptor, word)

    def refuse(self, model: str, why: str) -> None:
        """Say that a model cannot be loaded here, and why."""
        if self._descriptor >= 0:
            line = json.dumps({"model": model, "why": why[:1000]})
            if len(line) > PIPE_BYTES - 2:
                line = json.dumps({"model": model[:500], "why": "its log tells"})
            os.write(self._descriptor, f"\n{line}\n".encode())


class ModelService:
    """Serves every run that uses one loaded model.

    Args:
        turn: the right to do so; what is spent of it is told to the scheduler.
        sight: knows which inputs are on this machine.
    """

    def __init__(
        self,
        options: Options,
        settings: Settings,
        stopped: StopFlag,
        scheduler: Scheduler,
        turn: Turn,
        model: ModelConfig,
        embedder: Embedder,
        board: ProgressBoard,
        sight: Sight,
        *,
        load_s: float,
    ) -> None:
        self.options = options
        self.settings = settings
        self.stopped = stopped
        self.scheduler = scheduler
        self.turn = turn
        self.model = model
        self.embedder = embedder
        self.board = board
        self.sight = sight
        self.load_s = load_s
        self.device_name = device_name(options.device)
        self._clients: list[redis.Redis] = []
        self.client = self._connect()
        self.leases, self.stats = Leases(), Stats(options.threads)
        self.trace = Trace(settings.trace, worker=options.name, device=options.device)
        self.heartbeat = self._make_heartbeat()
        self.pipeline = self._make_pipeline()
        self.fetcher = Fetcher(
            self.client,
            self._connect(RESULT_S),
            self.pipeline,
            self.leases,
            name=options.name,
            model=self.model,
            fingerprint=embedder.fingerprint,
            dims=embedder.dims,
            refuse=scheduler.refuse_run,
            lease_s=settings.lease_s,
            stopped=self._over,
            only=options.run,
            sight=sight,
            claimed=self._claimed,
            seconds_of=self.stats.throughput.seconds_of,
        )
        self.hold = Hold(
            self.client,
            self.leases,
            self.stats.throughput,
            self.model,
            name=options.name,
            runs=self.fetcher.serves,
            prefetch=options.prefetch,
            waiting=lambda: self.pipeline.waiting,
            embedder=embedder,
            stopped=lambda: self.stopped() or self._next is not None,
        )
        self._no_work_left = False
        self._next: Turn | None = None
        self._began = self._slice_ends = 0.0

    def serve(self) -> Turn | None:
        """Work until stopped, until no run needs the model, or until it is another one's turn, which is given then.

        Raises what broke a stage.
        """
        client = self._connect()
        worker = HintWorker(
            hints.hint_queue(client, self.model.queue_key),
            name=self.options.name,
            client=client,
            read=Hint.from_job,
            room=self._room,
            rest_s=lambda: self.hold.rest_s,
            fits=lambda found: self.hold.fits([hint.unit for hint in found]),
            take=self.fetcher.take,
            stopped=self._over,
            idle=self._idle,
        )
        self.heartbeat.start()
        self.pipeline.start()
        try:
            with self.board.pulse():
                self._began = time.monotonic()
                self._slice_ends = self._began + self.settings.slice_s
                worker.work(logging_level="WARNING")
                if self.pipeline.error is None:
                    self._drain()
                if self.pipeline.error is None or isinstance(self.pipeline.error, OutputError):
                    # Where results cannot be stored, no unit is to blame.
                    self.pipeline.release_all()
        finally:
            self.pipeline.close()
            if self.pipeline.error is None and self.heartbeat.failed is None:
                self.heartbeat.stop()
        for error in (worker.failed, self.pipeline.error, self.heartbeat.failed):
            if error is not None:
                raise error
        if not self.stopped():
            self.scheduler.end(self.turn, spent_s=time.monotonic() - self._began)
        for client in self._clients:
            client.close()
        self.trace.close()
        return self._next

    def _drain(self) -> None:
        if self._next is None:
            self.pipeline.drain(self.options.drain_s, at_once=lambda: self.stopped.count > 1)
            return
        moved = time.monotonic()

        def gave_up() -> bool:
            # Results for which there is no room, say, because the writer of a run is gone: the others need not wait.
            nonlocal moved
            if any(step.stage != PULSE for step in self.board.in_hand()):
                moved = time.monotonic()
            return self.stopped.longer_than(self.options.drain_s) or time.monotonic() - moved > self.options.drain_s

        # A unit may take longer than a slice and `drain_s` together: cut off each time, it would never be done.
        self.pipeline.drain(float("inf"), at_once=gave_up)

    def _over(self) -> bool:
        if self.stopped() or self._no_work_left or self._next or self.pipeline.error or self.heartbeat.failed:
            return True
        if time.monotonic() >= self._slice_ends:
            self._look_for_another(idle=False)
        return self._next is not None

    def _idle(self) -> None:
        if self.leases.snapshot():
            return
        self._no_work_left = not self.scheduler.wanted(self.model)
        if not self._no_work_left:
            self._look_for_another(idle=True)

    def _look_for_another(self, *, idle: bool) -> None:
        now = time.monotonic()
        self._next = self.scheduler.another(self.turn, spent_s=now - self._began, idle=idle)
        if not idle:
            self._slice_ends = now + self.settings.slice_s

    def _connect(self, answer_s: float = ANSWER_S) -> redis.Redis:
        client = connect(
            self.settings.broker_url,
            password=self.settings.broker_password,
            patient=True,
            give_up=lambda: self.stopped.longer_than(self.options.drain_s),
            answer_s=answer_s,
        )
        self._clients.append(client)
        return client

    def _make_heartbeat(self) -> Heartbeat:
        return Heartbeat(
            self._connect(),
            self.leases,
            self.stats,
            self.board,
            name=self.options.name,
            lease_s=self.settings.lease_s,
            beat_s=self.settings.beat_s,
            stall_s=self.settings.stall_s,
            describe=self._describe,
            tail=lambda: self.hold.tail,
            measured=self._keep_rate,
            attribution=Attribution(self.stats, modalities=self.model.modalities, decode=self.model.decode),
        )

    def _make_pipeline(self) -> Pipeline:
        pool = ThreadPoolExecutor(self.options.threads, thread_name_prefix="prepare")
        embedder, leases, stats, board = self.embedder, self.leases, self.stats, self.board
        return Pipeline(
            leases,
            prefetch=MOST_AHEAD,
            pool=pool,
            make_read=lambda put, upcoming: ReadStage(
                embedder, pool, stats, board, roots=self.settings.roots, hand_on=put, upcoming=upcoming
            ),
            make_embed=lambda put: EmbedStage(embedder, leases, stats, board, hand_on=put, trace=self.trace),
            publish=PublishStage(
                leases,
                stats,
                board,
                fingerprint=embedder.fingerprint,
                dims=embedder.dims,
                transport=self.options.transport,
            ),
        )

    def _keep_rate(self, client: redis.Redis, rows_per_s: float) -> None:
        rate = Rate(device=self.device_name, rows_per_s=rows_per_s, dims=sum(self.embedder.dims.values()))
        report_rate(client, self.model, rate, scripts=load_scripts(client))

    def _room(self) -> int:
        room = 0 if self.sight.rests else self.hold.room()
        self.stats.stages.enough(self.hold.enough)
        return room

    def _claimed(self, unit: Unit) -> None:
        self.hold.claimed(unit, from_far=fetchable(unit, self.settings.roots))

    def _describe(self) -> dict[str, Any]:
        return {
            **self.hold.describe(),
            "name": self.options.name,
            "device": self.options.device,
            "device_name": self.device_name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "model": self.model.spec,
            "version": self.options.version,
            "load_s": round(self.load_s, 2),
            "serves": self.options.run,
            "unseen": self.sight.unseen(),
        }
