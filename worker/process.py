"""One worker process: one device, one loaded model, until there is nothing to do or something breaks.

Started by the supervisor (`worker.daemon`), which tells it by arguments what to do and by environment where the
broker is.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import redis

from core import hints
from core.broker import connect, refusal
from core.errors import EmbqError, Exit, ModelError, OutputError
from core.ledger import Ledger, load_scripts, registered
from core.log import Events, configure
from core.models import ModelConfig
from core.settings import Settings
from core.stopping import StopFlag
from worker.embed import EmbedStage
from worker.embedders.base import Embedder
from worker.embedders.registry import load
from worker.fetch import Fetcher
from worker.heartbeat import Heartbeat
from worker.pipeline import Pipeline
from worker.publish import PublishStage
from worker.read import ReadStage
from worker.rq_worker import HintWorker
from worker.stats import Stats
from worker.work import Leases

MODEL_POLL_S = 0.3
READY, WORKED = b"R", b"W"
"""What the process tells its supervisor through a pipe: the model is loaded; a unit has been published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the supervisor asks of a worker process.

    Attributes:
        name: worker name, unique for ever.
        device: "cpu" or "cuda:N".
        run: serve only this run; "" serves every run.
        prefetch: units claimed ahead.
        threads: threads that decode and tokenise.
        batch_size: samples per batch; 0 leaves it to the embedder.
        transport: "auto", "payload" or "staging".
        drain_s: time to finish begun units after a stop was asked for.
        report_fd: where READY and WORKED go; -1 for nowhere.
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
    version: str


def run(options: Options, settings: Settings, stopped: StopFlag) -> None:
    """Serve until stopped or until the one run asked for is over."""
    client = connect(settings.broker_url, password=settings.broker_password, patient=True)
    log = Events("worker")
    refused: set[ModelConfig] = set()
    while not stopped():
        model = _wait_for_model(client, options.run, stopped, refused)
        if model is None:
            return
        began = time.monotonic()
        try:
            embedder = load(model, options.device)
        except ModelError as error:
            if options.run:
                raise
            # What one user misspelt must not end the workers of all the others.
            refused.add(model)
            log.error("model_refused", model=model.spec, code=error.code, why=error.message, next=error.next_step)
            continue
        if options.batch_size:
            embedder.batch_size = options.batch_size
        load_s = time.monotonic() - began
        log.info("model_loaded", model=model.spec, device=options.device, seconds=round(load_s, 2))
        _report(options.report_fd, READY)
        _serve_model(options, settings, stopped, model, embedder, load_s)
        del embedder


def _wait_for_model(
    client: redis.Redis, run: str, stopped: Callable[[], bool], refused: Collection[ModelConfig]
) -> ModelConfig | None:
    """The model of a run that has work; None when stopped, or when the only run asked for is over.

    Args:
        refused: models that cannot be loaded here.
    """
    scripts = load_scripts(client)
    while not stopped():
        for record in registered(client).values():
            if run in ("", record.run) and record.model not in refused:
                state = Ledger(client, record.run, scripts=scripts).meta().get("state")
                if state == "running":
                    return record.model
                if run and state == "done":
                    return None
        time.sleep(MODEL_POLL_S)
    return None


def _serve_model(
    options: Options,
    settings: Settings,
    stopped: StopFlag,
    model: ModelConfig,
    embedder: Embedder,
    load_s: float,
) -> None:
    """Serve every run that uses the loaded model; returns when stopped, or when another model is wanted instead."""
    leases, stats = Leases(), Stats()

    def connect_again() -> redis.Redis:
        return connect(settings.broker_url, password=settings.broker_password, patient=True)

    client = connect_again()
    heartbeat = Heartbeat(
        connect_again(),
        leases,
        stats,
        name=options.name,
        lease_s=settings.lease_s,
        beat_s=settings.beat_s,
        stall_s=settings.stall_s,
        describe=lambda: _describe(options, model, load_s),
    )
    pool = ThreadPoolExecutor(options.threads, thread_name_prefix="prepare")
    publish = PublishStage(
        leases,
        stats,
        fingerprint=embedder.fingerprint,
        dims=embedder.dims,
        transport=options.transport,
        waiting=heartbeat.waiting,
        stopped=stopped,
    )
    pipeline = Pipeline(
        leases,
        prefetch=options.prefetch,
        batch_size=embedder.batch_size,
        pool=pool,
        make_read=lambda put: ReadStage(embedder, pool, stats, roots=settings.roots, hand_on=put),
        make_embed=lambda put: EmbedStage(embedder, leases, stats, hand_on=put),
        publish=publish,
    )
    switch = False
    failure: list[EmbqError] = []

    def over() -> bool:
        return bool(stopped() or switch or failure or pipeline.error or heartbeat.failed)

    def idle() -> None:
        nonlocal switch
        _report_work(options.report_fd, stats)
        switch = not leases.snapshot() and not _has_work(client, options.run, model)

    fetcher = Fetcher(
        client,
        pipeline,
        leases,
        name=options.name,
        model=model,
        fingerprint=embedder.fingerprint,
        lease_s=settings.lease_s,
        stopped=over,
    )

    def take(hint: hints.Hint) -> None:
        _report_work(options.report_fd, stats)
        try:
            fetcher.take(hint)
        except EmbqError as error:
            failure.append(error)

    rq_client = connect_again()
    queue = hints.hint_queue(rq_client, model.queue_key)
    heartbeat.start()
    pipeline.start()
    worker = HintWorker(queue, name=options.name, client=rq_client, take=take, stopped=over, idle=idle)
    try:
        worker.work(logging_level="WARNING")
        if pipeline.error is None and stopped.count < 2:
            pipeline.drain(options.drain_s)
        if pipeline.error is None or isinstance(pipeline.error, OutputError):
            # Where results cannot be stored, no unit is to blame.
            pipeline.release_all()
    finally:
        pipeline.close()
        if pipeline.error is None and heartbeat.failed is None:
            heartbeat.stop()
    for error in (*failure, pipeline.error, heartbeat.failed):
        if error is not None:
            raise error


def _has_work(client: redis.Redis, run: str, model: ModelConfig) -> bool:
    """Whether any run that we may serve still needs the loaded model."""
    scripts = load_scripts(client)
    return any(
        record.model == model
        and run in ("", record.run)
        and Ledger(client, record.run, scripts=scripts).meta().get("state", "") not in ("done", "")
        for record in registered(client).values()
    )


_reported: set[bytes] = set()


def _report(descriptor: int, word: bytes) -> None:
    if descriptor >= 0 and word not in _reported:
        _reported.add(word)
        os.write(descriptor, word)


def _report_work(descriptor: int, stats: Stats) -> None:
    if stats.units:
        _report(descriptor, WORKED)


def _describe(options: Options, model: ModelConfig, load_s: float) -> dict[str, Any]:
    return {
        "name": options.name,
        "device": options.device,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "model": model.spec,
        "version": options.version,
        "load_s": round(load_s, 2),
    }


def main() -> None:
    """Entry point of `python -m worker.process`."""
    parser = argparse.ArgumentParser(prog="embq worker process")
    parser.add_argument("--name", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--run", default="")
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=0)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--drain-s", type=float, default=150.0)
    parser.add_argument("--report-fd", type=int, default=-1)
    parser.add_argument("--version", default="")
    options = Options(**vars(parser.parse_args()))
    configure()
    log = Events("worker")
    stopped = StopFlag()
    stopped.install()
    try:
        run(options, Settings.from_environment(), stopped)
    except EmbqError as error:
        log.error("stopped", code=error.code, why=error.message, next=error.next_step)
        sys.exit(error.exit_code)
    except redis.exceptions.RedisError as error:
        told = refusal(error)
        log.error("stopped", code=told.code, why=told.message, next=told.next_step)
        sys.exit(told.exit_code)
    except Exception:  # noqa: BLE001 - process boundary
        log.bug("bug")
        sys.exit(Exit.BUG)


if __name__ == "__main__":
    main()
