"""Private services of an experiment: broker, writer, producer and workers that stay loaded between measured runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import redis

import embq
from embq.app.local.service_process import ServiceProcess
from embq.app.status.run_monitor import RunMonitor
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import ConfigError, OutputError
from embq.core.queue.heartbeats import live_workers
from embq.core.queue.ledger import Ledger
from embq.core.run.control import RunState
from embq.core.run.run_info import RunInfo
from embq.lab.outcomes import Replicate, WorkerSet, WorkerShare
from embq.producer.announce import announce
from embq.producer.enqueue import Request, prepare
from embq.sources.reader_options import ReadOptions

POLL_S = 0.05
BARE = {"EMBQ_ROOTS": "", "EMBQ_BROKER_PASSWORD_FILE": ""}
"""Settings of the user's services that the private ones must not inherit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings of an experiment.

    Attributes:
        model: its spec.
        precision: compute precision.
        texts: to embed, in turn.
        records: of each replicate; 0 for as many as fit in `seconds`, by the speed of the warm-up.
        seconds: approximate duration of a replicate.
        replicates: of each condition.
        seed: of the order of conditions.
    """

    model: str
    precision: str
    texts: Sequence[str]
    records: int
    seconds: float
    replicates: int
    seed: int


@contextmanager
def services(folder: Path, worker_set: WorkerSet, setup: Setup, poll: Callable[[], None]) -> Iterator[Services]:
    """Broker, writer, workers and producer, which all end with the context.

    A paused run, the keeper, requires the model while the services run, so that no worker unloads it between two
    measured runs. The producer is started when the last worker is ready, so that all start together.

    Args:
        folder: empty, for all files of the services.
        poll: called repeatedly while waiting; an exception that it raises ends the wait.

    Raises ModelError if the model cannot be loaded, and errors of services that end.
    """
    with ExitStack() as stack:
        server = EmbeddedServer(folder / "b")
        stack.callback(server.stop)
        url = server.start()
        client = connect(url)
        stack.callback(client.close)
        private = Services(folder, worker_set, setup, client, poll)

        def start(verb: str, *arguments: str) -> ServiceProcess:
            environment = {**BARE, "EMBQ_TRACE": str(private.traces)}
            log = folder / f"{verb}.log"
            child = ServiceProcess(verb, arguments, log=log, broker_url=url, environment=environment)
            # Stopped in reverse order: the writer last, since it commits what workers still publish.
            stack.callback(child.stop, 30.0)
            child.start()
            private.children.append(child)
            return child

        keeper, _ = private.announce(1, unit_size=1)
        private.loaded_spec = keeper.model.spec
        start("writer")
        devices = ("--devices", ",".join(worker_set.devices), "--workers", str(worker_set.per_device))
        # An interrupted experiment does not wait for units to finish.
        worker = start("worker", *devices, "--drain-timeout", "1")
        while len(private.workers()) < worker_set.size:
            if refused := worker.refused_model():
                raise refused
            private.wait()
        Ledger(client, keeper.run).request({"state": RunState.PAUSED})
        start("producer")
        private.identities = private.identities_now()
        yield private


class Services:
    """The services of `services`, which measure one run after the other.

    Attributes:
        traces: folder with the batch traces of the workers, see `embq.worker.meter.batch_trace`.
        children: all but the broker.
        loaded_spec: of the model, as workers report it.
        identities: of the processes; they change when a process is replaced.
    """

    def __init__(
        self, folder: Path, worker_set: WorkerSet, setup: Setup, client: redis.Redis, poll: Callable[[], None]
    ) -> None:
        self.traces = folder / "trace"
        self.children: list[ServiceProcess] = []
        self.loaded_spec = ""
        self.identities: tuple[object, ...] = ()
        self._folder, self._worker_set, self._setup = folder, worker_set, setup
        self._client = client
        self._poll = poll
        self._runs = 0

    def measure(self, count: int, *, unit_size: int) -> Replicate:
        """Embed this many records in units of `unit_size`, and measure it.

        Raises OutputError if the count is not exact, and ConfigError if a process was replaced meanwhile, which makes
        the measurement invalid.
        """
        while any(beat.get("held") for beat in self.workers()):
            self.wait()
        since = time.time()
        _, root = self.announce(count, unit_size=unit_size)
        monitor = RunMonitor(root, None)
        while not monitor.log_state().closed:
            self.wait()
        progress = monitor.poll()
        if self.identities_now() != self.identities:
            raise ConfigError(
                "a process ended while it was measured and was replaced, so the figure would be wrong",
                next_step="see with `embq run` what ends it; is there enough memory for this number of workers?",
            )
        if progress.rows + progress.failures != count:
            raise OutputError(
                f"{count:,} records went in, {progress.rows:,} rows and {progress.failures:,} failures came out",
                next_step="this is a bug: report it",
            )
        workers = self.workers()
        return Replicate(
            records=count,
            failures=progress.failures,
            seconds=max(progress.timing["embed_s"], 0.001),
            shares=tuple(
                share_of(self.traces / f"{beat['name']}.jsonl", str(beat["device"]), since=since) for beat in workers
            ),
            memory_mb=memory_mb(int(beat["pid"]) for beat in workers),
        )

    def announce(self, count: int, *, unit_size: int) -> tuple[RunInfo, Path]:
        """A new run of this many records, and its folder."""
        self._runs += 1
        root = self._folder / f"run-{self._runs:03d}"
        request = Request(
            inputs=(str(write_records(self._folder, self._setup.texts, count)),),
            output=root,
            models=(self._setup.model,),
            modalities=("text",),
            precision=self._setup.precision,
            part_rows=1_000_000,
            options=ReadOptions(unit_samples=unit_size),
            version=embq.__version__,
        )
        info = prepare(request).info
        announce(self._client, info, root)
        return info, root

    def workers(self) -> list[dict[str, Any]]:
        """Heartbeats of the workers that have loaded the model, in the order of the devices."""
        order = {device: position for position, device in enumerate(self._worker_set.devices)}
        ready = [beat for beat in live_workers(self._client) if beat.get("model") == self.loaded_spec]
        return sorted(ready, key=lambda beat: (order.get(str(beat["device"]), 0), str(beat["name"])))

    def identities_now(self) -> tuple[object, ...]:
        """Process ids of the services, and names of the workers."""
        pids = [child.process.pid for child in self.children if child.process is not None]
        return (*pids, *(str(beat["name"]) for beat in self.workers()))

    def wait(self) -> None:
        """Wait for a moment; raises the error of a service that has ended."""
        self._poll()
        for child in self.children:
            child.supervise()
        time.sleep(POLL_S)


def write_records(folder: Path, texts: Sequence[str], count: int) -> Path:
    """Write a .jsonl file of `count` texts with unique keys, repeating the texts as needed."""
    path = folder / f"{count}.jsonl"
    if not path.exists():
        with path.open("w", encoding="utf-8") as file:
            for number, text in enumerate(islice(cycle(texts), count)):
                file.write(json.dumps({"id": f"k{number:08d}", "text": text}) + "\n")
    return path


def share_of(trace: Path, device: str, *, since: float) -> WorkerShare:
    """The work of a process on a device, by the lines of its trace that began after `since` (Unix seconds)."""
    lines = trace.read_text(encoding="utf-8").splitlines(keepends=True) if trace.exists() else []
    batches = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written
    batches = [batch for batch in batches if batch["began"] >= since]
    return WorkerShare(
        device=device,
        rows=sum(batch["rows"] for batch in batches),
        tokens=sum(batch["tokens"] for batch in batches),
        busy_s=sum(batch["ended"] - batch["began"] for batch in batches),
    )


def memory_mb(processes: Iterable[int]) -> float | None:
    """Megabytes of these processes together, what they share counted once; None if the system does not tell."""
    try:
        rollups = [Path(f"/proc/{process}/smaps_rollup").read_text() for process in processes]
    except OSError:
        return None
    return sum(int(kilobytes) for text in rollups for kilobytes in re.findall(r"^Pss:\s+(\d+)", text, re.M)) * 1.024e-3
