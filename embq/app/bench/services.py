"""Private services of an experiment: broker, writer, producer and workers that stay loaded between measured runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import embq
from embq.app.bench.texts import Records
from embq.app.local.service_process import ServiceProcess
from embq.app.status.run_monitor import RunMonitor
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import ConfigError, OutputError
from embq.core.queue.heartbeats import live_workers
from embq.core.queue.ledger import Ledger
from embq.core.run.control import RunState
from embq.core.run.run_info import RunInfo
from embq.producer.announce import announce
from embq.producer.enqueue import Request, prepare
from embq.sources.reader_options import ReadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShare:
    """Work of one worker process in a run.

    Attributes:
        device: as `--devices` names it.
        rows: that its device embedded, also where another worker's copy of a unit was faster.
        tokens: of these.
        busy_s: seconds that the device had a batch in hand.
    """

    device: str
    rows: int
    tokens: int
    busy_s: float


class Traces:
    """The batch traces of worker processes, see `embq.worker.meter.batch_trace`; each line is read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, int] = {}

    def shares(self, workers: Sequence[tuple[str, str]], *, since: float) -> tuple[WorkerShare, ...]:
        """One share for each (name, device) of `workers`, of what began after `since` (Unix seconds)."""
        return tuple(self._share(name, device, since) for name, device in workers)

    def _share(self, name: str, device: str, since: float) -> WorkerShare:
        lines = [line for line in self._new_lines(name) if line["began"] >= since]
        return WorkerShare(
            device=device,
            rows=sum(line["rows"] for line in lines),
            tokens=sum(line["tokens"] for line in lines),
            busy_s=sum(line["ended"] - line["began"] for line in lines),
        )

    def _new_lines(self, name: str) -> Iterator[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            return
        with path.open(encoding="utf-8") as file:
            file.seek(self._read.get(name, 0))
            text = file.read()
        whole, _, _ = text.rpartition("\n")
        self._read[name] = self._read.get(name, 0) + len(whole.encode()) + bool(whole)
        for line in whole.splitlines():
            yield json.loads(line)


def memory_mb(processes: Iterable[int]) -> float | None:
    """Megabytes of these processes together, what they share counted once; None where the system does not tell."""
    total_kb = 0
    for process in processes:
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            return None
        found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        if found is None:
            return None
        total_kb += int(found.group(1))
    return total_kb * 1024 / 1e6


POLL_S = 0.05
BARE = {"EMBQ_ROOTS": "", "EMBQ_BROKER_PASSWORD_FILE": ""}
"""Settings of the user's services that the private ones must not inherit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model with its compute precision.

    Attributes:
        spec: of the model, as a user writes it.
        precision: compute precision.
    """

    spec: str
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSet:
    """The worker processes of a condition: `per_device` on each of `devices`, named as in `--devices`."""

    devices: tuple[str, ...]
    per_device: int = 1

    @property
    def size(self) -> int:
        """Worker processes."""
        return len(self.devices) * self.per_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """One measured run.

    Attributes:
        records: of the input, equal to rows plus failures.
        failures: records without a row.
        seconds: from the start of the first unit to the last commit, by the broker's clock.
        shares: work of each worker process, in the order of the devices.
        memory_mb: of all worker processes together, after the run; None where it is not known.
    """

    records: int
    failures: int
    seconds: float
    shares: tuple[WorkerShare, ...]
    memory_mb: float | None

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.records / self.seconds


class Services:
    """Broker, writer, workers and producer in a folder; a context manager that ends all their processes.

    A paused run, the keeper, requires the model while the services run, so that no worker unloads it between two
    measured runs. The producer is started when the last worker is ready, so that all start together.

    Args:
        folder: empty, for all files of the services.
        keeper: records of the keeper, which are not embedded.
        poll: called repeatedly while waiting; an exception that it raises ends the wait.

    Entering raises ModelError where the model cannot be loaded, and errors of services that end.
    """

    def __init__(
        self, folder: Path, worker_set: WorkerSet, model: Model, *, keeper: Records, poll: Callable[[], None]
    ) -> None:
        self.worker_set = worker_set
        self.model = model
        self.load_s = 0.0
        self.device_names: dict[str, str] = {}
        self._folder = folder
        self._keeper = keeper
        self._poll = poll
        self._stack = ExitStack()
        self._children: list[ServiceProcess] = []
        self._traces = Traces(folder / "trace")
        self._there: tuple[object, ...] = ()
        self._runs = 0
        self._spec = ""

    def __enter__(self) -> Services:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        server = EmbeddedServer(self._folder / "b")
        self._stack.callback(server.stop)
        url = server.start()
        self._client = connect(url)
        self._stack.callback(self._client.close)
        keeper, _ = self._announce(self._keeper, unit_size=1)
        self._spec = keeper.model.spec
        self._start_child("writer", url)
        worker_set = (
            "--devices",
            ",".join(self.worker_set.devices),
            "--workers",
            str(self.worker_set.per_device),
        )
        # An interrupted experiment does not wait for units to finish.
        worker = self._start_child("worker", url, *worker_set, "--drain-timeout", "1")
        while len(live := self._live()) < self.worker_set.size:
            if refused := worker.refused_model():
                raise refused
            self._wait()
        self.load_s = max(float(beat.get("load_s", 0.0)) for beat in live)
        self.device_names = {str(beat["device"]): str(beat.get("device_name", "")) for beat in live}
        Ledger(self._client, keeper.run).ask({"state": RunState.PAUSED})
        self._start_child("producer", url)
        self._there = self._identities()

    def _start_child(self, verb: str, url: str, *arguments: str) -> ServiceProcess:
        child = ServiceProcess(
            verb,
            arguments,
            log=self._folder / f"{verb}.log",
            broker_url=url,
            environment={**BARE, "EMBQ_TRACE": str(self._traces.folder)},
        )
        # Stopped in reverse order: the writer last, since it commits what workers still publish.
        self._stack.callback(child.stop, 30.0)
        child.start()
        self._children.append(child)
        return child

    def measure(self, records: Records, *, unit_size: int) -> Replicate:
        """Embed the records in units of `unit_size`, and measure it.

        Raises OutputError where the count is not exact, and ConfigError where a process was replaced meanwhile, which
        makes the measurement invalid.
        """
        while any(beat.get("held") for beat in self._live()):
            self._wait()
        since = time.time()
        _, root = self._announce(records, unit_size=unit_size)
        watch = RunMonitor(root, None)
        while not watch.log_state().closed:
            self._wait()
        done = watch.look()
        if self._identities() != self._there:
            raise ConfigError(
                "a process ended while it was measured and was replaced, so the figure would be wrong",
                next_step="see with `embq run` what ends it; is there enough memory for so many workers?",
            )
        if done.rows + done.failures != records.count:
            raise OutputError(
                f"{records.count:,} records went in, {done.rows:,} rows and {done.failures:,} failures came out",
                next_step="this is a bug: report it",
            )
        live = self._live()
        return Replicate(
            records=records.count,
            failures=done.failures,
            seconds=max(done.timing["embed_s"], 0.001),
            shares=self._traces.shares([(str(beat["name"]), str(beat["device"])) for beat in live], since=since),
            memory_mb=memory_mb(int(beat["pid"]) for beat in live),
        )

    def _announce(self, records: Records, *, unit_size: int) -> tuple[RunInfo, Path]:
        """A new run of the records, and its folder."""
        self._runs += 1
        root = self._folder / f"run-{self._runs:03d}"
        request = Request(
            inputs=(str(records.path),),
            output=root,
            models=(self.model.spec,),
            modalities=("text",),
            precision=self.model.precision,
            part_rows=1_000_000,
            options=ReadOptions(unit_samples=unit_size),
            version=embq.__version__,
        )
        info = prepare(request).info
        announce(self._client, info, root)
        return info, root

    def _live(self) -> list[dict[str, Any]]:
        """Heartbeats of the workers that have loaded the model, in the order of the devices."""
        order = {device: position for position, device in enumerate(self.worker_set.devices)}
        beat = [one for one in live_workers(self._client) if one.get("model") == self._spec]
        return sorted(beat, key=lambda one: (order.get(str(one["device"]), 0), str(one["name"])))

    def _identities(self) -> tuple[object, ...]:
        """Process identities; they change when a process is replaced."""
        services = [child.process.pid for child in self._children if child.process is not None]
        return (*services, *(str(beat["name"]) for beat in self._live()))

    def _wait(self) -> None:
        self._poll()
        for child in self._children:
            child.supervise()
        time.sleep(POLL_S)
