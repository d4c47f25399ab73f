"""A loaded model at work: wires the stages of the pipeline together, and takes them apart in order."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import redis

from core.broker.client import ANSWER_S, RESULT_S
from core.errors import DeviceFullError, ModelError, OutputError
from core.models import ModelConfig
from core.queue import hints
from core.queue.heartbeats import Rate, report_rate
from core.queue.hints import Hint
from core.queue.scripts import load_scripts
from core.service.log import Events
from core.units import Unit
from sources.unit_reader import fetchable
from worker.claim.claim_policy import MOST_AHEAD, ClaimPolicy
from worker.claim.claimer import Claimer
from worker.claim.heartbeat import Heartbeat
from worker.claim.lease import Leases
from worker.claim.rq_worker import HintWorker
from worker.claim.scheduler import Turn, TurnClock
from worker.context import WorkerContext
from worker.embedders.base import Embedder
from worker.embedders.device.capability import check_device
from worker.embedders.device.hardware import device_name, free_memory
from worker.embedders.device.tuning import tune
from worker.embedders.device.warm_up import warm_up
from worker.embedders.registry import load
from worker.meter.batch_trace import Trace
from worker.meter.bottleneck import Bottleneck
from worker.meter.meter import Meter
from worker.meter.progress_board import PULSE
from worker.stages.embed import EmbedStage
from worker.stages.pipeline import Pipeline
from worker.stages.publish import PublishStage
from worker.stages.read import ReadStage
from worker.supervisor.report_pipe import DEVICE_FULL

FULL_ATTEMPTS, FULL_PAUSE_S = 3, 5.0
"""A device may be full only because another process is just leaving it."""

log = Events("worker")


def load_model(model: ModelConfig, place: WorkerContext) -> Embedder:
    """A model that has embedded something, in the way that its device computes best.

    Raises ModelError where the model cannot be loaded here, or is too large for the device, ConfigError where the
    device can serve no model, and DeviceError where it is broken.
    """
    check_device(place.options.torch_device)
    attempts = 1 if place.options.guest else FULL_ATTEMPTS
    while True:
        try:
            return _loaded(model, place)
        except DeviceFullError as error:
            attempts -= 1
            if not attempts or place.stopped():
                raise ModelError(
                    f"{model.spec} does not fit on the device: {error.message}",
                    next_step="end what else uses its memory, or take fewer --workers-per-device or a smaller model",
                    code=DEVICE_FULL,
                ) from error
            log.warning("device_full", model=model.spec, device=place.options.device, why=error.message)
        # Out here the exception is gone, and with it what it held of the model.
        free_memory(place.options.torch_device)
        again_at = time.monotonic() + FULL_PAUSE_S
        while time.monotonic() < again_at and not place.stopped():
            time.sleep(0.1)


def _loaded(model: ModelConfig, place: WorkerContext) -> Embedder:
    asked, device = place.options.batch_size, place.options.torch_device
    embedder = load(model, device)
    if asked:
        embedder.batch_size = asked
    place.board.expect("embed", warm_up(embedder, model.modalities) * embedder.batch_size)
    tune(embedder, model, device=device, batch_size=asked, compile_s=place.settings.compile_s)
    return embedder


class ModelService:
    """Serves every run that uses one loaded model.

    Args:
        turn: the right to do so.
        load_s: what loading the model has taken.
        finished: called for each unit whose result was taken.
    """

    def __init__(
        self,
        place: WorkerContext,
        turn: Turn,
        model: ModelConfig,
        embedder: Embedder,
        *,
        load_s: float,
        finished: Callable[[], None] = lambda: None,
    ) -> None:
        self.options = place.options
        self.settings = place.settings
        self.stopped = place.stopped
        self.scheduler = place.scheduler
        self.board = place.board
        self.sight = place.sight
        self.model = model
        self.embedder = embedder
        self.load_s = load_s
        self.finished = finished
        self.device_name = device_name(self.options.torch_device)
        self.slices = TurnClock(self.scheduler, turn, slice_s=self.settings.slice_s, stopped=self.stopped)
        self._place = place
        self._clients: list[redis.Redis] = []
        self.client = self._connect()
        self.leases, self.stats = Leases(), Meter(self.options.threads)
        self.trace = Trace(self.settings.trace, worker=self.options.name, device=self.options.device)
        self.heartbeat = self._make_heartbeat()
        self.pipeline = self._make_pipeline()
        self.fetcher = self._make_fetcher()
        self.hold = self._make_hold()

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
                self.slices.begin()
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
        self.slices.end()
        for client in self._clients:
            client.close()
        self.trace.close()
        return self.slices.next

    def _drain(self) -> None:
        if self.slices.next is None:
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
        broken = self.pipeline.error is not None or self.heartbeat.failed is not None
        return broken or self.slices.over()

    def _idle(self) -> None:
        if not self.leases.snapshot():
            self.slices.idle()

    def _connect(self, answer_s: float = ANSWER_S) -> redis.Redis:
        client = self._place.connect(answer_s)
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
            attribution=Bottleneck(self.stats, modalities=self.model.modalities, decode=self.model.decode),
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
                finished=self.finished,
            ),
        )

    def _make_fetcher(self) -> Claimer:
        return Claimer(
            self.client,
            self._connect(RESULT_S),
            self.pipeline,
            self.leases,
            name=self.options.name,
            model=self.model,
            fingerprint=self.embedder.fingerprint,
            dims=self.embedder.dims,
            refuse=self.scheduler.refuse_run,
            lease_s=self.settings.lease_s,
            stopped=self._over,
            only=self.options.run,
            sight=self.sight,
            claimed=self._claimed,
            seconds_of=self.stats.throughput.seconds_of,
        )

    def _make_hold(self) -> ClaimPolicy:
        return ClaimPolicy(
            self.client,
            self.leases,
            self.stats.throughput,
            self.model,
            name=self.options.name,
            runs=self.fetcher.serves,
            prefetch=self.options.prefetch,
            waiting=lambda: self.pipeline.waiting,
            embedder=self.embedder,
            stopped=lambda: self.stopped() or self.slices.next is not None,
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
