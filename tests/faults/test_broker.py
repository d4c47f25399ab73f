"""R: the broker dies, forgets, comes back older or elsewhere, is full, or is configured so that it would lose work."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from embq.core.errors import Exit
from embq.core.queue.keys import GROUP, RUN_PARTS, queue_name
from embq.core.queue.runs import registered
from tests.e2e.session import Command, Ledger, committed, started
from tests.faults.kit.cluster import DIM, QUICK_LEASES, Broker, Cluster, Service, held_after, let_go
from tests.faults.kit.proxy import Proxy
from tests.faults.kit.table import Recovery
from tests.support.waiting import wait_until

SLOW = f"stub:{DIM}?ms_per_sample=15&batch_size=10"
"""One unit takes 150 ms."""

BACK_AT_WORK_S = 10.0
"""The bar: from the broker's first answer to the next finished unit."""

TENTH = {"EMBQ_LEASE_S": "2", "EMBQ_BEAT_S": "0.5", "EMBQ_STALL_S": "6"}
"""A tenth of the default lease and beat, so that an outage of one minute is one of ten."""


@dataclass(slots=True)
class Crew:
    """Everybody who works on the run, none of whom may end or be replaced."""

    cluster: Cluster
    recovery: Recovery
    machine: Service
    processes: list[int]

    def goes_on(self, what: str = "work goes on") -> None:
        """Note how long it takes from now until another unit is finished."""
        before = self.cluster.finished()
        let_go(self.cluster.folder / "hold")
        seconds = self.cluster.until(lambda: self.cluster.finished() > before)
        self.recovery.note(what, seconds, bar=BACK_AT_WORK_S)

    def begins_anew(self) -> None:
        """The same where the broker has just forgotten everything: what is committed is all that is finished."""
        before = len(self.cluster.committed())
        let_go(self.cluster.folder / "hold")
        seconds = self.cluster.until(lambda: self.cluster.finished() > before)
        self.recovery.note("noticed, rebuilt, and the next unit finished", seconds, bar=BACK_AT_WORK_S)

    def completes(self) -> None:
        """To the end, exactly, by the same processes."""
        self.cluster.until_closed()
        self.has_lost_nobody()
        self.cluster.assert_exact()

    def has_lost_nobody(self) -> None:
        assert [process.pid for process in self.machine.processes()] == self.processes, self.machine.log
        assert self.machine.said_times("worker_died") == 0, self.machine.log
        assert all(service.alive() for service in self.cluster.services), self.cluster.logs()


def crew(
    cluster: Cluster,
    recovery: Recovery,
    units: int = 120,
    *,
    environment: dict[str, str] | None = None,
    begun: int = 15,
    url: str = "",
    hold: int = 0,
) -> Crew:
    """A run in the middle of which two workers are; with `hold`, each stays there after so many units until it is to
    be seen that work goes on."""
    sabotage = held_after(hold, cluster.folder / "hold") if hold else None
    cluster.begin(units, SLOW, environment=environment, url=url)
    machine = cluster.workers(count=2, environment=environment, url=url, sabotage=sabotage)
    cluster.until_finished(begun)
    cluster.until(lambda: len(machine.processes()) == 2)
    return Crew(cluster, recovery, machine, [process.pid for process in machine.processes()])


# --- R1: it dies and comes back ---


@pytest.mark.fault("R1", "the broker is killed in mid-run and comes back with its disk after 2 s", gate=True)
def test_a_broker_that_is_killed_comes_back_after_2_s(cluster: Cluster, recovery: Recovery) -> None:
    everybody = crew(cluster, recovery, 60, hold=20)
    cluster.broker.restart(after_s=2.0)
    everybody.goes_on()
    everybody.completes()


@pytest.mark.parametrize("seconds", [0.1, 30.0])
@pytest.mark.fault("R1", "the broker is killed in mid-run and comes back with its disk after 0.1 s and 30 s")
def test_a_broker_that_is_killed_comes_back(cluster: Cluster, recovery: Recovery, seconds: float) -> None:
    everybody = crew(cluster, recovery)
    cluster.broker.restart(after_s=seconds)
    everybody.goes_on()
    everybody.completes()


@pytest.mark.parametrize("seconds", [0.1, 2.0, 30.0])
@pytest.mark.fault("R1", "the broker is killed while nobody has work, and is back after 0.1 s, 2 s and 30 s")
def test_idle_services_outlive_the_broker(cluster: Cluster, recovery: Recovery, seconds: float) -> None:
    cluster.write_texts(20)
    services = [cluster.writer(), cluster.producer()]
    machine = cluster.workers(count=2)
    cluster.until(lambda: len(machine.processes()) == 2 and all(service.said_times("started") for service in services))
    processes = [process.pid for process in machine.processes()]
    cluster.broker.restart(after_s=seconds)
    cluster.enqueue(SLOW)
    everybody = Crew(cluster, recovery, machine, processes)
    everybody.goes_on("new work begins")
    everybody.completes()


@pytest.mark.parametrize("seconds", [3.0, 25.0])
@pytest.mark.fault("R1", "the broker stands still (SIGSTOP) for 3 s and for longer than a lease, and goes on")
def test_a_broker_that_stood_still(cluster: Cluster, recovery: Recovery, seconds: float) -> None:
    everybody = crew(cluster, recovery)
    cluster.broker.suspend()
    time.sleep(seconds)
    cluster.broker.resume()
    everybody.goes_on()
    everybody.completes()


@pytest.mark.timeout(420)
@pytest.mark.fault(
    "R1", "the broker is away for 10 minutes, on a scale of 1:10 (1 min; lease, beat, stall 2, 0.5, 6 s)"
)
def test_ten_minutes_without_a_broker(cluster: Cluster, recovery: Recovery) -> None:
    everybody = crew(cluster, recovery, environment=TENTH)
    cluster.broker.kill()
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        everybody.has_lost_nobody()
        time.sleep(0.5)
    cluster.broker.start()
    everybody.goes_on()
    everybody.completes()


@pytest.mark.parametrize("away", ["dead", "standing still"])
@pytest.mark.fault("R1", "everybody is asked to end while the broker is dead or stands still; others go on later")
def test_services_end_when_asked_although_the_broker_is_away(cluster: Cluster, recovery: Recovery, away: str) -> None:
    cluster.begin(60, SLOW, environment=QUICK_LEASES)
    cluster.workers("--drain-timeout", "3", count=2, environment=QUICK_LEASES)
    cluster.until_finished(10)
    if away == "dead":
        cluster.broker.kill()
    else:
        cluster.broker.suspend()
    services = list(cluster.services)
    # All of them stand in the middle of a command by then, between one try and the next.
    time.sleep(4.0)
    asked = time.monotonic()
    for service in services:
        service.terminate()
    for service in services:
        assert service.wait() in (Exit.DONE, Exit.UNAVAILABLE), service.said
        assert "Traceback" not in service.log, service.said
    recovery.note("all have ended (drain timeout 3 s)", time.monotonic() - asked, bar=30.0)
    if away == "dead":
        cluster.broker.start()
    else:
        cluster.broker.resume()
    cluster.writer(environment=QUICK_LEASES)
    cluster.producer(environment=QUICK_LEASES)
    cluster.workers(count=2, environment=QUICK_LEASES)
    cluster.assert_completes()


def _started(command: Command, units: int) -> bool:
    return len(committed(Path(command.arguments[command.arguments.index("-o") + 1]))) >= units


@pytest.mark.fault("R1", "`embq run` on a broker of its own choosing that goes away for 20 s")
def test_embq_run_outlives_an_outage_of_a_broker_that_is_not_its_own(cluster: Cluster, recovery: Recovery) -> None:
    cluster.write_texts(100)
    arguments = ["run", cluster.input, "-o", cluster.root, "-m", SLOW, "--unit-size", "10", "--quiet"]
    with started(*arguments, environment={"EMBQ_BROKER_URL": cluster.broker.url}) as command:
        wait_until(lambda: _started(command, 5), 60)
        children = {process.pid for process in command.descendants()}
        cluster.broker.restart(after_s=20.0)
        assert {process.pid for process in command.descendants()} == children, command.said
        before = cluster.finished()
        recovery.note("work goes on", cluster.until(lambda: cluster.finished() > before), bar=BACK_AT_WORK_S)
        assert command.wait(60) == Exit.DONE, command.said
    cluster.assert_exact()


# --- R2: it comes back and has forgotten everything ---


@pytest.mark.fault("R2", "the broker forgets everything in mid-run (FLUSHALL)")
def test_flushall(cluster: Cluster, recovery: Recovery) -> None:
    everybody = crew(cluster, recovery, 60, environment=QUICK_LEASES, hold=20)
    recovery.injected()
    cluster.broker.client().flushall()
    everybody.begins_anew()
    everybody.completes()


@pytest.mark.parametrize("seconds", [0.1, 5.0])
@pytest.mark.fault("R2", "the broker is killed and comes back without its disk")
def test_a_broker_without_its_disk(cluster: Cluster, recovery: Recovery, seconds: float) -> None:
    everybody = crew(cluster, recovery, environment=QUICK_LEASES)
    cluster.broker.restart(after_s=seconds, wiped=True)
    everybody.begins_anew()
    everybody.completes()


@pytest.fixture
def spare_broker(short_tmp: Path, recovery: Recovery, cluster: Cluster) -> Iterator[Broker]:
    """An empty server beside the cluster's, with the same password."""
    spare = Broker(short_tmp / "spare", recovery)
    spare.password = cluster.broker.password
    spare.start()
    yield spare
    spare.close()


@pytest.mark.fault("R2", "failover to an empty server, and later back to the old one")
def test_a_failover_to_an_empty_server_and_back(cluster: Cluster, recovery: Recovery, spare_broker: Broker) -> None:
    with Proxy(cluster.broker.socket_url) as proxy:
        everybody = crew(cluster, recovery, 200, environment=QUICK_LEASES, url=proxy.url)
        for number, broker in enumerate((spare_broker, cluster.broker), start=1):
            recovery.injected()
            proxy.switch(broker.socket_url)
            cluster.ledger.close()
            cluster.ledger = Ledger(cluster.root, broker.socket_url)
            everybody.begins_anew()
            cluster.until(lambda number=number: len(cluster.committed()) >= 50 * number)
        everybody.completes()


# --- R3: it has forgotten something ---

OTHER_KEYS = (
    "embq:runs",
    "embq:active",
    "embq:workers",
    "worker",
    "writer",
    "group",
    "queue",
    "popped",
    "jobs",
    "rq workers",
)


def forget(cluster: Cluster, what: str) -> int:
    """Delete one kind of key; gives how many of them there were."""
    client = cluster.broker.client()
    if what == "group":
        return int(client.xgroup_destroy(cluster.ledger.key("res"), GROUP))
    queue = queue_name(registered(client)[cluster.run()].model.queue_key)
    patterns = {
        "worker": "embq:worker:*",
        "queue": f"rq:queue:{queue}",
        "popped": f"rq:queue:{queue}:*",
        "jobs": "rq:job:*",
        "rq workers": "rq:worker*",
    }
    name = patterns.get(what, what if what.startswith("embq:") else cluster.ledger.key(what))
    pattern = name if what in patterns else name.replace("{", "\\{").replace("}", "\\}")
    keys = list(client.scan_iter(pattern)) if "*" in name else [name]
    return int(client.delete(*keys)) if keys else 0


@pytest.mark.parametrize("what", [*RUN_PARTS, *OTHER_KEYS])
@pytest.mark.fault("R3", "one key after another of those that embq uses is gone, several times in mid-run")
def test_a_key_is_lost(cluster: Cluster, recovery: Recovery, random_: random.Random, what: str) -> None:
    everybody = crew(cluster, recovery, 80, environment=QUICK_LEASES, begun=5)
    end = time.monotonic() + 20
    gone = 0
    for finished in (10, 25, 45):
        cluster.until(lambda finished=finished: cluster.finished() >= finished or len(cluster.committed()) >= finished)
        time.sleep(random_.uniform(0.0, 0.3))  # the moment of the fault
        # Some kinds are there for moments only.
        while not (found := _forget_if_known(cluster, what)) and time.monotonic() < end and not cluster.closed():
            time.sleep(0.001)
        gone += found
    recovery.injected(gone)
    # A result that was published and is gone is looked for after a minute.
    cluster.until_closed(120)
    everybody.completes()
    assert gone or what in RARE, f"{what} was never there"


RARE = frozenset({"spare", "poison", "popped"})
"""Keys that are not there in a run in which nothing else goes wrong, or for moments too short to hit."""


def _forget_if_known(cluster: Cluster, what: str) -> int:
    try:
        return forget(cluster, what)
    except (KeyError, redis.exceptions.ResponseError):
        return 0  # the run, or the stream, was lost a moment ago and is not back yet


# --- R4, R5: its memory ---


@pytest.mark.fault("R4", "the broker is out of memory for longer than a lease")
def test_a_full_broker(cluster: Cluster, recovery: Recovery) -> None:
    everybody = crew(cluster, recovery, 150, environment=QUICK_LEASES)
    client = cluster.broker.client()
    for _ in range(2):
        before = cluster.finished()
        cluster.until(lambda before=before: cluster.finished() >= before + 10 and cluster.busy_units())
        recovery.injected()
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("x", 1)
        time.sleep(2 * float(QUICK_LEASES["EMBQ_LEASE_S"]))
        client.config_set("maxmemory", "512mb")
        everybody.goes_on()
    everybody.completes()
    assert everybody.machine.said_times("lease_lost") == 0, everybody.machine.log
    assert everybody.machine.said_times("result_not_taken") == 0, everybody.machine.log


@pytest.mark.fault("R5", "the broker may evict keys (allkeys-lru): every service refuses to start", gate=True)
def test_a_broker_that_evicts(cluster: Cluster, recovery: Recovery) -> None:
    recovery.injected()
    cluster.broker.client().config_set("maxmemory-policy", "allkeys-lru")
    cluster.write_texts(1)
    for service in (cluster.writer(), cluster.producer(), cluster.workers()):
        assert service.wait() == Exit.CONFIG
        *_, line, next_step = service.log.splitlines()
        assert line.startswith("error[broker]: ")
        assert "maxmemory-policy is allkeys-lru" in line
        assert "CONFIG SET maxmemory-policy noeviction" in next_step
        assert cluster.broker.password not in service.log


# --- R6: it comes back older ---


@pytest.mark.fault("R6", "the broker is demoted to a replica (read-only), and promoted again after a while")
def test_a_broker_that_is_a_replica_for_a_while(cluster: Cluster, recovery: Recovery) -> None:
    everybody = crew(cluster, recovery, 150, environment=QUICK_LEASES)
    client = cluster.broker.client()
    for seconds in (1.0, 8.0):
        before = cluster.finished()
        cluster.until(lambda before=before: cluster.finished() >= before + 10 and cluster.busy_units())
        recovery.injected()
        client.replicaof("127.0.0.1", 1)  # nobody is there, so it keeps what it has
        time.sleep(seconds)
        client.replicaof("NO", "ONE")
        everybody.goes_on()
    everybody.completes()


@pytest.mark.fault("R6", "the broker comes back as it was some seconds ago (failover to a stale replica)")
def test_a_stale_replica(cluster: Cluster, recovery: Recovery, short_tmp: Path) -> None:
    everybody = crew(cluster, recovery, 200, environment=QUICK_LEASES)
    for number in range(3):
        copy, data = short_tmp / f"copy{number}", cluster.broker.folder / "appendonlydir"
        shutil.copytree(data, copy)
        before = len(cluster.committed())
        cluster.until(lambda before=before: len(cluster.committed()) >= before + 20 and cluster.busy_units())
        cluster.broker.kill()
        shutil.rmtree(data)
        copy.rename(data)
        cluster.broker.start()
        everybody.goes_on()
    everybody.completes()


@pytest.mark.fault("R6", "the broker comes back as it was, and writer and producer were killed in the same moment")
def test_a_stale_replica_without_writer_and_producer(cluster: Cluster, recovery: Recovery, short_tmp: Path) -> None:
    everybody = crew(cluster, recovery, 200, environment=QUICK_LEASES)
    services = [service for service in cluster.services if service.arguments[0] in ("writer", "producer")]
    for number in range(3):
        copy, data = short_tmp / f"copy{number}", cluster.broker.folder / "appendonlydir"
        shutil.copytree(data, copy)
        before = len(cluster.committed())
        cluster.until(lambda before=before: len(cluster.committed()) >= before + 20 and cluster.busy_units())
        for service in services:
            service.kill()
        cluster.broker.kill()
        shutil.rmtree(data)
        copy.rename(data)
        cluster.broker.start()
        services = [cluster.service(verb, environment=QUICK_LEASES) for verb in ("writer", "producer")]
        everybody.goes_on()
    cluster.until_closed()
    cluster.assert_exact()
