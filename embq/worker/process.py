"""Entry point of a worker process: serves one device, with one loaded model at a time.

Started by `embq.worker.supervisor`: `WorkerOptions` come as its argument, the address of the broker by the environment.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import time
from dataclasses import replace

import redis

from embq.core.broker.client import connect, refusal
from embq.core.errors import EmbqError, Exit, ModelError
from embq.core.models import ModelConfig
from embq.core.process.libraries import leave_out_pandas
from embq.core.process.limits import exhausted, shared_by
from embq.core.queue.other_work import Access, kind_of
from embq.core.service.log import Events, configure
from embq.core.service.stopping import StopFlag
from embq.core.settings import Settings, machine_name
from embq.sources.access.allowed_hosts import Reach, limit
from embq.worker.claim.input_locality import InputLocality
from embq.worker.claim.scheduler import Scheduler, Turn
from embq.worker.context import WorkerContext
from embq.worker.embedders.device.hardware import free_memory, simulated_speed
from embq.worker.embedders.device.tuning import PATHS
from embq.worker.meter.progress_board import ProgressBoard
from embq.worker.model_service import ModelService, load_model
from embq.worker.supervisor.protocol import ReportPipe, WorkerOptions

log = Events("worker")


def run(options: WorkerOptions, settings: Settings, stopped: StopFlag, report: ReportPipe | None = None) -> None:
    """Serve until stopped or until the one run asked for is over."""
    with connect(settings.broker_url, password=settings.broker_password, patient=True, give_up=stopped) as client:
        # A simulated device computes nothing, and a process that serves one run has no part in anything else.
        able = None if options.run or simulated_speed(options.device) else Access(settings.roots).able
        locality = InputLocality(client, host=machine_name(), roots=settings.roots, run=options.run)
        scheduler = Scheduler(client, run=options.run, slice_s=settings.slice_s, able=able, is_aside=locality.is_aside)
        report = report or ReportPipe(options.report_fd)
        context = WorkerContext(
            options=options,
            settings=settings,
            stopped=stopped,
            scheduler=scheduler,
            board=ProgressBoard(options.progress_fd),
            report=report,
            locality=locality,
        )
        PATHS.without, PATHS.report = frozenset(options.without), report.paths
        _serve(context)


def _serve(context: WorkerContext) -> None:
    """Serve turn after turn; each service returns the next turn, or None if it has to be waited for."""
    turn: Turn | None = None
    while not context.stopped():
        if turn is None:
            context.report.state("idle")
            turn = context.scheduler.wait(context.stopped)
        if turn is None:
            return
        context.board.reset()
        if not isinstance(turn.model, ModelConfig):
            context.report.state("serving")
            turn = kind_of(turn.model).serve(context, turn)
        else:
            turn = _serve_model(context, turn, turn.model)
            free_memory(context.options.torch_device)  # before the next model is loaded: a device may hold only one


def _serve_model(context: WorkerContext, turn: Turn, model: ModelConfig) -> Turn | None:
    """Load a model and serve the runs that use it; refuse permanently a model that cannot be loaded."""
    began = time.monotonic()
    context = replace(context, options=context.options.with_defaults(context.scheduler.defaults_of(model)))
    context.report.state("loading")
    PATHS.clear()
    log.info("model_loading", model=model.spec, device=context.options.device)
    try:
        embedder = load_model(model, context)
    except ModelError as error:
        if context.options.run:
            raise
        # A misspelt model of one user must not end the workers of all others.
        context.scheduler.refuse(turn)
        log.error("model_refused", model=model.spec, code=error.code, why=error.message, next=error.next_step)
        context.report.refuse(model.spec, f"{error.message}; {error.next_step}")
        return None
    load_s = time.monotonic() - began
    log.info("model_loaded", model=model.spec, device=context.options.device, seconds=round(load_s, 2))
    context.report.state("serving")
    following = ModelService(context, turn, model, embedder, load_s=load_s).serve()
    if following is not None:
        log.info("turn_ended", model=model.spec, next=following.name)
    return following


def main() -> None:
    """Entry point of `python -m embq.worker.process`."""
    options = WorkerOptions(**json.loads(sys.argv[1]))
    configure()
    leave_out_pandas()
    stopped = StopFlag()
    stopped.install()
    # The supervisor asks a stuck process for its stacks; this handler works without the interpreter.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    report = ReportPipe(options.report_fd)
    shared_by(options.siblings)
    try:
        try:
            settings = Settings.from_environment()
            limit(Reach.of(settings.roots, settings.private_hosts))
            run(options, settings, stopped, report)
        except redis.exceptions.RedisError as error:
            raise refusal(error) from error
    except Exception as error:  # noqa: BLE001 - process boundary
        cause = error if isinstance(error, EmbqError) else exhausted(error)
        if cause is None:
            log.bug("bug")
            report.end(f"{type(error).__name__}: {error}", "see its traceback in the log")
            sys.exit(Exit.BUG)
        log.error("stopped", code=cause.code, why=cause.message, next=cause.next_step)
        report.end(cause.message, cause.next_step)
        sys.exit(cause.exit_code)


if __name__ == "__main__":
    main()
