"""Launches a training on a Ray cluster, one worker for each process; `work` runs in the workers."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import click

import embq
from embq.core.errors import (
    AwayError,
    ConfigError,
    DeviceError,
    EmbqError,
    Exit,
    InputError,
    TryLaterError,
    UsageError,
)
from embq.core.process.limits import cores
from embq.core.settings import Settings
from embq.training.launch.child_process import stop_requests
from embq.training.launch.launch_options import Where, passed_on
from embq.training.launch.member import attempt
from embq.training.launch.outcomes import ENDED_WELL, Outcome, cause, report_file, verdict
from embq.training.run.scratch import scratch

NOISE = (
    "(PlacementGroupCleaner ",
    "has constructor arguments in the object store and max_restarts > 0",
    "A worker died or was killed while executing a task",
)
"""Lines with one of these are dropped. The first one's process asks every second for the API of Ray's dashboard, and
complains where that is not installed; the second one is about an actor of Ray's own; embq reports the third."""


class FilteredStream(io.TextIOBase):
    """Writes whole lines to another stream, without `NOISE`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""

    def write(self, text: str) -> int:
        """Write complete lines; an incomplete one waits."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if not any(noise in line for noise in NOISE):
                self._stream.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def fileno(self) -> int:
        """The stream's descriptor."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """True if the stream is a terminal."""
        return self._stream.isatty()


START = "start one with `ray start --head --port=26379`; 6379, which Ray takes by default, is also Redis' port"


CONNECT_S, ANSWER_S = 10.0, 5.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of an HTTP/2 client, such as gRPC: the preface and empty settings (RFC 9113, 3.4)."""
_SETTINGS = b"\4"
"""Type of a server's first frame, behind three bytes of its length."""


def check_answer(text: str) -> None:
    """Check what listens at HOST:PORT; Ray itself would wait for a minute without an explanation.

    Raises AwayError if nothing does, ConfigError if it is another program.
    """
    host, _, port = text.rpartition(":")
    answer = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S) as connection:
            connection.settimeout(ANSWER_S)
            with suppress(OSError), connection.makefile("rb") as received:
                connection.sendall(_PREFACE)
                answer = received.read(4)
    except OSError as error:
        raise AwayError(
            f"no Ray answers at {text}: {error.strerror or error}",
            next_step=f"check the address of the cluster's head, and the firewall; {START}",
            code="ray_away",
        ) from error
    if answer[3:] == _SETTINGS:
        return
    # Redis answers what it does not understand with an error, that of a server with a password included.
    program = "a Redis" if answer[:1] in (b"-", b"+") else "another program"
    raise ConfigError(
        f"{program} answers at {text}, not Ray",
        next_step=f"give the address of the cluster's head; {START}",
        code="ray_away",
    )


COLLECTIVE_S = 300
"""Ray makes the process group; within a step a process waits this long for the others."""
FREE_S = 15.0
"""A training that has just ended gives its places back within seconds."""

_FAILED = re.compile(r"MemberFailedError: (\{.*\})")
_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")


def launch_ray(module: str, arguments: Sequence[str], where: Where) -> int:
    """Train on the cluster; returns the exit status of the training, or raises the error of one of its processes.

    The shards and the training's folder have to be the same for all nodes: shared, or behind http.
    """
    _settle(where.ray_address)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError("Ray is not installed here", next_step="pip install 'embq[ray]'") from error
    if where.dry_run:
        raise UsageError("--dry-run: Ray is called, and not a command", next_step="leave it out, or --launcher local")
    results = sys.stdout
    with (
        redirect_stdout(FilteredStream(sys.stderr)),
        redirect_stderr(FilteredStream(sys.stderr)),
        _of_our_own(where.ray_address) as settings,
    ):
        _connect(ray, where.ray_address, settings)
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


def _settle(address: str) -> None:
    """Set what Ray reads from the environment at its import."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "local" and "RAY_AUTH_MODE" not in os.environ:
        # Ray would write a token into the user's home, which turns authentication on for every later cluster of theirs.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16))


@contextmanager
def _of_our_own(address: str) -> Iterator[dict[str, Any]]:
    """Settings of a cluster that lasts for the block; none for an existing cluster."""
    if address != "local":
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        # An answer of Ray's own over HTTP is of no use to us, and starting its server takes seconds.
        yield {"include_dashboard": False, "_temp_dir": folder}


def _connect(ray: Any, address: str, settings: Mapping[str, Any]) -> None:
    if address not in ("auto", "local") and not os.environ.get("RAY_USE_TLS"):
        check_answer(address)
    with tempfile.TemporaryFile() as written:
        try:
            # Ray's workers import from the folder that it is called in; in this one only root can put modules.
            with _standard_error_in(written.fileno()), chdir("/"):
                ray.init(address=address, logging_level="ERROR", **settings)
        except Exception as error:
            written.seek(0)
            raise _refused(address, error, written.read().decode(errors="replace")) from error


@contextmanager
def _standard_error_in(file: int) -> Iterator[None]:
    """Redirect standard error, below Python too, into a file."""
    sys.stderr.flush()
    before = os.dup(2)
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _refused(address: str, error: Exception, written: str) -> EmbqError:
    """The error of a connection that Ray refuses.

    Args:
        error: what it raised.
        written: to standard error; only this tells that a token is missing or wrong.
    """
    if "Version mismatch" in str(error) and len(versions := _VERSIONS.findall(str(error))) == 2:
        (theirs, their_python), (ours, our_python) = versions
        return ConfigError(
            f"the Ray cluster at {address} has Ray {theirs} and Python {their_python}, "
            f"this machine Ray {ours} and Python {our_python}",
            next_step="install the same version of Ray, and Python of the same minor version, on all nodes and here",
            code="other_versions",
        )
    if "InvalidAuthToken" in written or "authentication token" in str(error).lower():
        return ConfigError(
            f"the Ray cluster at {address} asks for a token, and takes none of ours",
            next_step="on every node RAY_AUTH_MODE=token, and in RAY_AUTH_TOKEN_PATH the file of its head's token",
            code="ray_away",
        )
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return AwayError(
        f"the Ray cluster at {address} cannot be joined: {first}",
        next_step=f"call embq on a node of it (`ray start --address=HOST:PORT` makes this machine one); {START}",
        code="ray_away",
    )


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
    return verdict([Outcome(**returned["outcome"])], Exit.DONE)


def _after(error: Exception) -> int:
    """The verdict on a training that Ray has ended, from the outcomes of its workers."""
    failures = {rank: str(failure) for rank, failure in getattr(error, "worker_failures", {}).items()}
    texts = {text for failure in (*failures.values(), str(error)) for text in _FAILED.findall(failure)}
    outcomes = [Outcome(**json.loads(text)) for text in texts]
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
        outcome = Outcome.of(rank, error)
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
