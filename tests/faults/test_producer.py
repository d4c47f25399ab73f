"""`embq enqueue` is killed at every call: either there is no run, or there is exactly the one that was asked for."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from embq.app.gc.collect import collect
from embq.core.errors import InputError
from embq.core.queue.keys import RUNS
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import load_run
from embq.core.settings import Settings
from tests.e2e.session import LOOK_S
from tests.faults.kit.cluster import DIM, SAMPLES, Cluster
from tests.faults.kit.strace import Call, Zygote, attached, calls_in
from tests.faults.kit.table import Recovery

UNITS = 4


@dataclass(slots=True)
class Sweep:
    """The same texts enqueued to one output folder after the other."""

    url: str
    client: redis.Redis
    zygote: Zygote
    folder: Path
    made: int = 0

    @property
    def root(self) -> Path:
        """The present output folder."""
        return self.folder / f"out{self.made}"

    def enqueue(self, inject: Sequence[str] = ()) -> tuple[int, list[Call], str]:
        """`embq enqueue`: its exit status, its calls, and what it said."""
        arguments = ["enqueue", str(self.folder / "texts.jsonl"), "-o", str(self.root), "-m", f"stub:{DIM}", "--json"]
        log, calls = (self.folder / f"{name}{self.made}.{len(inject)}" for name in ("log", "calls"))
        log.unlink(missing_ok=True)
        fork = self.zygote.start([*arguments, "--unit-size", str(SAMPLES)], log, {"EMBQ_BROKER_URL": self.url})
        with attached(fork.pid, calls, inject=inject):
            fork.go()
            end = time.monotonic() + 60
            while fork.alive():
                assert time.monotonic() < end, fork.log
                time.sleep(LOOK_S / 4)
            status = fork.wait()
        assert "Traceback" not in fork.log
        return status, calls_in(calls, fork.pid), fork.log

    def there(self) -> str:
        """The id of the run in the present folder, or "" where there is none."""
        try:
            return load_run(self.root).run
        except InputError:
            return ""

    def check(self) -> None:
        """Check that a kill left all or nothing, and that the same command again leaves exactly one run."""
        before = self.there()
        known = {run.decode() for run in self.client.hkeys(RUNS)}
        assert known <= {before}, "a run that is not there is known"
        status, _, said = self.enqueue()
        assert status == 0, said
        told = json.loads(said.splitlines()[-1])
        run = self.there()
        assert before in ("", run)
        assert told == {
            "schema": 1,
            "run": run,
            "new": not before,
            "added": 0,
            "units": UNITS,
            "done": 0,
            "precision": "fp32",
        }
        assert {name.decode() for name in self.client.hkeys(RUNS)} == {run}
        layout = Layout(self.root)
        units = list(Manifest(layout))
        assert [(unit.first, unit.samples) for unit in units] == [(n * SAMPLES, SAMPLES) for n in range(UNITS)]
        assert len({unit.unit_id for unit in units}) == UNITS
        collect(self.root, Settings(broker_url=self.url), must_answer=True, older_than_s=0, dry_run=False)
        assert list(layout.temporary.iterdir()) == []


@pytest.fixture
def sweep(cluster: Cluster, zygote: Zygote) -> Sweep:
    cluster.write_texts(UNITS)
    return Sweep(cluster.broker.socket_url, cluster.broker.client(), zygote, cluster.folder)


def undisturbed(sweep: Sweep) -> list[Call]:
    """The calls of a whole command at which a kill can make a difference."""
    sweep.enqueue()  # Python writes what it compiles at the first time only
    sweep.client.delete(RUNS)
    sweep.made += 1
    status, calls, said = sweep.enqueue()
    assert status == 0, said
    sweep.client.delete(RUNS)
    return [call for call in calls if call.changes]


def kill_at(sweep: Sweep, call: Call) -> None:
    """Let the next `embq enqueue` be killed at one of its calls."""
    sweep.made += 1
    status, made, _ = sweep.enqueue([call.kill()])
    assert status == -signal.SIGKILL, f"it ended with {status}"
    assert (made[-1].name, made[-1].number) == (call.name, call.number), f"it was killed at {made[-1]}"


@pytest.mark.fault("P1", "SIGKILL for `embq enqueue` at every system call that changes anything")
@pytest.mark.timeout(900)
def test_a_killed_enqueue_leaves_no_run_or_the_whole_one(sweep: Sweep, recovery: Recovery) -> None:
    calls = undisturbed(sweep)
    assert Counter(call.name for call in calls).keys() >= {"write", "fsync", "rename", "link", "unlink", "sendto"}
    wrong = []
    for call in calls:
        try:
            kill_at(sweep, call)
            recovery.injected()
            sweep.check()
        except AssertionError as error:
            wrong.append(f"{call}: {error}")
        sweep.client.delete(RUNS)
    assert wrong == []


@pytest.mark.fault("P1", "SIGKILL for `embq enqueue` between the run and its announcement; the run is worked off")
def test_a_run_whose_enqueue_was_killed_is_worked_off_after_the_next(
    sweep: Sweep, cluster: Cluster, recovery: Recovery
) -> None:
    hsets = [call for call in undisturbed(sweep) if "HSET" in call.text and RUNS in call.text]
    # The check of the user's rights sends an HSET too, of a run whose id has one letter instead of 16.
    (announces,) = [call for call in hsets if "$16" in call.text]
    kill_at(sweep, announces)
    recovery.injected()
    assert sweep.there() != ""
    cluster.root = cluster.ledger.root = sweep.root
    sweep.check()
    cluster.writer()
    cluster.producer()
    cluster.workers()
    cluster.assert_completes()
