"""TLS to the broker, on a real server: what is taken, and what the error says where it is not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import embq.core.broker.retry_policy
from embq.app.broker_admin.certificates import make
from embq.core.broker.client import check, connect
from embq.core.broker.tls import context
from embq.core.errors import BrokerError, ConfigError, EmbqError, Exit
from tests.support.servers.tls import HOSTS, TlsServer, free_ports, needs_tls_server, tls_server
from tests.support.waiting import wait_until

pytestmark = needs_tls_server

PASSWORD = "a-password-of-its-own"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    """A server with a certificate that is as it should be, and a password."""
    folder = tmp_path_factory.mktemp("good")
    make(folder / "secrets", HOSTS, 825)
    with tls_server(folder / "data", folder / "secrets", f'requirepass "{PASSWORD}"') as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EMBQ_BROKER_CA", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    context.cache_clear()


def refusal(url: str, password: str = PASSWORD) -> EmbqError:
    """Error of a command that uses this broker."""
    with pytest.raises(EmbqError) as caught, connect(url, password=password) as client:
        check(client, url)
    assert caught.value.next_step
    assert "\n" not in caught.value.message + caught.value.next_step
    assert PASSWORD not in caught.value.message + caught.value.next_step
    return caught.value


@contextmanager
def later(days: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Certificates are made as on another day."""

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime.now(UTC) + timedelta(days=days)

    with monkeypatch.context() as patch:
        patch.setattr("embq.app.broker_admin.certificates.datetime", Later)
        yield


# --- what is taken ---


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_good_certificate_is_taken_by_each_of_its_names(
    good: TlsServer, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("EMBQ_BROKER_CA", good.ca)
    url = good.url(host=host)
    with connect(url, password=PASSWORD) as client:
        assert check(client, url).name == "Redis"
        kind = client.connection_pool.get_connection()
        assert kind._sock.version().startswith("TLSv1.")
        client.connection_pool.release(kind)


def test_without_a_file_the_systems_authorities_are_asked(good: TlsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", good.ca)
    with connect(good.url(), password=PASSWORD) as client:
        assert check(client, good.url())


def test_with_a_file_no_authority_of_the_system_is_believed(
    good: TlsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make(tmp_path, HOSTS, 825)
    monkeypatch.setenv("SSL_CERT_FILE", good.ca)
    monkeypatch.setenv("EMBQ_BROKER_CA", str(tmp_path / "ca/ca.crt"))
    assert "authority that is not known" in refusal(good.url()).message
    with connect(good.url(), password=PASSWORD) as client, pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
        client.ping()  # nor by a client that nobody has checked


# --- what is not ---


def test_the_names_of_a_certificate_for_others_are_told(good: TlsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBQ_BROKER_CA", good.ca)
    error = refusal(good.url(host="127.0.0.2"))
    assert (error.exit_code, error.code) == (Exit.CONFIG, "tls")
    assert error.message.endswith("is for localhost, 127.0.0.1, broker")
    assert "embq broker init --server-name 127.0.0.2" in error.next_step


def test_a_host_name_that_the_certificate_lacks_is_as_wrong_as_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "s", ["broker"], 825)
    with tls_server(tmp_path / "d", tmp_path / "s") as server:
        monkeypatch.setenv("EMBQ_BROKER_CA", server.ca)
        assert refusal(server.url(host="localhost")).message.endswith("is for broker")


def test_an_authority_that_is_not_known_is_told_with_where_to_get_it(
    good: TlsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = refusal(good.url())
    assert (error.exit_code, error.code) == (Exit.CONFIG, "tls")
    assert "set EMBQ_BROKER_CA to the ca.crt" in error.next_step
    make(tmp_path, HOSTS, 825)
    monkeypatch.setenv("EMBQ_BROKER_CA", str(tmp_path / "ca/ca.crt"))
    assert f"EMBQ_BROKER_CA={tmp_path}/ca/ca.crt is of another one" in refusal(good.url()).next_step


def test_a_certificate_that_ended_is_told_with_its_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with later(-400, monkeypatch):
        make(tmp_path / "s", HOSTS, 100)
    with tls_server(tmp_path / "d", tmp_path / "s") as server:
        monkeypatch.setenv("EMBQ_BROKER_CA", server.ca)
        error = refusal(server.url())
    assert (error.exit_code, error.code) == (Exit.CONFIG, "tls")
    assert f"ended on {datetime.now(UTC) - timedelta(days=300):%Y-%m-%d}" in error.message
    assert "embq broker init" in error.next_step
    assert f"clock says {datetime.now(UTC):%Y-%m-%d}" in error.next_step


def test_a_certificate_that_has_not_begun_is_a_matter_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "s", HOSTS, 0)
    with later(11, monkeypatch):
        make(tmp_path / "s", HOSTS, 825)
    with tls_server(tmp_path / "d", tmp_path / "s") as server:
        monkeypatch.setenv("EMBQ_BROKER_CA", server.ca)
        error = refusal(server.url())
    assert f"begins on {datetime.now(UTC) + timedelta(days=10):%Y-%m-%d}" in error.message
    assert error.next_step.startswith("set the clock")


def test_a_service_that_waits_says_why_once_a_minute(
    good: TlsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embq.core.broker.retry_policy, "PATIENCE_S", 1.0)
    now, tries = [1000.0], []

    class Counted(embq.core.broker.retry_policy.WaitLog):
        def failed(self, away_s: float, why: BaseException | None) -> None:
            super().failed(away_s, why)
            tries.append(why)

    monkeypatch.setattr(embq.core.broker.retry_policy, "WAIT_LOG", Counted(lambda: now[0]))
    stop = threading.Event()

    def wait() -> None:
        with (
            pytest.raises(BrokerError, match="when the stop was asked for"),
            connect(f"rediss://:{PASSWORD}@localhost:{good.tls_port}", patient=True, give_up=stop.is_set) as client,
        ):
            client.ping()

    waiting = [threading.Thread(target=wait) for _ in range(2)]
    for thread in waiting:
        thread.start()
    try:
        wait_until(lambda: len(caplog.messages) == 1)
        before = len(tries)
        wait_until(lambda: len(tries) > before + 3)
        assert len(caplog.messages) == 1, "two connections, and many tries"
        now[0] += 61.0
        wait_until(lambda: len(caplog.messages) == 2)
    finally:
        stop.set()
        for thread in waiting:
            thread.join()
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    for message in caplog.messages:
        assert message.startswith("broker_awaited away_s=")
        assert "certificate verify failed" in message
        assert "embq doctor" in message
        assert PASSWORD not in message


# --- the wrong port, the wrong language ---


def test_tls_at_a_plain_port_is_told_soon(good: TlsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBQ_BROKER_CA", good.ca)
    error = refusal(f"rediss://localhost:{good.port}")
    assert isinstance(error, ConfigError)
    assert "speaks plain Redis" in error.message
    assert "6380" in error.next_step


def test_plain_redis_at_a_port_with_tls_is_told(good: TlsServer) -> None:
    error = refusal(f"redis://localhost:{good.tls_port}")
    assert isinstance(error, ConfigError)
    assert "speaks TLS" in error.message
    assert "write rediss://" in error.next_step


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
def test_a_server_that_wants_certificates_of_its_clients_is_told_to_ask_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    make(tmp_path / "s", HOSTS, 825)
    with tls_server(tmp_path / "d", tmp_path / "s", "tls-auth-clients yes", f"tls-protocols {version}") as server:
        monkeypatch.setenv("EMBQ_BROKER_CA", server.ca)
        error = refusal(server.url())
    assert (error.exit_code, error.code) == (Exit.CONFIG, "tls")
    assert "--tls-auth-clients no" in error.next_step


def test_nobody_at_the_port_is_an_absent_broker(monkeypatch: pytest.MonkeyPatch, good: TlsServer) -> None:
    monkeypatch.setenv("EMBQ_BROKER_CA", good.ca)
    for scheme in ("redis", "rediss"):
        error = refusal(f"{scheme}://localhost:{free_ports(1)[0]}")
        assert isinstance(error, BrokerError)
        assert "refused" in error.message


@pytest.mark.parametrize(("password", "said"), [("wrong", "does not take this password"), ("", "wants a password")])
def test_a_wrong_password_is_no_matter_of_tls(
    good: TlsServer, monkeypatch: pytest.MonkeyPatch, password: str, said: str
) -> None:
    monkeypatch.setenv("EMBQ_BROKER_CA", good.ca)
    error = refusal(good.url("worker" if password else ""), password)
    assert (error.exit_code, error.code) == (Exit.CONFIG, "config")
    assert said in error.message
    assert ("'worker'" in error.message) is bool(password)
    assert "EMBQ_BROKER_PASSWORD_FILE" in error.next_step


# --- EMBQ_BROKER_CA ---


def _missing(folder: Path) -> Path:
    return folder / "ca.crt"


def _no_certificate(folder: Path) -> Path:
    (folder / "ca.crt").write_text("this is no certificate\n")
    return folder / "ca.crt"


def _a_folder(folder: Path) -> Path:
    return folder


@pytest.mark.parametrize("make_file", [_missing, _no_certificate, _a_folder])
def test_a_file_that_cannot_be_used_is_named_before_anybody_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_file: Callable[[Path], Path]
) -> None:
    monkeypatch.setenv("EMBQ_BROKER_CA", str(make_file(tmp_path)))
    with pytest.raises(ConfigError, match=f"EMBQ_BROKER_CA names {make_file(tmp_path)}") as caught:
        connect("rediss://localhost:1")
    assert "embq broker init" in caught.value.next_step
    connect("redis://localhost:1")  # which has no use for it
