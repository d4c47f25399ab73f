"""One worker process: one device, one loaded model, until there is nothing to do or something breaks.

Started by the supervisor (`worker.daemon`), which tells it by arguments what to do and by environment where the
broker is.
"""

from __future__ import annotations

import argparse
import faulthandler
import signal
import sys
import time
from collections.abc import Callable, Collection

import redis

from core.broker import connect, refusal
from core.errors import EmbqError, Exit, ModelError
from core.ledger import Ledger, load_scripts
from core.log import Events, configure
from core.models import ModelConfig
from core.registry import registered
from core.settings import Settings
from core.stopping import StopFlag
from worker.embedders.registry import load
from worker.embedders.warm_up import warm_up
from worker.progress import ProgressBoard
from worker.serving import ModelService, Options, Report

MODEL_POLL_S = 0.3


def run(options: Options, settings: Settings, stopped: StopFlag) -> None:
    """Serve until stopped or until the one run asked for is over."""
    client = connect(settings.broker_url, password=settings.broker_password, patient=True, give_up=stopped)
    log = Events("worker")
    report = Report(options.report_fd)
    board = ProgressBoard(options.progress_fd)
    refused: set[ModelConfig] = set()
    while not stopped():
        model = _wait_for_model(client, options.run, stopped, refused)
        if model is None:
            return
        began = time.monotonic()
        board.reset()
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
        board.expect("embed", warm_up(embedder, model.modalities) * embedder.batch_size)
        load_s = time.monotonic() - began
        log.info("model_loaded", model=model.spec, device=options.device, seconds=round(load_s, 2))
        report.ready()
        ModelService(options, settings, stopped, model, embedder, board, load_s=load_s).serve()
        del embedder  # before the next model is loaded: a device may hold only one


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
    parser.add_argument("--progress-fd", type=int, default=-1)
    parser.add_argument("--version", default="")
    options = Options(**vars(parser.parse_args()))
    configure()
    log = Events("worker")
    stopped = StopFlag()
    stopped.install()
    # For the supervisor, which asks a process that is stuck where: this handler needs no interpreter.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
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
