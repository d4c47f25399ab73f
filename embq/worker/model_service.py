"""Serves the runs of one model: loads it onto the device, wires the pipeline, claims units, and drains."""

from __future__ import annotations

import time
from typing import Any

import redis

from embq.core.broker.client import ANSWER_S, RESULT_S
from embq.core.errors import ConfigError, DeviceFullError, EmbqError, InputError, ModelError, OutputError
from embq.core.models import ModelConfig
from embq.core.queue.heartbeats import Rate, report_rate
from embq.core.queue.scripts import load_scripts
from embq.core.service.log import Events
from embq.worker.claim.claim_policy import MOST_AHEAD
from embq.worker.claim.claimer import Claimer
from embq.worker.claim.heartbeat import Heartbeat
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.claim.scheduler import Turn, TurnClock
from embq.worker.context import WorkerContext
from embq.worker.embedders.base import Embedder
from embq.worker.embedders.device.capability import check_device
from embq.worker.embedders.device.hardware import device_name, free_memory, keep_uncollected
from embq.worker.embedders.device.tuning import tune
from embq.worker.embedders.device.warm_up import warm_up
from embq.worker.embedders.registry import load
from embq.worker.meter.batch_trace import Trace
from embq.worker.meter.bottleneck import Bottleneck
from embq.worker.meter.meter import Meter
from embq.worker.meter.progress_board import PULSE
from embq.worker.stages.pipeline import POLL_S, Pipeline
from embq.worker.stages.publish import PublishStage

FULL_ATTEMPTS, FULL_PAUSE_S = 3, 5.0
"""A device may be full only because another process is just leaving it."""

log = Events("worker")


def load_model(model: ModelConfig, context: WorkerContext) -> Embedder:
    """Load a model, warm it up, and tune it for its device.

    Raises ModelError if the model cannot be loaded here, or is too large for the device, ConfigError if the
    device can serve no model, and DeviceError if it is broken.
    """
    check_device(context.options.torch_device)
    attempts = FULL_ATTEMPTS
    while True:
        try:
            return _loaded(model, context)
        except DeviceFullError as error:
            attempts -= 1
            if not attempts or context.stopped():
                raise ModelError(
                    f"{model.spec} does not fit on the device: {error.message}",
                    next_step="end what else uses its memory, or take fewer --workers or a smaller model",
                ) from error
            log.warning("device_full", model=model.spec, device=context.options.device, why=error.message)
        except (ConfigError, InputError) as error:
            # A plug-in that does not load, say. The spec comes from a run, so it is the model that is refused.
            raise ModelError(error.message, next_step=error.next_step, code=error.code) from error
        # Out here the exception is gone, and with it what it held of the model.
        free_memory(context.options.torch_device)
        again_at = time.monotonic() + FULL_PAUSE_S
        while time.monotonic() < again_at and not context.stopped():
            time.sleep(0.1)


def _loaded(model: ModelConfig, context: WorkerContext) -> Embedder:
    batch_size, device = context.options.batch_size, context.options.torch_device
    embedder = load(model, device)
    if batch_size:
        embedder.batch_size = batch_size
    context.board.expect("embed", warm_up(embedder, model.modalities) * embedder.batch_size)
    tune(embedder, model, device=device, batch_size=batch_size, compile_s=context.settings.compile_s)
    keep_uncollected()
    return embedder


class ModelService:
    """Serves every run that uses one loaded model.

    Args:
        turn: the right to do so.
        load_s: seconds that loading the model has taken.
    """

    def __init__(
        self, context: WorkerContext, turn: Turn, model: ModelConfig, embedder: Embedder, *, load_s: float
    ) -> None:
        self.context = context
        self.options = context.options
        self.model = model
        self.embedder = embedder
        self.load_s = load_s
        self.device_name = device_name(self.options.torch_device)
        self.turns = TurnClock(context.scheduler, turn, context.stopped)
        self._clients: list[redis.Redis] = []
        self.leases = Leases()
        self.meter = Meter(
            self.options.threads,
            board=context.board,
            trace=Trace(context.settings.trace, worker=self.options.name, device=self.options.device),
        )
        publish = PublishStage(
            self.meter,
            fingerprint=embedder.fingerprint,
            dims=embedder.dims,
            transport=self.options.transport,
            version=self.options.version,
            finished=context.report.finished,
            refuse=self._refuse,
        )
        self.claimer = Claimer(
            context,
            self._connect(),
            self._connect(RESULT_S),
            model,
            embedder,
            self.leases,
            self.meter,
            full_runs=publish.full_runs,
        )
        self.heartbeat = Heartbeat(
            self._connect(),
            self.leases,
            self.meter,
            context.settings,
            name=self.options.name,
            describe=self._describe,
            tail=lambda: not self.claimer.policy.unclaimed,
            measured=self._keep_rate,
            bottleneck=Bottleneck(self.meter, modalities=model.modalities, decode=model.decode),
        )
        self.pipeline = Pipeline(
            embedder,
            self.leases,
            self.meter,
            publish,
            prefetch=MOST_AHEAD,
            roots=context.settings.roots,
            refuse=self._refuse,
        )

    def serve(self) -> Turn | None:
        """Work until stopped, until no run needs the model, or until it is another one's turn, which is given then.

        Raises what broke a stage, the claiming or the heartbeat.
        """
        self.heartbeat.start()
        self.pipeline.start()
        try:
            with self.context.board.pulse():
                try:
                    self._claim_and_submit()
                finally:
                    self._finish()
        finally:
            self.pipeline.close()
            if self.pipeline.error is None and self.heartbeat.failed is None:
                self.heartbeat.stop()
        for error in (self.pipeline.error, self.heartbeat.failed):
            if error is not None:
                raise error
        self.turns.end()
        for client in self._clients:
            client.close()
        self.meter.trace.close()
        return self.turns.next

    def _claim_and_submit(self) -> None:
        with self.claimer.receiver:
            self.turns.begin()
            while not self._over():
                suspects: list[LeasedUnit] = []
                for unit in self.claimer.next_units():
                    self.turns.busy()
                    if unit.suspect:
                        suspects.append(unit)
                    else:
                        self.pipeline.submit(unit)
                # A unit that ended a worker before runs alone, so that it cannot take others with it a second time.
                while suspects:
                    self._wait_until_held_at_most(len(suspects))
                    self.pipeline.submit(suspects.pop())
                    self._wait_until_held_at_most(len(suspects))
                if self.leases.at_work():
                    self.turns.busy()
                else:
                    self.turns.idle()

    def _over(self) -> bool:
        return self.pipeline.error is not None or self.heartbeat.failed is not None or self.turns.over()

    def _wait_until_held_at_most(self, count: int) -> None:
        while self.pipeline.running and not self._over():
            if self.leases.wait_until_at_most(count, timeout_s=POLL_S):
                return

    def _finish(self) -> None:
        """Let begun units finish, and give the others back."""
        if self.pipeline.error is None:
            self._drain()
        if self.pipeline.error is None or isinstance(self.pipeline.error, OutputError):
            # Where results cannot be stored, no unit is to blame.
            self.leases.release_all()

    def _drain(self) -> None:
        stopped, drain_s = self.context.stopped, self.options.drain_s
        if self.turns.next is None:
            if stopped():
                self._release_late(drain_s)
            self.pipeline.drain(drain_s, at_once=lambda: stopped.count > 1)
            return
        progress_at = time.monotonic()

        def gave_up() -> bool:
            # Results for which there is no room, say, because the writer of a run is gone: the others need not wait.
            nonlocal progress_at
            if any(step.stage != PULSE for step in self.context.board.in_hand()):
                progress_at = time.monotonic()
            return stopped.longer_than(drain_s) or time.monotonic() - progress_at > drain_s

        # A unit may take longer than a slice and `drain_s` together: cut off each time, it would never be done.
        self.pipeline.drain(float("inf"), at_once=gave_up)

    def _release_late(self, drain_s: float) -> None:
        """Give back units that, by the measured rate, the device does not finish in time: others begin them at once."""
        held, ends_s, kept_s = self.leases.at_work(), 0.0, 0.0
        outlook = self.meter.throughput.outlook(held)
        for unit in held:
            before_s, ends_s = ends_s, max(ends_s, outlook.get(unit.token, (0.0, 0.0))[0])
            if kept_s + ends_s - before_s > drain_s:
                unit.release()
            else:
                kept_s += ends_s - before_s

    def _refuse(self, unit: LeasedUnit, error: EmbqError) -> None:
        """Leave the run of a unit to other machines: an error that no restart cures must not end this one for all."""
        self.context.scheduler.refuse_run(unit.run, error)
        unit.release()

    def _connect(self, answer_s: float = ANSWER_S) -> redis.Redis:
        client = self.context.connect(answer_s)
        self._clients.append(client)
        return client

    def _keep_rate(self, client: redis.Redis, rows_per_s: float) -> None:
        rate = Rate(device=self.device_name, rows_per_s=rows_per_s, dims=sum(self.embedder.dims.values()))
        report_rate(client, self.model, rate, scripts=load_scripts(client))

    def _describe(self) -> dict[str, Any]:
        # Other workers do not count upon a worker that is about to leave.
        leaves = self.context.stopped() or self.turns.next is not None
        return {
            **({} if leaves else self.claimer.policy.describe()),
            **self.context.identity(),
            "device_name": self.device_name,
            "model": self.model.spec,
            "load_s": round(self.load_s, 2),
            "unseen": self.context.locality.unseen(),
        }
