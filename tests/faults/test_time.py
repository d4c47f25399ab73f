"""T: somebody sets the clock of one process, or of the broker."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.kit.clock import WallClock
from tests.faults.kit.cluster import DIM, Cluster, MakeCluster
from tests.faults.kit.monitor import Attempts
from tests.faults.kit.table import Recovery

SLOW = f"stub:{DIM}?ms_per_sample=15&batch_size=10"
"""One unit takes 150 ms."""

HOUR = 3600.0
STEPS = {
    "an hour ahead": (HOUR,),
    "an hour behind": (-HOUR,),
    "back and forth": (HOUR, -HOUR, 2.0, -2.0, 24 * HOUR, 0.0),
}


@pytest.fixture
def wall_clock(short_tmp: Path) -> WallClock:
    """A clock for one process."""
    return WallClock(short_tmp / "clock")


def steps_of(cluster: Cluster, recovery: Recovery, wall_clock: WallClock, steps: tuple[float, ...]) -> None:
    """The clock jumps in mid-run, one step after another while units are in hand."""
    for number, seconds in enumerate(steps, start=1):
        enough = number * 60 // (len(steps) + 1)
        cluster.until(lambda enough=enough: cluster.finished() >= enough and cluster.busy_units())
        recovery.injected()
        wall_clock.set(seconds)


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("verb", ["writer", "producer", "worker"])
@pytest.mark.fault("T1", "the clock of the writer, of the producer or of a machine jumps by an hour in mid-run")
def test_the_clock_of_a_client_jumps(
    cluster: Cluster, recovery: Recovery, wall_clock: WallClock, verb: str, steps: tuple[float, ...]
) -> None:
    skewed = wall_clock.environment
    with Attempts(cluster.broker) as attempts:
        cluster.write_texts(100)
        cluster.enqueue(SLOW)
        cluster.writer(environment=skewed if verb == "writer" else None)
        cluster.producer(environment=skewed if verb == "producer" else None)
        machine = cluster.workers(environment=skewed if verb == "worker" else None)
        cluster.workers()
        steps_of(cluster, recovery, wall_clock, steps)
        cluster.until_closed()
        assert sum(attempts.begun.values()) >= cluster.units
        assert attempts.reruns() == {}, machine.log
        assert machine.said_times("lease_lost") == 0, machine.log
    cluster.assert_exact()


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.fault("T1", "the clock of the broker jumps by an hour in mid-run")
def test_the_clock_of_the_broker_jumps(
    make_cluster: MakeCluster, recovery: Recovery, wall_clock: WallClock, steps: tuple[float, ...]
) -> None:
    cluster = make_cluster(prefix=wall_clock.prefix)
    with Attempts(cluster.broker) as attempts:
        cluster.begin(100, SLOW)
        machine = cluster.workers(count=2)
        for number, seconds in enumerate(steps, start=1):
            enough = number * 60 // (len(steps) + 1)
            cluster.until(lambda enough=enough: cluster.finished() >= enough and cluster.busy_units())
            recovery.injected()
            wall_clock.set(seconds)
            # The server answers by the time at which its turn of events began, perhaps a moment before the jump.
            clock = cluster.broker.client()
            cluster.until(lambda seconds=seconds, clock=clock: abs(clock.time()[0] - time.time() - seconds) < 5)
            before = cluster.finished()
            recovery.note("work goes on", cluster.until(lambda before=before: cluster.finished() > before), bar=10.0)
        cluster.until_closed()
        assert attempts.reruns() == {}, machine.log
        assert machine.said_times("worker_died") == 0, machine.log
    cluster.assert_exact()


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
@pytest.mark.fault("T1", "the clock of the broker jumps, and then a machine is gone (lease 4 s)")
def test_a_machine_is_gone_after_the_clock_of_the_broker_jumped(
    make_cluster: MakeCluster, recovery: Recovery, wall_clock: WallClock, seconds: float
) -> None:
    quick = {"EMBQ_LEASE_S": "4", "EMBQ_BEAT_S": "1"}
    cluster = make_cluster(prefix=wall_clock.prefix)
    cluster.begin(120, SLOW, environment=quick)
    doomed, near = cluster.workers(environment=quick), cluster.workers(environment=quick)
    cluster.until(lambda: cluster.finished() >= 10 and cluster.held_on(doomed) and cluster.held_on(near))
    recovery.injected()
    wall_clock.set(seconds)
    held = cluster.held_on(doomed)
    doomed.kill()
    seconds = cluster.until(lambda: all(map(cluster.is_finished, held)))
    recovery.note("its units are done elsewhere", seconds, bar=30.0)
    cluster.assert_completes()
