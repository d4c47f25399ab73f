"""Launches a training on a Ray cluster, one worker for each process; `work` runs in the workers."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import click

import embq
from embq.app.remote.ray_cluster import FilteredStream, join, of_our_own, settle
from embq.core.errors import (
    ConfigError,
    DeviceError,
    EmbqError,
    Exit,
    InputError,
    TryLaterError,
    UsageError,
)
from embq.core.extras import missing
from embq.core.process.limits import cores
from embq.core.settings import Settings
from embq.training.launch.child_process import stop_requests
from embq.training.launch.launch_options import Where, passed_on
from embq.training.launch.member import attempt
from embq.training.launch.outcomes import ENDED_WELL, ProcessOutcome, cause, report_file, verdict
from embq.training.run.scratch import scratch

COLLECTIVE_S = 300
"""Ray makes the process group; within a step a process waits this long for the others."""
FREE_S = 15.0
"""A training that has just ended gives its places back within seconds."""

_FAILED = re.compile(r"MemberFailedError: (\{.*\})")


def launch_ray(module: str, arguments: Sequence[str], where: Where) -> int:
    """Train on the cluster; returns the exit status of the training, or raises the error of one of its processes.

    The shards and the training's folder have to be the same for all nodes: shared, or behind http.
    """
    settle(where.ray_address)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise missing("ray", "Ray is not installed here") from error
    if where.dry_run:
        raise UsageError("--dry-run: Ray is called, and not a command", next_step="leave it out, or --launcher local")
    results = sys.stdout
    with (
        redirect_stdout(FilteredStream(sys.stderr)),
        redirect_stderr(FilteredStream(sys.stderr)),
        of_our_own(where.ray_address) as settings,
    ):
        join(ray, where.ray_address, settings)
        try:
            workers = _free_places(ray, where)
            job = {
                "module": module,
                "arguments": list(arguments),
                "folder": str(Path.cwd()),
                "threads": Settings.from_environment().omp_threads,
                "embq": embq.__version__,
            }
            click.echo(f"{workers} workers of the Ray cluster at {where.ray_address}, Ray {ray.__version__}", err=True)
            return _fit(job, workers, where, results)
        finally:
            ray.shutdown()


def _free_places(ray: Any, where: Where) -> int:
    """Number of workers; an error if the cluster lacks them, or has none free now.

    Ray waits for resources for ever.
    """
    kind = "GPU" if where.device == "cuda" else "CPU"
    total = int(ray.cluster_resources().get(kind, 0))
    workers = where.processes or (total if kind == "GPU" else 1)
    if not total or workers > total:
        raise ConfigError(
            f"{workers or 'all'} workers with a {kind} each were asked for, and the Ray cluster at {where.ray_address} "
            f"has {total} {kind}s",
            next_step=f"--num-devices {total}, or more nodes" if total else "more nodes, or --device cpu",
            code="no_device",
        )
    end = time.monotonic() + FREE_S
    while (free := int(ray.available_resources().get(kind, 0))) < workers:
        if time.monotonic() > end:
            raise TryLaterError(
                f"{workers} workers with a {kind} each were asked for, and {free} of the {total} {kind}s of the Ray "
                f"cluster at {where.ray_address} are free",
                next_step="wait for the others (`ray status`)" + (f", or --num-devices {free}" if free else ""),
            )
        time.sleep(0.5)
    return workers


def _fit(job: dict[str, Any], workers: int, where: Where, results: TextIO) -> int:
    train: Any = importlib.import_module("ray.train")
    torch: Any = importlib.import_module("ray.train.torch")
    on_gpu = where.device == "cuda"
    passed = passed_on()
    with scratch(Path(tempfile.gettempdir()), "embq-ray-", mode=0o700) as storage:
        trainer = torch.TorchTrainer(
            work,
            train_loop_config=job,
            scaling_config=train.ScalingConfig(num_workers=workers, use_gpu=on_gpu),
            torch_config=torch.TorchConfig(backend="nccl" if on_gpu else "gloo", timeout_s=COLLECTIVE_S),
            # Nothing of the training is kept by Ray: the module writes its folder itself.
            run_config=train.RunConfig(
                name="embq",
                storage_path=str(storage),
                failure_config=train.FailureConfig(max_failures=where.max_restarts),
                # embq reports failures, once; the lines of the workers come through.
                logging_config=train.LoggingConfig(log_level="CRITICAL"),
                worker_runtime_env={"env_vars": passed} if passed else None,
            ),
        )
        try:
            with _stopped_by_either_signal():
                result = trainer.fit()
        except SystemExit:  # how Ray ends after Ctrl-C
            raise KeyboardInterrupt from None
        except train.TrainingFailedError as error:
            return _after(error)
    returned = result.return_value
    results.write(returned["printed"])
    return verdict([ProcessOutcome(**returned["outcome"])], Exit.DONE)


def _after(error: Exception) -> int:
    """The verdict on a training that Ray has ended, from the outcomes of its workers."""
    failures = {rank: str(failure) for rank, failure in getattr(error, "worker_failures", {}).items()}
    texts = {text for failure in (*failures.values(), str(error)) for text in _FAILED.findall(failure)}
    outcomes = [ProcessOutcome(**json.loads(text)) for text in texts]
    explanation = cause(outcomes)
    silent = [rank for rank, failure in failures.items() if not _FAILED.search(failure)]
    if silent and (explanation is None or explanation.follows):
        raise DeviceError(
            f"process {min(silent)} died in its Ray worker without a word, as it does where memory runs out",
            next_step=f"what Ray knows of it is in {report_file(failures[min(silent)])}. Start the same command again: "
            "it goes on from the last checkpoint",
            code="killed",
        )
    if explanation is None:
        report = report_file(str(error))
        raise EmbqError("Ray has ended the training", next_step=f"all that it said is in {report}", code="launch")
    return verdict(outcomes, Exit.BUG)


@contextmanager
def _stopped_by_either_signal() -> Iterator[None]:
    """Make SIGTERM act like SIGINT, for which Ray has a handler."""
    with stop_requests():  # which restores the handlers
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        yield


class MemberFailedError(RuntimeError):
    """A process failed, and Ray has to end the others; the text is its outcome as JSON.

    Ray hands exceptions on as text, among tracebacks of its own.
    """


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Run one process of a training, in a worker for which Ray has made the process group.

    Args:
        job: `module` with the `main` to call and its `arguments`; `folder`, to which paths among them are relative;
            `threads`, OMP_NUM_THREADS of the launching process or ""; `embq`, its version.

    Returns the outcome and the standard output; Ray keeps those of the first worker.
    Raises MemberFailedError if the training failed here.
    """
    from ray import train

    context = train.get_context()
    rank = context.get_world_rank()
    printed = io.StringIO()
    try:
        _enter(job)
    except EmbqError as error:
        outcome = ProcessOutcome.of(rank, error)
    else:
        share_cores(context.get_local_world_size(), job["threads"])
        with redirect_stdout(printed):
            outcome = attempt(job["module"], job["arguments"], rank)
    if outcome.status not in ENDED_WELL:
        raise MemberFailedError(json.dumps(asdict(outcome)))
    return {"outcome": asdict(outcome), "printed": printed.getvalue()}


def _enter(job: dict[str, Any]) -> None:
    """Change to the training's folder; ConfigError or InputError if this node cannot take part."""
    host = os.uname().nodename
    if job["embq"] != embq.__version__:
        raise ConfigError(
            f"{host} has embq {embq.__version__}, and the training was started by {job['embq']}",
            next_step="install the same version on every node of the cluster",
            code="other_versions",
        )
    try:
        os.chdir(job["folder"])
    except OSError as error:
        raise InputError(
            f"{host} has no folder {job['folder']}: {error.strerror}",
            next_step="call embq in a folder that all nodes of the cluster share, with --output in it",
            code="host_lacks",
        ) from error


def share_cores(processes: int, omp_threads: str) -> None:
    """Set the number of threads to this worker's share of the cores; Ray gives each worker one thread."""
    import torch

    if not omp_threads:
        torch.set_num_threads(max(1, cores() // processes))
