"""Whole runs over TLS: every process of a run speaks it, and takes a connection that was cut up again."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import redis

from embq.app.broker_admin.certificates import make
from embq.core.errors import Exit
from tests.e2e.check import check_complete
from tests.e2e.session import await_in, called, closed, committed, process_ended, started, write_texts
from tests.support.servers.tls import HOSTS, Relay, TlsServer, needs_tls_server, tls_server

pytestmark = needs_tls_server

DIM = 8
PASSWORD = "tls-run-password"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TlsServer]:
    """A server of this test alone, which wants a password."""
    make(tmp_path / "secrets", HOSTS, 825)
    (tmp_path / "password").write_text(PASSWORD + "\n")
    with tls_server(tmp_path / "data", tmp_path / "secrets", f"requirepass {PASSWORD}") as server:
        yield server


def environment(server: TlsServer, folder: Path, port: int = 0) -> dict[str, str]:
    """Settings of a person: the URL without a password, its file, and whom to believe."""
    return {
        "EMBQ_BROKER_URL": f"rediss://localhost:{port or server.tls_port}",
        "EMBQ_BROKER_PASSWORD_FILE": str(folder / "password"),
        "EMBQ_BROKER_CA": server.ca,
        "EMBQ_LEASE_S": "4",
        "EMBQ_BEAT_S": "0.5",
    }


def clients(server: TlsServer) -> list[dict[str, str]]:
    with redis.Redis(port=server.port, password=PASSWORD) as client:
        found: list[dict[str, str]] = client.client_list()
        return found


def test_a_whole_run_over_tls_with_a_password_file(server: TlsServer, tmp_path: Path) -> None:
    expected = write_texts(tmp_path / "texts.jsonl", 400)
    arguments = ["run", tmp_path / "texts.jsonl", "-o", tmp_path / "out", "-m", f"stub:{DIM}?ms_per_sample=4"]
    with started(
        *arguments,
        "--unit-size",
        "5",
        "--quiet",
        "--workers",
        "2",
        environment=environment(server, tmp_path),
    ) as command:
        await_in(command, lambda: len(committed(tmp_path / "out")) > 5)
        workers = {process.pid for process in command.workers()}
        assert len(workers) == 2
        tls = {f"127.0.0.1:{connection.laddr.port}": pid for pid, connection in _to(server.tls_port)}
        assert workers <= set(tls.values()), "each worker process speaks TLS itself"
        assert {pid for pid, _ in _to(server.port)} == set(), "and nobody speaks anything else"
        assert command.wait() == Exit.DONE
    check_complete(tmp_path / "out", expected, units=80, dim=DIM)


def _to(port: int) -> Iterator[tuple[int, psutil._common.sconn]]:
    """(process id, connection) of those on this machine that are connected to a port of loopback, but our own."""
    for connection in psutil.net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port and connection.pid not in (None, psutil.Process().pid):
            yield connection.pid, connection


def test_a_connection_that_is_cut_in_mid_run_is_taken_up_again(server: TlsServer, tmp_path: Path) -> None:
    expected = write_texts(tmp_path / "texts.jsonl", 600)
    relay = Relay(server.tls_port)
    arguments = ["run", tmp_path / "texts.jsonl", "-o", tmp_path / "out", "-m", f"stub:{DIM}?ms_per_sample=8"]
    try:
        with started(
            *arguments, "--unit-size", "5", "--quiet", environment=environment(server, tmp_path, relay.port)
        ) as command:
            for cut in range(1, 4):
                await_in(command, lambda cut=cut: len(committed(tmp_path / "out")) >= 8 * cut)
                before, links = relay.accepted, relay.cut()
                assert links > 4
                await_in(command, lambda before=before: relay.accepted > before + 2)
            assert command.wait() == Exit.DONE, command.said
    finally:
        relay.close()
    check_complete(tmp_path / "out", expected, units=120, dim=DIM)


def test_services_with_what_embq_broker_init_made_for_each(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    assert process_ended("broker", "init", secrets)[0] == Exit.DONE
    with tls_server(tmp_path / "data", secrets, f"aclfile {secrets}/broker/users.acl") as server, ExitStack() as stack:

        def role(user: str) -> dict[str, str]:
            return {
                "EMBQ_BROKER_URL": server.url(user),
                "EMBQ_BROKER_PASSWORD_FILE": str(secrets / user / "password"),
                "EMBQ_BROKER_CA": str(secrets / user / "ca.crt"),
            }

        expected = write_texts(tmp_path / "texts.jsonl", 100)
        for verb, user in (("writer", "writer"), ("producer", "writer"), ("worker", "worker")):
            service = stack.enter_context(started(verb, environment=role(user)))
        out = tmp_path / "out"
        arguments = ["enqueue", tmp_path / "texts.jsonl", "-o", out, "-m", f"stub:{DIM}", "--unit-size", "5"]
        status, _, said = called(*arguments, environment=role("laptop"))
        assert status == Exit.DONE, said
        await_in(service, lambda: closed(out))
        wrong = {**role("laptop"), "EMBQ_BROKER_PASSWORD_FILE": str(secrets / "worker" / "password")}
        status, _, said = called("status", environment=wrong)
        assert status == Exit.CONFIG
        assert "does not take this password for the user 'laptop'" in said
    check_complete(out, expected, units=20, dim=DIM)


@pytest.mark.parametrize("verb", ["producer", "writer", "worker", "status"])
def test_a_service_says_what_is_wrong_with_the_certificate_and_ends(
    server: TlsServer, tmp_path: Path, verb: str
) -> None:
    make(tmp_path / "other", HOSTS, 825)
    foreign = {**environment(server, tmp_path), "EMBQ_BROKER_CA": str(tmp_path / "other/ca/ca.crt")}
    status, _, said = called(verb, environment=foreign)
    assert status == Exit.CONFIG
    assert re.search(r"error\[tls\]: localhost:\d+ shows a certificate of an authority that is not known here", said)
    assert "next:  EMBQ_BROKER_CA=" in said
    assert "Traceback" not in said


def test_doctor_says_what_is_wrong_with_the_password(server: TlsServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("another")
    status, said, _ = called("doctor", environment=environment(server, tmp_path))
    assert status == Exit.UNAVAILABLE
    assert "does not take this password" in said
    assert "EMBQ_BROKER_PASSWORD_FILE" in said


def test_a_stranger_who_speaks_neither_tls_nor_the_password_gets_nothing(server: TlsServer) -> None:
    with socket.create_connection(("127.0.0.1", server.tls_port), timeout=10) as stranger:
        stranger.sendall(b"PING\r\nKEYS *\r\n")
        try:
            answer = stranger.recv(100)
        except ConnectionResetError:
            answer = b""
    assert b"PONG" not in answer
    assert not answer.startswith((b"+", b"*", b"$"))
