"""W: worker processes die, hang, lose their device or their memory; the data set is exact all the same."""

from __future__ import annotations

import psutil
import pytest

from faults.kit.cluster import Cluster, Service
from faults.kit.table import Recovery


def a_busy_process(cluster: Cluster, machine: Service) -> tuple[psutil.Process, dict[int, str]]:
    """A worker process in mid-unit, with what it has in hand (unit -> token); for none of it is this another try."""
    found: list[tuple[psutil.Process, dict[int, str]]] = []

    def someone_is_busy() -> bool:
        names, busy, attempts = cluster.worker_names(machine), cluster.busy(), cluster.attempts()
        for process in machine.processes():
            mine = {u: token for u, token in busy.items() if f":{names.get(process.pid)}:" in token}
            if mine and all(attempts.get(u, 0) <= 1 for u in mine):
                found[:] = [(process, mine)]
        return bool(found)

    cluster.until(someone_is_busy)
    return found[0]


def run_again(cluster: Cluster, units: dict[int, str]) -> bool:
    """Whether each of these units (unit -> token of its former attempt) is finished, or begun under another token."""
    busy = cluster.busy()
    return all(cluster.is_finished(u) or busy.get(u, token) != token for u, token in units.items())


@pytest.mark.fault("W1", "a worker process is killed in mid-batch; its supervisor replaces it", gate=True)
def test_a_killed_worker(cluster: Cluster, recovery: Recovery) -> None:
    cluster.write_texts(60)
    cluster.enqueue("stub:16?ms_per_sample=10&batch_size=10")
    cluster.writer()
    cluster.producer()
    machine = cluster.workers(count=2)
    for kill in range(3):
        cluster.until_finished(10 * kill + 5)
        victim, units = a_busy_process(cluster, machine)
        machine.kill_one(victim)
        seconds = cluster.until(lambda units=units: run_again(cluster, units))
        recovery.note("its unit is running again", seconds, bar=5.0)
    cluster.until_closed()
    cluster.assert_exact()
