"""The services of one or several runs as separate processes, as they would run on several machines."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import redis

from embq.app.cli.verb_table import VERBS
from embq.core.broker.client import connect
from embq.core.broker.embedded import server_binary
from embq.core.process.children import die_with_parent
from tests.e2e.check import Output, check_complete
from tests.e2e.session import LOOK_S, Command, Ledger, committed, ended, run_of, succeed, write_texts
from tests.faults.kit.table import Recovery

SEED = int(os.environ.get("EMBQ_TEST_SEED") or "20240611")
"""Seed of all random choices in these tests."""

SERVER = os.environ.get("EMBQ_TEST_SERVER") or "valkey"
"""Server of the whole suite: "valkey" or "redis"."""

SABOTAGE = Path(__file__).parent / "sabotage"
"""Folder to put on PYTHONPATH of a process that is to be sabotaged."""

DIM = 16
MODEL = f"stub:{DIM}?ms_per_sample=5"
SAMPLES = 10
"""Samples of one unit."""

QUICK_LEASES = {"EMBQ_LEASE_S": "4", "EMBQ_BEAT_S": "1"}
"""Units of a worker whose death nobody sees wait for the end of the lease, 20 s by default."""

DEADLINE_S = 120.0

MakeCluster = Callable[..., "Cluster"]

Sabotage = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""One or several of the entries that `sabotage/sitecustomize.py` describes."""


# --- the broker ---


@cache
def server_program() -> Path:
    """The server that the suite runs on."""
    if SERVER == "redis":
        found = shutil.which("redis-server")
        assert found is not None, "EMBQ_TEST_SERVER=redis, but redis-server is not on PATH"
        return Path(found)
    return server_binary()


@cache
def server_version() -> str:
    """Its name and version."""
    told = subprocess.run([server_program(), "--version"], capture_output=True, text=True, timeout=10).stdout
    name = "Redis" if told.startswith("Redis") else "Valkey"
    return f"{name} {re.search(r'v=([0-9.]+)', told).group(1)}"  # type: ignore[union-attr]


_CONFIG = """\
bind {bind}
port {port}
unixsocket {folder}/b.sock
unixsocketperm 700
requirepass {password}
dir {folder}
appendonly yes
appendfsync everysec
aof-use-rdb-preamble yes
save ""
maxmemory 512mb
maxmemory-policy noeviction
daemonize no
logfile {folder}/server.log
"""


class Broker:
    """A server of this test alone, on TCP and on a unix socket, with its data on disk.

    Args:
        folder: short, because a unix socket is in it.
        bind: addresses to listen on.
        prefix: a program that ends by running the server in its place.
    """

    def __init__(
        self, folder: Path, recovery: Recovery, *, bind: Sequence[str] = ("127.0.0.1",), prefix: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.recovery = recovery
        self.bind = bind
        self.prefix = prefix
        self.password = secrets.token_hex(8)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._clients: list[redis.Redis] = []

    @property
    def url(self) -> str:
        """By TCP."""
        return f"redis://:{self.password}@{self.bind[0]}:{self.port}/0"

    @property
    def socket_url(self) -> str:
        """By the unix socket."""
        return f"unix://:{self.password}@{self.folder}/b.sock"

    def start(self) -> None:
        """Start it on the data that is there, and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "server.conf"
        config.write_text(
            _CONFIG.format(folder=self.folder, port=self.port, password=self.password, bind=" ".join(self.bind))
        )
        self.process = subprocess.Popen(
            [*self.prefix, str(server_program()), str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=die_with_parent,
        )
        end = time.monotonic() + DEADLINE_S
        while not self._answers():
            assert self.process.poll() is None, f"the server ended:\n{self.log[-3000:]}"
            assert time.monotonic() < end, f"the server does not answer:\n{self.log[-3000:]}"
            time.sleep(LOOK_S)

    def _answers(self) -> bool:
        client = connect(self.socket_url)
        try:
            return bool(client.ping())
        except redis.exceptions.RedisError:
            return False
        finally:
            client.close()

    @property
    def log(self) -> str:
        """Its log file."""
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def running(self) -> bool:
        """True while the process is alive."""
        return self.process is not None and self.process.poll() is None

    def client(self) -> redis.Redis:
        """An impatient client, by the unix socket; closed with the broker."""
        client = connect(self.socket_url)
        self._clients.append(client)
        return client

    def kill(self) -> None:
        """SIGKILL; what it had not written yet is lost."""
        self.recovery.injected()
        self._end()

    def suspend(self) -> None:
        """SIGSTOP: connections stay, nothing answers."""
        assert self.process is not None
        self.recovery.injected()
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def restart(self, after_s: float = 0.0, *, wiped: bool = False) -> None:
        """SIGKILL, and a start on the same data (or on none) `after_s` seconds later."""
        self.kill()
        if wiped:
            self.wipe()
        if after_s:
            time.sleep(after_s)  # the outage itself
        self.start()

    def wipe(self) -> None:
        """Delete its data; it must not be running."""
        assert not self.running
        shutil.rmtree(self.folder / "appendonlydir", ignore_errors=True)

    def close(self) -> None:
        """End it."""
        for client in self._clients:
            client.close()
        self._end()

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
            self.process = None


def free_port() -> int:
    """A port that nothing listens on, below those that the kernel gives to clients."""
    while True:
        port = 12_000 + secrets.randbelow(20_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


# --- services ---


class Service(Command):
    """A producer, a writer or a supervisor of workers with its own log; one supervisor stands for one machine."""

    def __init__(self, recovery: Recovery, *arguments: str | Path, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.recovery = recovery
        self.may_end = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def log(self) -> str:
        """All that it and its processes have said so far."""
        return self.stderr + self.stdout

    def said_times(self, event: str) -> int:
        """Number of times that an event stands in its log."""
        return len(re.findall(rf"^\S+ \w+ \w+ {event}\b", self.log, flags=re.MULTILINE))

    def alive(self) -> bool:
        """True while it runs."""
        return self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """The worker processes of a supervisor that are alive, oldest first."""
        there = [process for process in self.workers() if alive(process)]
        return sorted(there, key=lambda process: (process.create_time(), process.pid))

    def kill(self) -> None:
        """SIGKILL for the service; the kernel ends its children."""
        self.descendants()
        self.may_end = True
        self.recovery.injected()
        self.process.kill()
        self.process.wait(10)

    def kill_one(self, process: psutil.Process) -> None:
        """SIGKILL for one of its processes; returns when it is dead."""
        self.recovery.injected()
        with suppress(psutil.NoSuchProcess):
            process.kill()
        end = time.monotonic() + DEADLINE_S
        while alive(process):
            assert time.monotonic() < end, f"{process} does not die"
            time.sleep(LOOK_S)

    def terminate(self) -> None:
        """SIGTERM: it is asked to end in order."""
        self.may_end = True
        self.process.terminate()

    def suspend(self) -> None:
        """SIGSTOP for it and all of its processes; returns when the kernel says that they stand still."""
        self.recovery.injected()
        _stop(self._own)
        # One that is dead already waits for its parent, which stands still.
        for process in self.descendants():
            _stop(process)

    def resume(self, *, children_after_s: float = 0.0) -> None:
        """SIGCONT for all of them; for its children a moment later, where a test wants the worst order."""
        self._own.resume()
        time.sleep(children_after_s)
        for process in self.descendants():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Its exit status; fails the test where it takes longer, or leaves a process behind."""
        self.may_end = True
        return super().wait(deadline_s)


def _stop(process: psutil.Process) -> None:
    """SIGSTOP; returns when the kernel says that it stands still."""
    process.suspend()
    end = time.monotonic() + DEADLINE_S
    while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
        assert time.monotonic() < end, f"{process} does not stop"
        time.sleep(LOOK_S)


def alive(process: psutil.Process) -> bool:
    """True while it has not ended, which it may do at any moment."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Cluster:
    """One run and all who work on it.

    Args:
        folder: for the input, the output and the broker.
        broker: options of `Broker`.
    """

    def __init__(self, folder: Path, recovery: Recovery, *, shared: Broker | None = None, **broker: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.root = folder / "out"
        self.input = folder / "texts.jsonl"
        self.recovery = recovery
        self.units = 0
        self.expected: dict[str, bytes] = {}
        self.services: list[Service] = []
        self._others: list[Cluster] = []
        self._owns_broker = shared is None
        self.broker = shared or Broker(folder / "b", recovery, **broker)
        if shared is None:
            self.broker.start()
        self.ledger = Ledger(self.root, self.broker.socket_url)

    def another(self, name: str) -> Cluster:
        """A second run, with its own input and output, on the same broker; its services are its own."""
        other = Cluster(self.folder / name, self.recovery, shared=self.broker)
        self._others.append(other)
        return other

    # --- input ---

    def write_texts(self, units: int, samples: int = SAMPLES) -> None:
        """An input of `units` units of `samples` texts each; the text of key K is `text_of(K)`."""
        self.units, self._unit_size = units, samples
        self.expected = write_texts(self.input, units * samples)

    def text_of(self, number: int) -> str:
        """The text of sample `number` of the whole input."""
        return self.expected[f"k{number}"].decode()

    def enqueue(self, model: str = MODEL, *options: str, url: str = "") -> None:
        """`embq enqueue` of the input."""
        given = ["-o", str(self.root), "-m", model, *options]
        if "--unit-size" not in options and self.input.suffix == ".jsonl":
            given += ["--unit-size", str(self._unit_size)]
        succeed("enqueue", self.input, *given, environment={"EMBQ_BROKER_URL": url or self.broker.url})

    def begin(
        self,
        units: int,
        model: str = MODEL,
        *options: str,
        samples: int = SAMPLES,
        alone: bool = False,
        sabotage: Sabotage | None = None,
        **services: Any,
    ) -> Service:
        """Input, run, writer and producer; workers are all that is missing. Gives the writer.

        Args:
            alone: the writer is of this run only.
            sabotage: of the writer.
            services: options of both, those of `service`.
        """
        self.write_texts(units, samples)
        self.enqueue(model, *options)
        writer = self.writer(*(["--run", self.run()] if alone else []), sabotage=sabotage, **services)
        self.producer(**services)
        return writer

    # --- services ---

    def writer(self, *arguments: str, **options: Any) -> Service:
        """A resident writer. Options: those of `service`."""
        return self.service("writer", *arguments, **options)

    def producer(self, *arguments: str, **options: Any) -> Service:
        """A resident producer."""
        return self.service("producer", *arguments, **options)

    def workers(self, *arguments: str, count: int = 1, **options: Any) -> Service:
        """A machine: one supervisor with `count` worker processes on the CPU."""
        given = [*arguments, "--workers", str(count)]
        if "--devices" not in arguments:
            given += ["--devices", "cpu"]
        return self.service("worker", *given, **options)

    def service(
        self,
        verb: str,
        *arguments: str,
        url: str = "",
        environment: Mapping[str, str | None] | None = None,
        prefix: Sequence[str] = (),
        sabotage: Sabotage | None = None,
        **popen: Any,
    ) -> Service:
        """Start `embq <verb>`.

        Args:
            url: of the broker as it sees it; "" is the broker's own.
            environment: changes to its environment, such as EMBQ_STALL_S.
            prefix: a program that ends by running it in its place.
            sabotage: what goes wrong in it; see `sabotage/sitecustomize.py`.
        """
        changed: dict[str, str | None] = {"EMBQ_BROKER_URL": url or self.broker.url, **(environment or {})}
        if sabotage is not None:
            changed |= sabotaged(sabotage)
        service = Service(self.recovery, verb, *arguments, environment=changed, prefix=prefix, **popen)
        self.services.append(service)
        return service

    # --- what the broker and the folder say ---

    def run(self) -> str:
        """The run's id."""
        return run_of(self.root)

    def meta(self) -> dict[str, str]:
        """The run's counters and settings in the broker; empty where it does not know the run."""
        return {name.decode(): value.decode() for name, value in self._hash("meta").items()}

    def finished(self) -> int:
        """Units whose result is published or committed, as the broker knows it; 0 while it does not answer."""
        return self.ledger.finished()

    def owners(self) -> dict[int, str]:
        """Unit -> the worker that holds its lease."""
        return {int(u): token.decode().split(":")[1] for u, token in self._hash("owner").items()}

    def held_by(self, name: str) -> list[int]:
        """The units whose lease a worker has."""
        return [u for u, worker in self.owners().items() if worker == name]

    def busy(self) -> dict[int, str]:
        """Unit -> the token under which its samples are being read or embedded now."""
        begun = self._hash("busy")
        held = [*self._hash("owner").items(), *self._hash("spare").items()]
        return {int(u): token.decode() for u, token in held if token in begun}

    def busy_units(self) -> list[int]:
        """The units whose samples are being read or embedded now."""
        return list(self.busy())

    def is_finished(self, u: int) -> bool:
        """True when a result of unit `u` is published or committed."""
        client = self.ledger.client()
        assert client is not None
        published = client.hexists(self.ledger.key("pub"), str(u))
        return bool(published or client.getbit(self.ledger.key("done"), u))

    def attempts(self) -> dict[int, int]:
        """Unit -> attempts that were begun so far, the present one included; for units that are not committed."""
        return {int(u): int(count) for u, count in self._hash("att").items() if int(count)}

    def worker_names(self, service: Service) -> dict[int, str]:
        """Process id -> worker name, for the living processes of a machine."""
        names = {}
        for process in service.processes():
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            if "embq.worker.process" in line:
                names[process.pid] = json.loads(line[-1])["name"]
        return names

    def held_on(self, service: Service) -> list[int]:
        """The units whose lease a worker of this machine has."""
        names = set(self.worker_names(service).values())
        return [u for u, worker in self.owners().items() if worker in names]

    def committed(self) -> list[str]:
        """The unit ids that the commit records name, in order."""
        return committed(self.root)

    def records(self) -> list[dict[str, Any]]:
        """The commit records that are there."""
        return [json.loads(path.read_bytes()) for path in sorted((self.root / "commits").glob("*.json"))]

    def closed(self) -> bool:
        """True when the commit log has its last record."""
        last = max((self.root / "commits").glob("*.json"), default=None)
        return last is not None and json.loads(last.read_bytes())["kind"] == "close"

    def _hash(self, part: str) -> dict[bytes, bytes]:
        client = self.ledger.client()
        assert client is not None
        return client.hgetall(self.ledger.key(part))

    # --- waiting, and the end ---

    def until(self, predicate: Callable[[], object], deadline_s: float = DEADLINE_S) -> float:
        """Wait until `predicate()` is true; gives the seconds that it took.

        A broker that does not answer counts as "not yet". Fails the test when it takes too long, or when a service
        that nobody stopped has ended.
        """
        began = time.monotonic()
        while True:
            try:
                if predicate():
                    return time.monotonic() - began
            except redis.exceptions.RedisError:
                pass
            gone = [service for service in self._all_services() if not service.may_end and not service.alive()]
            assert not gone, f"ended by itself: {gone}\n{self.logs()}"
            waited = time.monotonic() - began
            assert waited < deadline_s, f"nothing came of it in {deadline_s:g} s\n{self.state()}\n{self.logs()}"
            time.sleep(LOOK_S)

    def until_finished(self, units: int, deadline_s: float = DEADLINE_S) -> float:
        """Wait until at least `units` units are published or committed."""
        return self.until(lambda: self.finished() >= units, deadline_s)

    def until_closed(self, deadline_s: float = DEADLINE_S) -> float:
        """Wait until the run is complete."""
        return self.until(self.closed, deadline_s)

    def assert_completes(self, deadline_s: float = DEADLINE_S, **exact: Any) -> Output:
        """Wait until the run is complete; it is exact then. Options: those of `assert_exact`."""
        self.until_closed(deadline_s)
        return self.assert_exact(**exact)

    def assert_exact(
        self,
        failures: Mapping[str, str] | None = None,
        *,
        without: Iterable[str] = (),
        dim: int = DIM,
        tracebacks: bool = False,
    ) -> Output:
        """The run is complete, and after `embq gc` holds exactly what its input says; `embq verify` says so too.

        Args:
            failures: key -> code of every sample that is a failure; the key is "" for a unit that failed whole.
            without: keys that are in units that failed whole.
            tracebacks: whether a traceback in a log is no defect here.
        """
        self.collect_garbage()
        failures = failures or {}
        missing = {*failures, *without}
        rows = {key: data for key, data in self.expected.items() if key not in missing}
        try:
            output = check_complete(self.root, rows, units=self.units, dim=dim, failures=failures)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error
        status, stdout, stderr = ended("verify", self.root, deadline_s=DEADLINE_S)
        assert status == 0, stdout + stderr
        if not tracebacks:
            for service in self._all_services():
                assert "Traceback (most recent call last)" not in service.log, service.said
        return output

    def collect_garbage(self) -> None:
        """`embq gc`: what dead workers left goes."""
        if "gc" in VERBS:
            succeed("gc", self.root, "--older-than", "0", environment={"EMBQ_BROKER_URL": self.broker.url})
        else:
            for path in (self.root / "_staging").glob(".*.arrow"):
                path.unlink()

    def state(self) -> str:
        """State of the broker and the folder, for the text of a failed assertion."""
        try:
            parts = {"meta": self.meta(), "owner": self.owners(), "att": self.attempts()}
        except redis.exceptions.RedisError as error:
            parts = {"broker": str(error)}  # type: ignore[dict-item]
        return f"committed {len(self.committed())} of {self.units}; {parts}"

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(
            f"--- {service!r} -> {service.process.poll()}\n{service.log[-3000:]}" for service in self.services
        )

    def _all_services(self) -> list[Service]:
        return [*self.services, *(service for other in self._others for service in other.services)]

    def close(self) -> None:
        """Kill what is left; a process that stays is an error."""
        for other in self._others:
            other.close()
        for service in self.services:
            service.close()
        self.ledger.close()
        if self._owns_broker:
            self.broker.close()


def held_after(units: int, gate: Path) -> dict[str, Any]:
    """Sabotage: each worker process begins so many units and one more, and reads on when `<gate>.open` is there.

    So a run is not over before the test has done to it what it wants to do in the middle of it.
    """
    # A unit of one chunk is asked for a second one, which tells that it has ended.
    return {
        "at": "embq.worker.stages.read:ReadStage._next_chunk",
        "count": 2 * units + 1,
        "do": "gate",
        "gate": str(gate),
    }


def let_go(gate: Path) -> None:
    """Open a gate."""
    Path(f"{gate}.open").touch()


def sabotaged(sabotage: Sabotage) -> dict[str, str]:
    """The environment by which a process is sabotaged."""
    entries = [sabotage] if isinstance(sabotage, Mapping) else list(sabotage)
    entries += json.loads(os.environ.get("EMBQ_SABOTAGE", "[]"))
    path = os.pathsep.join([str(SABOTAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "EMBQ_SABOTAGE": json.dumps(entries, default=str)}
