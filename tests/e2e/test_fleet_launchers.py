"""`embq fleet` on real engines: from nothing to exact rows, one worker killed, one drained, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from rq.utils import as_text

from embq.app.broker_admin import accounts
from embq.core.broker.client import connect
from embq.core.errors import Exit
from tests.e2e.check import check_complete
from tests.e2e.session import (
    DEADLINE_S,
    Command,
    await_in,
    called,
    closed,
    committed,
    process_ended,
    started,
    write_texts,
)
from tests.support.servers.ray import QUIET, ray_cluster
from tests.support.servers.slurm import slurm
from tests.support.servers.sshd import ssh_daemons
from tests.support.servers.tls import TlsServer, needs_tls_server, tls_server
from tests.support.waiting import wait_until

pytestmark = needs_tls_server

DIM, UNITS = 8, 60
ROOT = Path(__file__).resolve().parents[2]
QUICK = {"EMBQ_LEASE_S": "4", "EMBQ_BEAT_S": "0.5", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
Traces = tuple[set[str], set[str], set[str]]
"""Files, users of the broker, and processes."""


class Box:
    """A broker with users and TLS, a producer and a writer."""

    def __init__(self, folder: Path, server: TlsServer, stack: ExitStack) -> None:
        self.folder = folder
        self.server = server
        self._stack = stack

    def role(self, user: str) -> dict[str, str]:
        """The environment of a command of a user."""
        return {
            **QUICK,
            "EMBQ_BROKER_URL": self.server.url(user),
            "EMBQ_BROKER_PASSWORD_FILE": str(self.server.secrets / user / "password"),
            "EMBQ_BROKER_CA": self.server.ca,
        }

    def enqueue(self, ms_per_sample: int) -> tuple[dict[str, bytes], Path, Command]:
        """A run of `UNITS` units of five texts; gives what it is to hold, its folder, and the writer."""
        for verb in ("producer", "writer"):
            service = self._stack.enter_context(started(verb, environment=self.role("writer")))
        expected, out = write_texts(self.folder / "texts.jsonl", 5 * UNITS), self.folder / "out"
        spec = f"stub:{DIM}?ms_per_sample={ms_per_sample}"
        arguments = ("enqueue", self.folder / "texts.jsonl", "-o", out, "-m", spec, "--unit-size", "5")
        status, _, said = called(*arguments, environment=self.role("laptop"))
        assert status == Exit.DONE, said
        return expected, out, service

    def fleet(
        self, *arguments: str | Path, deadline_s: float = DEADLINE_S, **changes: str
    ) -> tuple[int, dict[str, dict[str, Any]]]:
        """Exit status and rows by machine of `embq fleet`."""
        verb, *rest = arguments
        where = ("--broker", self.server.url("worker"), "--secrets", self.server.secrets, "--json")
        environment = {**QUICK, "EMBQ_BROKER_CA": self.server.ca, **changes}
        status, text, said = process_ended("fleet", verb, *where, *rest, environment=environment, deadline_s=deadline_s)
        assert text, said
        return status, {row["name"]: row for row in json.loads(text)["checks"]}

    def traces(self, *homes: Path) -> Traces:
        """Files of the secrets and of machines, users of the broker, and processes of machines."""
        files = {str(path) for folder in (self.server.secrets, *homes) for path in folder.rglob("*")}
        environment = self.role("admin")
        password = Path(environment["EMBQ_BROKER_PASSWORD_FILE"]).read_text().strip()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EMBQ_BROKER_CA", self.server.ca)
            with connect(environment["EMBQ_BROKER_URL"], password=password) as client:
                users = set(map(as_text, client.acl_users()))
        return files, users, {" ".join(process.cmdline()) for process in workers_below(*homes)}


def workers_below(*homes: Path) -> list[psutil.Process]:
    """Processes of workers whose home is one of the folders."""
    found = []
    for process in psutil.process_iter():
        try:
            command, home = process.cmdline(), process.environ().get("HOME", "")
        except psutil.Error:
            continue
        if any(word.startswith("embq") for word in command) and home in map(str, homes):
            found.append(process)
    return found


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    secrets = tmp_path / "secrets"
    assert process_ended("broker", "init", secrets)[0] == Exit.DONE
    with tls_server(tmp_path / "data", secrets, f"aclfile {secrets}/broker/users.acl") as server, ExitStack() as stack:
        yield Box(tmp_path, server, stack)


def test_three_hosts_over_ssh_from_nothing_to_exact_rows_and_back_to_nothing(box: Box, tmp_path: Path) -> None:
    homes = {name: tmp_path / name for name in ("gpu1", "gpu2", "gpu3")}
    for home in homes.values():
        (home / "state").mkdir(parents=True)
    sshd = tmp_path / "sshd"
    sshd.mkdir()
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("gpu1\ngpu2  # of two cards\n\ngpu3\n")
    environments = {
        name: {**QUICK, "HOME": str(home), "XDG_STATE_HOME": f"{home}/state"} for name, home in homes.items()
    }
    with ssh_daemons(sshd, environments) as made:
        where = ("--hosts", hosts, "--ssh-command", made.command, "--remote-python", sys.executable)
        expected, out, writer = box.enqueue(ms_per_sample=40)
        before = box.traces(*homes.values())
        status, rows = box.fleet("up", *where, "--", "--devices", "cpu")
        assert (status, {name: row["state"] for name, row in rows.items()}) == (0, dict.fromkeys(homes, "ok")), rows
        assert box.fleet("up", *where, "--", "--devices", "cpu")[0] == 0
        assert sum("worker" in process.cmdline() for process in workers_below(*homes.values())) == 3, "up again"
        _secrets_are_hidden(box, homes)
        await_in(writer, lambda: len(committed(out)) > 3)
        killed = int((homes["gpu1"] / "state" / "embq" / "fleet" / "fleet" / "gpu1.pid").read_text())
        os.kill(killed, signal.SIGKILL)
        status, rows = box.fleet("drain", "gpu2", *where)
        assert (status, list(rows)) == (0, ["gpu2"])
        status, rows = box.fleet("status", *where)
        assert status == Exit.UNAVAILABLE
        assert rows["gpu1"]["state"] == rows["gpu2"]["state"] == "fail"
        assert rows["gpu3"]["state"] == "ok"
        assert "running: cpu " in rows["gpu3"]["detail"]
        await_in(writer, lambda: closed(out))
        check_complete(out, expected, units=UNITS, dim=DIM)
        status, rows = box.fleet("down", *where)
        assert (status, set(rows)) == (0, set(homes))
        _nothing_is_left(before, box.traces(*homes.values()))


def _nothing_is_left(before: Traces, after: Traces) -> None:
    """The machines, the secrets and the broker are as they were."""
    files, users, processes = (earlier ^ later for earlier, later in zip(before, after, strict=True))
    assert (files, users, processes) == (set(), set(), set())


def _secrets_are_hidden(box: Box, homes: dict[str, Path]) -> None:
    """No command line or environment of a machine holds its password, and no file below its home."""
    for name, home in homes.items():
        password = (box.server.secrets / f"worker-fleet.{name}" / "password").read_text().strip()
        shown = [text for process in workers_below(home) for text in (*process.cmdline(), *process.environ().values())]
        assert len(shown) > 0
        assert not [text for text in shown if password in text]
        assert not [path for path in home.rglob("*") if path.is_file() and password in path.read_text(errors="replace")]


def test_what_fails_is_told_machine_by_machine_with_its_cure_and_leaves_nothing(box: Box, tmp_path: Path) -> None:
    home, sshd, hosts = tmp_path / "gpu1", tmp_path / "sshd", tmp_path / "hosts.txt"
    (home / "state").mkdir(parents=True)
    sshd.mkdir()
    hosts.write_text("gpu1\ngone\n")
    with ssh_daemons(sshd, {"gpu1": {**QUICK, "HOME": str(home), "XDG_STATE_HOME": f"{home}/state"}}) as made:
        where = ("--hosts", hosts, "--ssh-command", made.command)
        before = box.traces(home)
        status, rows = box.fleet("up", *where, "--remote-python", sys.executable, "--", "--devices", "cuda")
        assert status == Exit.UNAVAILABLE
        assert "no CUDA device" in rows["gpu1"]["detail"] or "GPU" in rows["gpu1"]["detail"], rows
        assert "cannot be reached" in rows["gone"]["detail"]
        status, rows = box.fleet("up", *where, "--remote-python", "/usr/bin/env", "--", "--devices", "cpu")
        assert status == Exit.UNAVAILABLE
        assert "pip install 'embq[worker]==" in rows["gpu1"]["fix"], rows
        engine = ("--launcher", "slurm", "--machines", "2", "--broker", box.server.url("worker"))
        environment = {**QUICK, "EMBQ_BROKER_CA": box.server.ca, "PATH": str(home)}
        status, _, said = process_ended(
            "fleet", "up", *engine, "--secrets", box.server.secrets, environment=environment
        )
        assert status == Exit.CONFIG
        assert "squeue is not installed here" in said
        _nothing_is_left(before, box.traces(home))


def test_an_array_of_slurm_is_exact_through_a_requeue_and_a_drain(box: Box, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "state").mkdir(parents=True)
    with slurm(tmp_path / "slurm") as environment:
        changes = {**environment, "HOME": str(home), "XDG_STATE_HOME": f"{home}/state"}

        def fleet(verb: str, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
            return box.fleet(verb, "--launcher", "slurm", *arguments, **changes)

        expected, out, writer = box.enqueue(ms_per_sample=40)
        before = box.traces(home)
        status, rows = fleet("up", "--machines", "3", "--", "--devices", "cpu", "--drain-timeout", "60")
        names = ["fleet-0", "fleet-1", "fleet-2"]
        assert (status, {name: row["state"] for name, row in rows.items()}) == (0, dict.fromkeys(names, "ok")), rows
        await_in(writer, lambda: len(committed(out)) > 3)
        _slurm("scontrol", "requeue", f"{_jobs(environment)[0]}_0", environment=environment)
        status, rows = fleet("drain", "fleet-1", "--drain-timeout", "60")
        assert (status, list(rows)) == (0, ["fleet-1"]), rows
        await_in(writer, lambda: closed(out))
        check_complete(out, expected, units=UNITS, dim=DIM)
        status, rows = fleet("status")
        assert status == Exit.UNAVAILABLE
        assert (rows["fleet-1"]["state"], rows["fleet-2"]["state"]) == ("fail", "ok"), rows
        wait_until(lambda: "running: cpu" in fleet("status")[1]["fleet-0"]["detail"])
        assert fleet("down")[0] == 0
        assert _jobs(environment, "--states", "RUNNING,PENDING") == []
        _nothing_is_left(before, box.traces(home))


def test_a_check_that_fails_on_a_node_of_slurm_is_told(box: Box, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "state").mkdir(parents=True)
    with slurm(tmp_path / "slurm") as environment:
        before = box.traces(home)
        changes = {**environment, "HOME": str(home), "XDG_STATE_HOME": f"{home}/state"}
        status, rows = box.fleet("up", "--launcher", "slurm", "--machines", "1", "--", "--devices", "cuda", **changes)
        assert status == Exit.UNAVAILABLE
        assert "GPU" in rows["fleet-0"]["detail"] or "CUDA" in rows["fleet-0"]["detail"], rows
        _nothing_is_left(before, box.traces(home))


def test_actors_of_a_ray_cluster_are_exact_through_a_kill_and_a_drain(box: Box, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is an extra of its own: pip install 'embq[ray]'")
    home = tmp_path / "home"
    (home / "state").mkdir(parents=True)
    here = {**QUICK, **QUIET, "HOME": str(home), "XDG_STATE_HOME": f"{home}/state"}
    with ray_cluster(3, {**os.environ, **here}) as address:
        where = ("--launcher", "ray", "--ray-address", address, "--gpus-per-machine", "0")
        expected, out, writer = box.enqueue(ms_per_sample=40)
        before = box.traces(home / "state")
        status, rows = box.fleet("up", *where, "--machines", "4", "--", "--devices", "cpu", **here)
        assert status == Exit.UNAVAILABLE
        states = [rows[f"fleet-{number}"]["state"] for number in range(4)]
        assert sorted(states) == ["fail", "ok", "ok", "ok"], rows
        (left,) = [row for row in rows.values() if row["state"] == "fail"]
        assert "no room for 1 CPU" in left["detail"]
        first, second, third = sorted(rows.keys() - {left["name"]})
        await_in(writer, lambda: len(committed(out)) > 3)
        os.kill(int((home / "state" / "embq" / "fleet" / "fleet" / f"{first}.pid").read_text()), signal.SIGKILL)
        status, rows = box.fleet("drain", second, *where, **here)
        assert (status, list(rows)) == (0, [second]), rows
        await_in(writer, lambda: closed(out))
        check_complete(out, expected, units=UNITS, dim=DIM)
        status, rows = box.fleet("status", *where, **here)
        assert [rows[name]["state"] for name in (first, second, third)] == ["fail", "fail", "ok"], rows
        assert box.fleet("down", *where, **here)[0] == 0
        _nothing_is_left(before, box.traces(home / "state"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--hosts FILE, or --launcher slurm"),
        (("--launcher", "slurm"), "--machines N"),
        (("--launcher", "kubernetes", "--print"), "--machines N"),
        (("--hosts", "one", "--print"), "--launcher kubernetes"),
        (("--launcher", "slurm", "--hosts", "one"), "--hosts belongs to ssh"),
        (("--hosts", "twice"), "twice line 1, twice line 3: gpu1 is named 2 times"),
        (("--hosts", "none"), "names no host"),
        (("--hosts", "one", "--ssh-command", "ssh '"), "quoted as for a shell"),
        (("--hosts", "one", "--fleet-name", "a.b"), "names no fleet"),
        (("--hosts", "one", "--secrets", "elsewhere"), "embq broker init elsewhere"),
        (("--hosts", "one", "--", "--card", "cpu"), "No such option '--card'"),
    ],
)
def test_a_command_that_names_no_fleet_says_what_is_missing(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    for name, hosts in {"one": "gpu1", "twice": "ann@gpu1\n\nben@gpu1", "none": "# gpu1"}.items():
        (tmp_path / name).write_text(hosts)
    accounts.make(tmp_path / "secrets")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    status, _, errors = called("fleet", "up", "--broker", "redis://localhost:1", *arguments, cwd=tmp_path)
    assert status in (Exit.USAGE, Exit.CONFIG)
    assert said in errors
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def _jobs(environment: dict[str, str], *options: str) -> list[str]:
    """Ids of the arrays of the fleet."""
    return _slurm("squeue", "--noheader", "--format", "%F", *options, environment=environment).split()


def _slurm(*command: str, environment: dict[str, str]) -> str:
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return done.stdout
