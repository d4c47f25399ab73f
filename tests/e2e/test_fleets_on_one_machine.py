"""Two fleets whose hosts are one machine: each counts its own workers alone, and is told of what they share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embq.app.doctor.fleet_checks import fleet as doctor_checks
from embq.core.process.children import python
from embq.core.queue.heartbeats import SERVICE_REPORTS, services
from embq.core.queue.reporting import this_service
from embq.core.queue.scripts import Loader, load_scripts
from embq.core.settings import child_environment
from tests.support.servers.guarded import GuardedServer, guarded_server
from tests.support.waiting import wait_until

Row = dict[str, Any]
Call = Callable[..., tuple[int, dict[str, Row]]]


@pytest.fixture
def server() -> Iterator[GuardedServer]:
    with guarded_server("valkey") as server, server.client("admin") as admin:
        Loader(admin, load_scripts(admin)).load_missing()  # as a writer does
        yield server


@pytest.fixture
def call(server: GuardedServer, tmp_path: Path) -> Iterator[Call]:
    """Calls `embq fleet VERB` for a fleet with the host gpu1: exit status and rows by name.

    The host is this machine: what ssh would be asked to do there is done here.
    """
    ssh, hosts, state = tmp_path / "ssh", tmp_path / "hosts.txt", tmp_path / "state"
    ssh.write_text(f'#!/bin/sh\nfor command; do :; done\nXDG_STATE_HOME={state} exec sh -c "$command"\n')
    ssh.chmod(0o700)
    hosts.write_text("gpu1\n")
    where = ("--hosts", hosts, "--ssh-command", ssh, "--remote-python", sys.executable, "--secrets", server.folder)

    def call(verb: str, name: str, *arguments: str) -> tuple[int, dict[str, Row]]:
        options = ("--broker", server.url("worker"), "--fleet-name", name, "--json", *where)
        done = subprocess.run(  # not a Command, of which no process may be left
            python("-m", "embq", "fleet", verb, *map(str, options), *arguments),
            env=child_environment(HF_HUB_OFFLINE="1", PYTHONPATH=str(Path(__file__).resolve().parents[2])),
            capture_output=True,
            text=True,
        )
        assert done.stdout, done.stderr
        return done.returncode, {row["name"]: row for row in json.loads(done.stdout)["checks"]}

    try:
        yield call
    finally:
        for lock in state.rglob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.killpg(int(lock.read_text()), signal.SIGKILL)


def test_a_fleet_does_not_take_the_worker_of_another_for_its_own(
    server: GuardedServer, call: Call, tmp_path: Path
) -> None:
    status, rows = call("up", "a", "--", "--devices", "cpu")
    assert (status, {name: row["state"] for name, row in rows.items()}) == (0, {"gpu1": "ok"}), rows
    status, rows = call("up", "b", "--", "--devices", "cpu")
    assert (status, rows["gpu1"]["state"], rows["workers"]["state"]) == (0, "ok", "warn"), rows
    assert "cpu shared by two workers: gpu1 of fleet " in rows["workers"]["detail"]
    with server.client("admin") as admin:
        shared = [row.detail for row in doctor_checks(admin, "1.0") if row.name == "workers"]
        assert len(shared) == 1
        assert "of fleet a, process" in shared[0]
        assert "of fleet b, process" in shared[0]
        stopped = int((tmp_path / "state" / "embq" / "fleet" / "a" / "gpu1.pid").read_text())
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: [heard.service.fleet for heard in services(admin)] == ["b"])
        status, rows = call("status", "a")
        assert (status, list(rows), rows["gpu1"]["state"]) == (0, ["gpu1"], "warn"), rows
        assert rows["gpu1"]["detail"] == "running; it does not report"
        assert call("status", "b")[1]["gpu1"]["state"] == "ok"
        earlier = replace(this_service("worker", version="0.0.9"), host="gpu1", fleet=None)
        SERVICE_REPORTS.report(admin, earlier, scripts=load_scripts(admin))
        assert "embq 0.0.9" in call("status", "a")[1]["gpu1"]["detail"], "it cannot say of which fleet it is"
        assert "embq 0.0.9" not in call("status", "b")[1]["gpu1"]["detail"], "the one that says so comes first"
        os.kill(stopped, signal.SIGCONT)
    assert call("down", "a")[0] == call("down", "b")[0] == 0
