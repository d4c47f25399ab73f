"""A further machine beside the stack: the broker's TLS, `deploy/add-machine.sh`, and what each `.env` keeps."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from embq.app.cli import entry_point
from embq.core.broker.client import connect
from embq.core.errors import Exit
from tests.support.servers.tls import free_ports, needs_tls_server
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
WORKER = "compose.worker.yml"


@needs_tls_server
def test_the_broker_of_the_stack_speaks_tls_with_what_init_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets, (plain, tls) = tmp_path / "secrets", free_ports(2)
    assert entry_point.run(["broker", "init", str(secrets), "--user", "worker-gpu2"]) == Exit.DONE
    conf = (
        (ROOT / "deploy" / "valkey.conf")
        .read_text(encoding="utf-8")
        .replace("/run/secrets/embq", str(secrets / "broker"))
    )
    conf = conf.replace("dir /broker", f"dir {tmp_path}").replace("port 6379", f"port {plain}")
    (tmp_path / "valkey.conf").write_text(conf.replace("tls-port 6380", f"tls-port {tls}"), encoding="utf-8")
    server = subprocess.Popen(["redis-server", tmp_path / "valkey.conf"], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: works(tls))
        monkeypatch.setenv("EMBQ_BROKER_CA", str(secrets / "worker-gpu2" / "ca.crt"))
        password = (secrets / "worker-gpu2" / "password").read_text().strip()
        with connect(f"rediss://worker-gpu2@localhost:{tls}", password=password) as client:
            assert client.acl_whoami() in ("worker-gpu2", b"worker-gpu2")
    finally:
        server.terminate()
        server.wait(20)


def works(port: int) -> bool:
    """Whether a port of the loopback answers."""
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", port)) == 0


def test_a_further_machine_has_a_name_of_its_own() -> None:
    assert re.match(
        r"\$\{EMBQ_MACHINE:\?",
        yaml.safe_load((ROOT / WORKER).read_text(encoding="utf-8"))["services"]["worker"]["hostname"],
    )


def add_machine(folder: Path, *arguments: str, settings: str = "") -> tuple[str, list[str], str]:
    """`deploy/add-machine.sh` in a checkout, twice; gives .env, the commands of Compose and what it prints at last."""
    (folder / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "add-machine.sh", folder / "deploy")
    (folder / ".env").write_text(settings, encoding="utf-8")
    (folder / "compose").write_text(f"#!/bin/sh\necho $* >> {folder}/called\n", encoding="utf-8")
    (folder / "compose").chmod(0o755)
    for words in (arguments, arguments[:1]):
        printed = subprocess.run(
            ["sh", folder / "deploy" / "add-machine.sh", *words],
            env={"PATH": os.environ["PATH"], "COMPOSE": str(folder / "compose")},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return (folder / ".env").read_text(), (folder / "called").read_text().splitlines(), printed


def test_a_machine_is_added_by_one_command_which_keeps_tls_in_env(tmp_path: Path) -> None:
    before = "EMBQ_UID=1001\nEMBQ_BROKER_BIND=127.0.0.1\nEMBQ_BROKER_TLS_PORT=7000"
    kept, called, printed = add_machine(tmp_path, "gpu2", "10.0.0.5", settings=before)
    assert kept == "EMBQ_UID=1001\nEMBQ_BROKER_TLS_PORT=7000\nEMBQ_BROKER_BIND=10.0.0.5\n"
    users = "run --rm users --user worker-gpu2"
    assert called == ["up -d broker", users, users]  # the second time the broker is not started anew
    assert "/secrets/worker-gpu2 secrets/worker\n" in printed
    there = re.findall(r"^([A-Z_]+)=(.*)$", printed, re.MULTILINE)
    assert dict(there) == {
        "COMPOSE_FILE": WORKER,
        "EMBQ_BROKER_URL": "rediss://worker-gpu2@10.0.0.5:7000",
        "EMBQ_MACHINE": "gpu2",
        "EMBQ_UID": "$(id -u)",
        "EMBQ_GID": "$(id -g)",
    }


def test_the_first_machine_needs_the_address_of_this_one(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        add_machine(tmp_path, "gpu2")
    assert "sh deploy/add-machine.sh gpu2 10.0.0.5" in caught.value.stderr
    assert (tmp_path / ".env").read_text() == ""
