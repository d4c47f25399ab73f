"""The function that Ray calls in each worker: one process of a training."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import embq
from embq.core.errors import ConfigError, InputError
from embq.core.process.limits import cores
from embq.training.launch.devices import thread_share
from embq.training.launch.member import attempt
from embq.training.launch.outcomes import ENDED_WELL, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInput:
    """Input of a worker.

    Attributes:
        module: whose `main` it calls.
        arguments: with these.
        folder: from there; paths among them are relative to it.
        threads: OMP_NUM_THREADS of the launching process, "" where it is not set.
        embq: version of the launching process.
    """

    module: str
    arguments: Sequence[str]
    folder: str
    threads: str = ""
    embq: str = embq.__version__


class MemberFailedError(RuntimeError):
    """A process failed, and Ray has to end the others; the text is its outcome as JSON.

    Ray hands exceptions on as text, among tracebacks of its own.
    """


def work(given: dict[str, Any]) -> dict[str, Any]:
    """Run one process of a training, in a worker where Ray has made the process group.

    Returns the outcome and the standard output; Ray keeps those of the first worker.
    Raises MemberFailedError where the training failed here.
    """
    from ray import train

    context = train.get_context()
    rank = context.get_world_rank()
    printed = io.StringIO()
    refused = _refusal(WorkerInput(**given), rank)
    if refused is None:
        share_cores(context.get_local_world_size(), given["threads"])
        with contextlib.redirect_stdout(printed):
            outcome = attempt(given["module"], given["arguments"], rank)
    else:
        outcome = refused
    if outcome.status not in ENDED_WELL:
        raise MemberFailedError(json.dumps(asdict(outcome)))
    return {"outcome": asdict(outcome), "printed": printed.getvalue()}


def _refusal(given: WorkerInput, rank: int) -> Outcome | None:
    """The outcome of a node that cannot take part; None where it can."""
    host = os.uname().nodename
    if given.embq != embq.__version__:
        return Outcome.of(
            rank,
            ConfigError(
                f"{host} has embq {embq.__version__}, and the training was started by {given.embq}",
                next_step="install the same version on every node of the cluster",
                code="other_versions",
            ),
        )
    try:
        os.chdir(given.folder)
    except OSError as error:
        return Outcome.of(
            rank,
            InputError(
                f"{host} has no folder {given.folder}: {error.strerror}",
                next_step="call embq in a folder that all nodes of the cluster share, with --output in it",
                code="host_lacks",
            ),
        )
    return None


def share_cores(processes: int, asked: str) -> None:
    """Set the number of threads to this worker's share of the cores; Ray gives each worker one thread."""
    import torch

    if not asked:
        torch.set_num_threads(thread_share(processes, "", cores()) or cores())
