"""Processes are killed, stopped and robbed of their broker in mid-run; the data set is exact all the same."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import redis

from tests.e2e.check import check_complete
from tests.e2e.session import Ledger, await_in, committed, ended, logs, started, write_texts
from tests.faults.kit.cluster import alive, held_after, let_go, sabotaged

DIM = 16
SAMPLES = 10
"""Samples of one unit."""

QUICK_LEASES = {"EMBQ_LEASE_S": "4", "EMBQ_BEAT_S": "1"}
"""Units of a worker whose death nobody sees wait for the end of the lease, 20 s by default."""


@dataclass(slots=True)
class Case:
    """An input, the output folder, and what must be in it at the end."""

    root: Path
    texts: Path
    units: int
    expected: dict[str, bytes]
    ledger: Ledger
    gate: Path

    def held_after(self, units: int) -> dict[str, str]:
        """The environment in which each worker process waits for `let_go` after so many units."""
        return sabotaged(held_after(units, self.gate))

    def let_go(self) -> None:
        let_go(self.gate)

    def command(self, ms_per_sample: float) -> list[str | Path]:
        model = f"stub:{DIM}?ms_per_sample={ms_per_sample}"
        return ["run", self.texts, "-o", self.root, "-m", model, "--unit-size", str(SAMPLES), *self.options]

    @property
    def options(self) -> list[str]:
        return ["--workers", "2", "--quiet"]

    def finished(self, units: int) -> bool:
        return self.ledger.finished() >= units

    def assert_exact(self) -> None:
        output = check_complete(self.root, self.expected, units=self.units, dim=DIM)
        assert output.records[-1]["totals"]["quarantined"] == 0
        assert "Traceback" not in logs(self.root)

    def assert_verified(self) -> None:
        status, stdout, stderr = ended("verify", self.root)
        assert status == 0, stdout + stderr


@pytest.fixture
def make_case(short_tmp: Path) -> Iterator[object]:
    """Makes inputs of a number of units."""
    ledgers: list[Ledger] = []

    def make(units: int) -> Case:
        root, texts = short_tmp / "out", short_tmp / "texts.jsonl"
        ledger = Ledger(root)
        ledgers.append(ledger)
        return Case(root, texts, units, write_texts(texts, units * SAMPLES), ledger, short_tmp / "gate")

    yield make
    for ledger in ledgers:
        ledger.close()


def fences(root: Path) -> int:
    """Number of writers that have taken the output over: each begins with a record that says so."""
    records = [json.loads(path.read_bytes()) for path in sorted((root / "commits").glob("*.json"))]
    return sum(record["kind"] == "fence" for record in records)


@pytest.mark.slow
@pytest.mark.fault("R1", "`embq run`: its broker is killed in mid-run", gate=True)
def test_a_run_outlives_its_broker(make_case) -> None:
    case = make_case(120)
    with started(*case.command(4), environment={**QUICK_LEASES, **case.held_after(40)}) as command:
        await_in(command, lambda: case.finished(40))
        broker = command.broker()
        assert broker is not None
        # A second without an answer, so that everybody stands in the middle of a command when it dies.
        broker.suspend()
        time.sleep(1.0)
        broker.kill()
        await_in(command, lambda: command.broker() not in (None, broker))
        case.let_go()
        assert command.wait() == 0, command.said
    case.assert_exact()


@pytest.mark.fault("C1", "`embq run`: everything is killed at once; `embq resume` completes it")
@pytest.mark.parametrize("loss", ["nothing", "the queue", "the folder of the broker"])
def test_when_everything_dies_at_once_resume_completes_the_run(make_case, loss: str) -> None:
    case = make_case(120)
    with started(*case.command(4), environment=case.held_after(40)) as command:
        await_in(command, lambda: len(committed(case.root)) >= 20)
        if loss == "the queue":
            client = case.ledger.client()
            assert client is not None
            client.flushall()
        command.kill_all()
    before = committed(case.root)
    assert 20 <= len(before) < case.units
    if loss == "the folder of the broker":
        shutil.rmtree(case.root / "_broker")

    status, stdout, stderr = ended("resume", case.root, *case.options)

    assert status == 0, stdout + stderr
    case.assert_exact()
    assert committed(case.root)[: len(before)] == before


@pytest.mark.fault("W1", "`embq run`: the supervisor is killed")
def test_a_supervisor_that_is_killed_is_started_again(make_case) -> None:
    case = make_case(100)
    with started(*case.command(4), environment={**QUICK_LEASES, **case.held_after(30)}) as command:
        await_in(command, lambda: case.finished(20))
        supervisor = command.service("worker")
        assert supervisor is not None
        workers = command.workers()
        supervisor.kill()
        # The kernel ends the workers with it, so that none goes on unsupervised.
        await_in(command, lambda: not any(alive(worker) for worker in workers))
        case.let_go()
        assert command.wait() == 0, command.said
    case.assert_exact()


@pytest.mark.fault("N1", "a worker process is stopped past its lease and comes back")
def test_a_worker_that_was_stopped_past_its_lease_cannot_publish(make_case) -> None:
    case = make_case(120)
    environment = {"EMBQ_LEASE_S": "2", "EMBQ_BEAT_S": "0.5", **case.held_after(40)}
    with started(*case.command(4), environment=environment) as command:
        held: list[str] = []
        sleeper: list[tuple[psutil.Process, str]] = []

        def a_worker_holds_units() -> bool:
            known = case.ledger.workers()
            for process in command.workers():
                if process.pid in known and case.ledger.held_by(known[process.pid]["name"]):
                    sleeper[:] = [(process, known[process.pid]["name"])]
                    return True
            return False

        await_in(command, lambda: case.finished(10) and a_worker_holds_units())
        ((process, name),) = sleeper
        process.send_signal(signal.SIGSTOP)
        await_in(command, lambda: process.status() == psutil.STATUS_STOPPED)
        case.let_go()
        held = case.ledger.held_by(name)
        await_in(command, lambda: not case.ledger.held_by(name))
        client = case.ledger.client()
        assert client is not None
        # Another worker has done what was taken away; only then the sleeper wakes up, with its results in hand.
        await_in(command, lambda: all(_is_done(case, client, u) for u in held))
        process.send_signal(signal.SIGCONT)
        assert command.wait() == 0, command.said
    case.assert_exact()
    if held:
        assert "lease_lost" in logs(case.root) or "result_not_taken" in logs(case.root)


def _is_done(case: Case, client: redis.Redis, u: str) -> bool:
    try:
        return bool(client.hexists(case.ledger.key("pub"), u) or client.getbit(case.ledger.key("done"), int(u)))
    except redis.exceptions.RedisError:
        return False
