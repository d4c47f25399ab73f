"""N: a machine is cut off and comes back, replies are lost, the link is slow and lossy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from embq.app.cli.authorization import authorized_client
from embq.core.broker.client import connect
from embq.core.queue.result_stream import PublishVerdict
from embq.core.settings import Settings
from tests.faults.kit.cluster import DIM, QUICK_LEASES, SEED, Broker, Cluster, Service
from tests.faults.kit.monitor import Attempts
from tests.faults.kit.netns import Cable
from tests.faults.kit.proxy import Proxy
from tests.faults.kit.table import Recovery
from tests.support.outputs.run_case import LEASE_S, RunCase, make_case

SLOW = f"stub:{DIM}?ms_per_sample=15&batch_size=10"
"""One unit takes 150 ms."""

# --- N1: a machine is cut off ---


@dataclass(slots=True)
class Line:
    """The one way from a machine to the broker."""

    url: str
    prefix: list[str]
    cut: Callable[[], None]
    mend: Callable[[], None]


@pytest.fixture(params=["cable", "blackhole"])
def line(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Line]:
    """A cable between two network namespaces, or a relay that swallows everything without a word."""
    with ExitStack() as stack:
        if request.param == "cable":
            cable = stack.enter_context(Cable(cluster.broker.socket_url))
            yield Line(cable.url, cable.prefix, cable.pull, cable.plug)
        else:
            proxy = stack.enter_context(Proxy(cluster.broker.socket_url))
            yield Line(proxy.url, [], proxy.blackhole, proxy.heal)


def cut_off(cluster: Cluster, line: Line, recovery: Recovery, *, environment: dict[str, str] | None = None) -> Service:
    """A machine that is cut off with units in hand until others have done them, and is then let back in."""
    far = cluster.workers(count=2, url=line.url, prefix=line.prefix, environment=environment)
    near = cluster.workers(environment=environment)
    cluster.until(lambda: cluster.finished() >= 10 and len(far.processes()) == 2 and cluster.held_on(near))
    processes = [process.pid for process in far.processes()]
    cluster.until(lambda: set(cluster.held_on(far)) & set(cluster.busy_units()))
    recovery.injected()
    line.cut()
    held = cluster.held_on(far)
    names = set(cluster.worker_names(far).values())
    seconds = cluster.until(lambda: not names & set(cluster.owners().values()))
    lease = "4 s" if environment else "20 s"
    recovery.note(f"its leases are free (lease {lease})", seconds, bar=30.0)
    seconds = cluster.until(lambda: all(map(cluster.is_finished, held)))
    recovery.note("its units are done elsewhere, from then on", seconds)
    line.mend()
    seconds = cluster.until(lambda: cluster.held_on(far) or cluster.closed())
    recovery.note("it works again after the link is back", seconds, bar=10.0)
    assert not cluster.closed(), "the run ended before the machine was back"
    assert [process.pid for process in far.processes()] == processes, far.log
    return far


@pytest.mark.fault("N1", "a machine is cut off for longer than its lease, and comes back with results")
def test_a_machine_is_cut_off(cluster: Cluster, recovery: Recovery, line: Line) -> None:
    cluster.begin(250, SLOW, environment=QUICK_LEASES)
    far = cut_off(cluster, line, recovery, environment=QUICK_LEASES)
    cluster.until_closed(120)
    assert far.said_times("lease_lost") + far.said_times("result_not_taken") > 0, far.log
    cluster.assert_exact()


@pytest.mark.timeout(300)
@pytest.mark.fault("N1", "the same with the default lease of 20 s")
def test_a_machine_is_cut_off_from_default_leases(cluster: Cluster, recovery: Recovery, line: Line) -> None:
    cluster.begin(500, SLOW)
    cut_off(cluster, line, recovery)
    cluster.assert_completes(deadline_s=150)


@pytest.mark.fault("N1", "connections of a machine die without a word (half open); its leases are not lost")
def test_half_open_connections_of_a_machine(cluster: Cluster, recovery: Recovery) -> None:
    with Proxy(cluster.broker.socket_url) as proxy, Attempts(cluster.broker) as attempts:
        cluster.begin(100, SLOW)
        machine = cluster.workers(url=proxy.url)
        for number in range(3):
            cluster.until_finished(20 * number + 5)
            recovery.injected()
            proxy.half_open()
            enough = cluster.finished() + 3  # some may have been on their way already
            seconds = cluster.until(lambda enough=enough: cluster.finished() >= enough)
            recovery.note("work goes on", seconds, bar=10.0)
        cluster.until_closed()
        assert attempts.reruns() == {}, machine.log
    cluster.assert_exact()


@pytest.mark.parametrize("verb", ["writer", "producer"])
@pytest.mark.fault("N1", "connections of the writer and of the producer die without a word (half open)")
def test_half_open_connections_of_a_service(cluster: Cluster, recovery: Recovery, verb: str) -> None:
    with Proxy(cluster.broker.socket_url) as proxy:
        cluster.write_texts(350)
        cluster.enqueue(SLOW)
        for name in ("writer", "producer"):
            cluster.service(name, url=proxy.url if name == verb else "")
        cluster.workers(count=2)
        for number in range(3):
            cluster.until_finished(30 * number + 10)
            recovery.injected()
            proxy.half_open()
            enough = proxy.commands + 20
            recovery.note("back at work", cluster.until(lambda enough=enough: proxy.commands >= enough), bar=10.0)
            assert not cluster.closed()
        cluster.until_closed()
    cluster.assert_exact()


# --- N2: a reply is lost, the command was carried out ---


def every_command_once(case: RunCase) -> dict[int, int]:
    """A small run in which something happens to each unit; gives unit -> attempts charged before it went well."""
    # With a clock of its own the feeder looks at the workers equally often in each run.
    writer, feeder = case.writer(), case.feeder(clock=case.clock)
    feeder.tick()
    gone, back, failed, wrong, lost = (case.claim(u, f"w{u}") for u in range(5))
    spare = case.claim(5, "w5", started=False)
    case.ledger.beat(case.gen, [(0, gone), (4, lost), (5, spare)], lease_s=LEASE_S)
    assert case.die("w0") <= 1
    case.ledger.release(1, back)
    case.ledger.release(2, failed, failed=("io", "the storage is away"))
    assert case.publish(3, wrong, rows=1) is PublishVerdict.ACCEPTED
    writer.step()
    case.age()
    # A machine that stood still for two seconds is an outage to the feeder, after which it takes no lease away at once.
    while case.client.hexists(case.key("owner"), "4"):
        feeder.tick()
    charged = {int(u): int(count) for u, count in case.client.hgetall(case.key("att")).items() if int(count)}
    assert case.publish(4, lost) is PublishVerdict.LOST
    case.finish(writer)
    writer.release()
    case.assert_exact()
    return charged


@pytest.fixture
def quick_broker(short_tmp: Path, recovery: Recovery) -> Iterator[Broker]:
    """A server for many small runs."""
    broker = Broker(short_tmp / "q", recovery)
    broker.start()
    yield broker
    broker.close()


@pytest.mark.fault("N2", "the reply to command k is lost, or command k itself: one run for every k", gate=True)
@pytest.mark.parametrize("loses", ["reply", "request"])
def test_each_command_in_turn_is_lost(
    quick_broker: Broker, recovery: Recovery, tmp_path: Path, request: pytest.FixtureRequest, loses: str
) -> None:
    def lose(k: int) -> tuple[dict[int, int], int]:
        """One run; gives its charges, and how many commands it took."""
        case = make_case(client, tmp_path / str(k), 6, samples=1)
        before = proxy.commands
        (proxy.drop_reply if loses == "reply" else proxy.drop_request)(k)
        return every_command_once(case), proxy.commands - before

    with Proxy(quick_broker.socket_url) as proxy, connect(proxy.url, patient=True) as client:
        charged, total = [lose(-k) for k in (1, 2)][1]  # the second time all scripts are known
        assert charged == {0: 1, 2: 1, 3: 1, 4: 1}
        assert proxy.lost == 0
        step = 1 if request.config.getoption("--all-faults") else total // 20
        for number, k in enumerate(range(1, total - 2, step), start=1):
            assert lose(k)[0] == charged, f"command {k} of {total}"
            assert proxy.lost == number, f"command {k} of {total}"
            recovery.injected()


@pytest.mark.parametrize("loses", ["reply", "request"])
@pytest.mark.parametrize("verb", ["producer", "worker", "writer"])
@pytest.mark.fault("N2", "each command, or its reply, with which a service begins is lost in turn", gate=True)
def test_each_command_of_a_start_is_lost(
    quick_broker: Broker, recovery: Recovery, request: pytest.FixtureRequest, verb: str, loses: str
) -> None:
    def begin() -> None:
        authorized_client(Settings(broker_url=proxy.url), verb, patient=True).close()

    with Proxy(quick_broker.socket_url) as proxy:
        begin()
        total, lose = proxy.commands, proxy.drop_reply if loses == "reply" else proxy.drop_request
        step = 1 if request.config.getoption("--all-faults") else total // 10
        for number, k in enumerate(range(1, total + 1, step), start=1):
            lose(k)
            begin()
            assert proxy.lost == number, f"command {k} of {total}"
            recovery.injected()


@pytest.mark.parametrize("nth", [11, 31, 101])
@pytest.mark.fault("N2", "every n-th command or reply of real services is lost (n = 11, 31, 101)")
def test_every_nth_command_is_lost(cluster: Cluster, recovery: Recovery, nth: int) -> None:
    with Proxy(cluster.broker.socket_url) as proxy:
        proxy.every = nth
        cluster.begin(80, SLOW, url=proxy.url)
        machine = cluster.workers(count=2, url=proxy.url)
        cluster.until_closed(120)
        recovery.injected(proxy.lost)
        assert proxy.lost > 10
        assert machine.said_times("worker_died") == 0, machine.log
    cluster.assert_exact()


# --- N3: a slow and lossy link ---


@pytest.mark.timeout(300)
@pytest.mark.fault("N3", "a link with 200 ms in each direction, on which 1 % of the requests break the connection")
def test_a_slow_and_lossy_link(cluster: Cluster, recovery: Recovery) -> None:
    with Proxy(cluster.broker.socket_url, seed=SEED) as proxy, Attempts(cluster.broker) as attempts:
        proxy.delay_s, proxy.loss = 0.2, 0.01
        cluster.begin(60, "stub:16?ms_per_sample=40&batch_size=10", url=proxy.url)
        machine = cluster.workers(count=2, url=proxy.url)
        cluster.until_closed(200)
        recovery.injected(proxy.lost)
        assert proxy.lost > 0
        assert sum(attempts.begun.values()) >= cluster.units
        assert attempts.reruns() == {}, machine.log
        assert machine.said_times("worker_died") == 0, machine.log
    cluster.assert_exact()


@pytest.mark.timeout(300)
@pytest.mark.fault("N3", "two machines, each behind a link with 200 ms where 2 % of the requests break the connection")
def test_two_machines_behind_slow_and_lossy_links(cluster: Cluster, recovery: Recovery) -> None:
    near, far = (Proxy(cluster.broker.socket_url, seed=SEED + number) for number in range(2))
    with near, far:
        cluster.begin(60, "stub:16?ms_per_sample=40&batch_size=10")
        machines = []
        for proxy in (near, far):
            proxy.delay_s, proxy.loss = 0.2, 0.02
            machines.append(cluster.workers(url=proxy.url))
        cluster.until_closed(200)
        recovery.injected(near.lost + far.lost)
        assert near.lost
        assert far.lost
        assert [machine.said_times("worker_died") for machine in machines] == [0, 0]
    cluster.assert_exact()
