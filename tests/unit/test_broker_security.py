"""Findings of `embq doctor` about who can get at the broker, on real servers with real users."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis

from embq.app.broker_admin import accounts
from embq.app.broker_admin.certificates import make
from embq.app.doctor.broker_checks import broker
from embq.app.doctor.check import Check
from embq.core.settings import Settings
from tests.support.servers.tls import HOSTS, TlsServer, needs_tls_server, tls_server

PASSWORD = "pw"


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that `embq broker init` makes."""
    folder = tmp_path_factory.mktemp("secrets")
    accounts.make(folder)
    make(folder, HOSTS, 825)
    return folder


@pytest.fixture(scope="module")
def with_roles(secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    """A server with the users of all roles, and one of a role who may too much."""
    users = secrets / "broker" / "users.acl"
    users.write_text(users.read_text() + f"user worker-wild on >{PASSWORD} ~* &* +@all\n")
    with tls_server(
        tmp_path_factory.mktemp("data"), secrets, f"aclfile {secrets}/broker/users.acl", "enable-debug-command yes"
    ) as server:
        yield server


@contextmanager
def server_of(folder: Path, *options: str, days: int = 825) -> Iterator[TlsServer]:
    make(folder / "s", HOSTS, days)
    with tls_server(folder / "d", folder / "s", *options) as server:
        yield server


def rows(url: str, password: str = "") -> dict[str, Check]:
    """Name -> row."""
    return {check.name: check for check in broker(Settings(broker_url=url, broker_password=password))}


def password_of(secrets: Path, user: str) -> str:
    return (secrets / user / "password").read_text().strip()


@needs_tls_server
@pytest.mark.parametrize("user", ["laptop", "worker", "writer"])
def test_a_role_is_told_with_what_it_is_refused(with_roles: TlsServer, secrets: Path, user: str) -> None:
    found = rows(f"redis://{user}@127.0.0.1:{with_roles.port}", password_of(secrets, user))
    assert [found[name].state for name in ("broker", "queue", "clock", "memory")] == ["ok"] * 4
    assert found["user"].detail.startswith(f"{user}: ")
    assert found["rights"] == Check("rights", "ok", f"{user} is refused CONFIG, MODULE, DEBUG")


@needs_tls_server
def test_a_user_of_a_role_who_may_too_much_is_a_warning(with_roles: TlsServer) -> None:
    found = rows(f"redis://worker-wild@127.0.0.1:{with_roles.port}", PASSWORD)
    assert found["rights"].state == "warn"
    assert "worker-wild may use CONFIG, MODULE, DEBUG, FLUSHALL" in found["rights"].detail
    assert "embq broker init" in found["rights"].fix
    with redis.Redis(port=with_roles.port, username="worker-wild", password=PASSWORD) as client:
        client.set("still", "there")
        rows(f"redis://worker-wild@127.0.0.1:{with_roles.port}", PASSWORD)
        assert client.get("still") == b"there", "asking whether it may flush flushes nothing"


@needs_tls_server
def test_the_admin_may_everything_and_is_not_warned_of_it(with_roles: TlsServer, secrets: Path) -> None:
    found = rows(f"redis://admin@127.0.0.1:{with_roles.port}", password_of(secrets, "admin"))
    assert found["user"].state == "ok"
    assert "rights" not in found


@needs_tls_server
def test_a_server_that_answers_anybody_is_a_warning_and_one_with_a_password_is_not(tmp_path: Path) -> None:
    with server_of(tmp_path) as server:
        found = rows(f"redis://127.0.0.1:{server.port}")
        assert found["user"].state == "warn"
        assert "asks for no password" in found["user"].detail
        assert found["user"].fix
        with redis.Redis(port=server.port) as client:
            client.config_set("requirepass", PASSWORD)
        assert rows(f"redis://127.0.0.1:{server.port}", PASSWORD)["user"].state == "ok"
        assert rows(f"redis://:{PASSWORD}@127.0.0.1:{server.port}")["user"].state == "ok"
        assert rows(f"redis://127.0.0.1:{server.port}?password={PASSWORD}")["user"].state == "ok"


@needs_tls_server
@pytest.mark.parametrize(("days", "state"), [(29, "warn"), (31, "ok")])
def test_the_certificates_last_month_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, state: str
) -> None:
    with server_of(tmp_path, days=days) as server:
        monkeypatch.setenv("EMBQ_BROKER_CA", server.ca)
        found = rows(server.url())["tls"]
    assert found.state == state
    assert found.detail.startswith("TLSv1.")
    assert f"ends in {days - 1} days" in found.detail
    assert bool(found.fix) is (state == "warn")


@needs_tls_server
def test_a_certificate_that_ended_fails_with_its_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Earlier(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime.now(UTC) - timedelta(days=50)

    with ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr("embq.app.broker_admin.certificates.datetime", Earlier)
            server = stack.enter_context(server_of(tmp_path, days=40))
        monkeypatch.setenv("EMBQ_BROKER_CA", server.ca)
        (found,) = rows(server.url()).values()
    assert (found.name, found.state) == ("broker", "fail")
    assert f"ended on {datetime.now(UTC) - timedelta(days=10):%Y-%m-%d}" in found.detail


@needs_tls_server
def test_plain_redis_is_fine_here_told_of_in_ones_own_network_and_a_warning_anywhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = "embq.app.doctor.broker_checks"
    with server_of(tmp_path) as server:
        url = f"redis://127.0.0.1:{server.port}"
        assert rows(url)["tls"].detail == "none, and none is needed on this machine"
        monkeypatch.setattr(f"{security}.is_loopback", lambda host: False)
        found = rows(url)["tls"]
        assert (found.state, "reads everything" in found.detail) == ("ok", True)
        monkeypatch.setattr(f"{security}.public_addresses", lambda host: ["203.0.113.9"])
        found = rows(url)["tls"]
        assert (found.state, "rediss://" in found.fix) == ("warn", True)


@needs_tls_server
def test_memory_that_is_nearly_used_up_is_a_warning(tmp_path: Path) -> None:
    with server_of(tmp_path) as server, redis.Redis(port=server.port) as client:
        assert rows(f"redis://127.0.0.1:{server.port}")["memory"].state == "ok"
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] * 1.1))
        found = rows(f"redis://127.0.0.1:{server.port}")["memory"]
        assert (found.state, "of its limit" in found.detail) == ("warn", True)
        assert "raise maxmemory" in found.fix


@needs_tls_server
def test_a_password_file_that_others_may_read_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "password"
    path.write_text(PASSWORD)
    monkeypatch.setenv("EMBQ_BROKER_PASSWORD_FILE", str(path))
    with server_of(tmp_path, f"requirepass {PASSWORD}") as server:
        for mode, state in ((0o600, "ok"), (0o400, "ok"), (0o640, "warn"), (0o644, "warn")):
            path.chmod(mode)
            found = rows(f"redis://127.0.0.1:{server.port}", PASSWORD)["secrets"]
            assert (found.state, found.fix) == (state, f"chmod 600 {path}" if state == "warn" else "")
