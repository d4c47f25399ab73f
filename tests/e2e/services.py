"""Resident services around a real server, and what a test asks of the runs that they serve."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import pytest
import redis

from embq.app.cli import entry_point
from embq.core.broker.embedded import EmbeddedServer
from embq.core.models import ModelConfig, ModelSpec
from embq.core.queue.keys import queue_name
from tests.e2e.session import Command, await_in, run_of, started, write_texts

DIM = 4
SAMPLES = 5
"""Samples of one unit."""
MODEL = f"stub:{DIM}?ms_per_sample=8"


class Services:
    """A producer, a writer and worker processes, which know of runs only what the broker tells them.

    Args:
        stack: what is started is ended with it.
        start: the services to start at once.
        environment: changes to that of the services.
    """

    def __init__(
        self,
        stack: ExitStack,
        server: EmbeddedServer,
        *,
        start: Sequence[str] = ("writer", "producer", "worker"),
        workers: int = 2,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.stack = stack
        self.workers = workers
        self.environment = {
            "EMBQ_BROKER_URL": server.url,
            "EMBQ_LEASE_S": "4",
            "EMBQ_BEAT_S": "0.5",
            **(environment or {}),
        }
        self.services: dict[str, Command] = {}
        for verb in start:
            self.start(verb)

    def start(self, verb: str) -> None:
        """Start a service."""
        arguments = ["--devices", "cpu", "--workers", str(self.workers)] if verb == "worker" else []
        self.services[verb] = self.stack.enter_context(started(verb, *arguments, environment=self.environment))

    def replace(self, verb: str) -> None:
        """SIGKILL for a service and all below it, and another one in its place."""
        self.services[verb].kill_all()
        self.start(verb)

    def call(self, *arguments: str | Path, status: int = 0) -> str:
        """A command in this process, so that it is at work before a short run is over; gives its stdout."""
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as said:
            patch.setenv("EMBQ_BROKER_URL", self.environment["EMBQ_BROKER_URL"])
            patch.setattr("embq.app.status.run_control.CONFIRM_S", 60.0)  # a busy machine needs longer
            assert entry_point.run([str(argument) for argument in arguments]) == status
        return said.getvalue()

    def until(self, predicate: Callable[[], object]) -> None:
        await_in([*self.services.values()][-1], predicate)

    def enqueue(self, root: Path, units: int, *options: str, model: str = MODEL) -> dict[str, bytes]:
        texts = root.with_suffix(".jsonl")
        expected = write_texts(texts, units * SAMPLES, name=root.name)
        self.call("enqueue", texts, "-o", root, "-m", model, "--unit-size", str(SAMPLES), *options)
        return expected

    def status(self, run: str | Path) -> dict[str, object]:
        shape: dict[str, object] = json.loads(self.call("status", run, "--json"))
        return shape


def finished(client: redis.Redis, root: Path) -> int:
    """Units that are published or committed."""
    key = f"embq:{{{run_of(root)}}}"
    return int(client.hlen(f"{key}:pub")) + int(client.bitcount(f"{key}:done"))


def hints_waiting(client: redis.Redis, model: str) -> int:
    """Hints that wait for a worker with a model for texts."""
    config = ModelConfig(spec=str(ModelSpec.parse(model)), modalities=("text",), precision="fp32")
    return int(client.llen(f"rq:queue:{queue_name(config.queue_key)}"))
