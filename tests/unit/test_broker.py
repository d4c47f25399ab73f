"""The broker: reaching it, and refusing one that would lose work."""

from __future__ import annotations

import re
import shlex
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

import embq.core.broker.client
import embq.core.broker.retry_policy
from embq.core.broker.client import ServerInfo, check, connect, problems, reach
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import BrokerError, ConfigError, EmbqError, Exit
from embq.core.redaction import masked
from tests.faults.kit.proxy import Proxy
from tests.support.waiting import wait_until


def refusal(client: redis.Redis, url: str) -> EmbqError:
    with pytest.raises(EmbqError) as caught:
        check(client, url)
    assert "\n" not in caught.value.message
    assert "\n" not in caught.value.next_step
    assert caught.value.next_step
    return caught.value


def follow(client: redis.Redis, next_step: str) -> None:
    """Do what the next step says."""
    found = re.search(r"run (CONFIG SET [\w-]+ \w+)", next_step)
    assert found is not None, next_step
    client.execute_command(*shlex.split(found[1]))
    # A server that writes its first append-only file cannot stop.
    wait_until(lambda: not any(client.info("persistence")[f"aof_rewrite_{k}"] for k in ("scheduled", "in_progress")))


def test_a_server_that_keeps_its_work_is_taken(client: redis.Redis, server: EmbeddedServer) -> None:
    info = check(client, server.url)
    assert info.name in ("Valkey", "Redis")
    assert str(info).startswith(f"{info.name} {info.version[0]}.")
    assert info.uptime_s >= 0


def test_every_problem_is_found_and_mended_one_after_the_other(
    own_client: redis.Redis, own_server: EmbeddedServer
) -> None:
    own_client.config_set("appendonly", "no")
    own_client.config_set("maxmemory-policy", "allkeys-random")
    assert len(problems(own_client, reach(own_client, own_server.url))) == 2
    for _ in range(2):
        follow(own_client, refusal(own_client, own_server.url).next_step)
    check(own_client, own_server.url)


@pytest.mark.parametrize(
    ("name", "version", "old"),
    [
        ("Redis", (6, 0, 9), True),
        ("Redis", (6, 2, 0), False),
        ("Redis", (7, 4), False),
        ("Valkey", (7, 2, 5), False),
        ("Valkey", (7, 1), True),
    ],
)
def test_an_old_server_is_refused(client: redis.Redis, name: str, version: tuple[int, ...], old: bool) -> None:
    found = problems(client, ServerInfo(name, version, 1))
    assert [what for what, _ in found] == ([f"{name} {'.'.join(map(str, version))} is too old"] if old else [])


# --- patience ---

NOWHERE = "redis://127.0.0.1:1"


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run a call that waits; its answer, or the error it ended with, comes into the list."""
    answers: list[object] = []

    def run() -> None:
        try:
            answers.append(call())
        except EmbqError as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, answers


def test_a_patient_client_waits_until_the_server_is_there(short_tmp: Path) -> None:
    server = EmbeddedServer(short_tmp / "b")
    with server, connect(server.url, patient=True) as client:
        server.stop()
        thread, answers = in_thread(client.ping)
        thread.join(2.5)
        assert answers == [], "an impatient one would have given up by now"
        server.start()
        thread.join(30)
        assert answers == [True]


def test_a_patient_client_waits_no_longer_once_a_stop_was_asked_for() -> None:
    stop = threading.Event()
    with connect(NOWHERE, patient=True, give_up=stop.is_set) as client:
        thread, answers = in_thread(client.ping)
        thread.join(3.5)
        assert answers == []
        stop.set()
        thread.join(60)
    (error,) = answers
    assert isinstance(error, BrokerError)
    assert "when the stop was asked for" in error.message
    assert error.next_step


def test_nor_does_it_where_the_server_takes_connections_and_stands_still(
    own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embq.core.broker.retry_policy, "STOPPING_S", 1.0)
    assert own_server.process is not None
    with connect(own_server.url, patient=True, give_up=lambda: True, answer_s=0.5) as client:
        client.ping()
        own_server.process.send_signal(signal.SIGSTOP)
        try:
            thread, answers = in_thread(client.ping)
            thread.join(60)
        finally:
            own_server.process.send_signal(signal.SIGCONT)
        thread.join()
    assert isinstance(answers[0], BrokerError)


def test_a_short_outage_after_the_stop_is_waited_out(client: redis.Redis, server: EmbeddedServer) -> None:
    with Proxy(server.url) as proxy, connect(proxy.url, patient=True, give_up=lambda: True) as stopping:
        stopping.ping()
        for _ in range(3):
            proxy.drop_reply(1)
            assert stopping.echo("x") == b"x"
        assert proxy.lost == 3


def test_a_connection_that_swallows_everything_is_replaced(server: EmbeddedServer) -> None:
    with Proxy(server.url) as proxy, connect(proxy.url, patient=True, answer_s=0.5) as client:
        client.ping()
        proxy.half_open()
        assert client.ping()


def test_a_full_server_is_waited_for(own_client: redis.Redis, own_server: EmbeddedServer) -> None:
    own_client.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        own_client.set("x", 1)
    with connect(own_server.url, patient=True) as client:
        thread, answers = in_thread(lambda: client.set("x", 1))
        thread.join(1.0)
        assert answers == []
        own_client.config_set("maxmemory", 0)
        thread.join(30)
        assert answers == [True]


# --- what cannot be reached ---


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "unix:///nowhere/server.sock", "redis://no-such-host.invalid"])
def test_a_server_that_is_not_there_is_a_broker_error_soon(url: str) -> None:
    with connect(url) as client:
        error = refusal(client, url)
    assert isinstance(error, BrokerError)
    assert error.exit_code == Exit.UNAVAILABLE
    assert url in error.message
    assert "--broker" in error.next_step


@pytest.mark.parametrize("password", ["wrong", ""])
def test_a_wrong_password_says_where_the_password_goes(server: EmbeddedServer, password: str) -> None:
    url = f"unix://{server.socket}"
    with connect(url, password=password) as client:
        error = refusal(client, url)
    assert isinstance(error, ConfigError)
    assert error.exit_code == Exit.CONFIG
    assert "EMBQ_BROKER_PASSWORD_FILE" in error.next_step


def test_a_password_given_apart_is_used_where_the_url_has_none(server: EmbeddedServer) -> None:
    password = (server.folder / "password").read_text()
    with connect(f"unix://{server.socket}", password=password) as client:
        assert client.ping()
    with connect(server.url, password="wrong") as client:
        assert client.ping()


@pytest.mark.parametrize("url", ["http://h", "localhost:6379", "", "redis", "redis://h:port", "redis://h:99999"])
def test_a_url_that_cannot_be_used_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(url)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:PASS@host:6379/0",
        "redis://:PASS@host",
        "unix://:PASS@/run/server.sock?db=1",
        "rediss://user:PASS:PASS@host",
        "rediss://user:PASS@PASS@host",
        "redis://user:PASS/PASS@host",
        "redis://host?password=PASS",
        "unix:///run/server.sock?db=0&password=PASS",
        "http://user:PASS@host",
    ],
)
def test_no_message_shows_a_password(url: str) -> None:
    assert "PASS" not in masked(url)
    assert url.split("://")[0] in masked(url)
    assert "host" in masked(url) or "server.sock" in masked(url)


@pytest.mark.parametrize("url", ["redis://host:6379/0", "redis://user@host", "unix:///a/b.sock"])
def test_a_url_without_a_password_is_shown_as_it_is(url: str) -> None:
    assert masked(url) == url
