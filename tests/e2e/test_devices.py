"""Devices of unequal speed share a run, and may leave and join it at any time."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import redis

from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue.heartbeats import live_workers
from tests.e2e.check import check_complete
from tests.e2e.services import DIM, Services
from tests.e2e.session import Command, closed, started
from tests.faults.kit.cluster import held_after, let_go, sabotaged

UNITS = 400


def test_devices_of_any_speed_leave_and_join_a_run(
    own_server: EmbeddedServer, own_client: redis.Redis, short_tmp: Path
) -> None:
    root, gate = short_tmp / "out", short_tmp / "gate"

    def at_work(device: str) -> list[int]:
        """The processes on a device that have got something done."""
        said = live_workers(own_client)
        return [worker["pid"] for worker in said if worker["device"] == device and worker["units"]]

    with ExitStack() as stack:
        # Each of the seven processes waits after 30 units, so that the run is not over before all this has happened.
        environment = sabotaged(held_after(30, gate))
        services = Services(stack, own_server, start=("writer", "producer"), environment=environment)

        def start(devices: str, *arguments: str) -> Command:
            command = started("worker", "--devices", devices, *arguments, environment=services.environment)
            return stack.enter_context(command)

        staying, leaving = start("sim:4,sim:1", "--workers", "2"), start("sim:2")
        expected = services.enqueue(root, UNITS, model=f"stub:{DIM}?ms_per_sample=4")
        services.until(lambda: len(at_work("sim:4")) == len(at_work("sim:1")) == 2 and at_work("sim:2"))
        leaving.signal(signal.SIGTERM)
        killed = at_work("sim:4")[0]
        next(process for process in staying.workers() if process.pid == killed).kill()
        start("sim:8")
        services.until(lambda: at_work("sim:8"))
        let_go(gate)
        assert leaving.wait() == 0
        services.until(lambda: closed(root))
    check_complete(root, expected, units=UNITS, dim=DIM)
