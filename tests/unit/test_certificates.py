"""Certificates of the broker: a TLS client takes them, and they are made anew exactly when they must be."""

from __future__ import annotations

import os
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from embq.app.broker_admin.certificates import make
from embq.core.errors import ConfigError, UsageError
from tests.support.planning import snapshot

HOSTS = ("localhost", "127.0.0.1", "::1", "broker")


def shaken(folder: Path, host: str) -> str:
    """Error of a client that checks names at the server's certificate; "" where it takes it."""
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(folder / "broker/tls/server.crt", folder / "broker/tls/server.key")
    ours = ssl.create_default_context(cafile=str(folder / "ca/ca.crt"))
    ours.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ours.wrap_bio(to_client, to_server, server_hostname=host)
    server = theirs.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
    return ""


def certificate(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "broker/tls/server.crt").read_bytes())


@pytest.mark.parametrize("host", HOSTS)
def test_a_client_that_knows_the_authority_takes_the_server_by_each_of_its_names(tmp_path: Path, host: str) -> None:
    make(tmp_path / "secrets", HOSTS, 825)
    assert shaken(tmp_path / "secrets", host) == ""
    assert "mismatch" in shaken(tmp_path / "secrets", "elsewhere.example")
    assert "mismatch" in shaken(tmp_path / "secrets", "127.0.0.2")


def test_nobody_else_may_read_what_is_made_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = make(tmp_path / "a" / "secrets", HOSTS, 825)
    finally:
        os.umask(before)
    assert {path.name for path in made} == {"ca.crt", "ca.key", "server.crt", "server.key"}
    assert set(made) == {path for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    folders = [tmp_path / "a", *(path for path in (tmp_path / "a").rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    make(tmp_path, HOSTS, 825)
    before = snapshot(tmp_path)
    assert make(tmp_path, HOSTS, 825) == []
    assert make(tmp_path, HOSTS[:1], 10) == []
    assert snapshot(tmp_path) == before


def test_further_hosts_come_to_those_that_are_there_and_the_authority_stays(tmp_path: Path) -> None:
    make(tmp_path, HOSTS, 825)
    authority = (tmp_path / "ca/ca.crt").read_bytes()
    written = make(tmp_path, ["GPU-box.example.org", "10.0.0.5", "broker"], 825)
    assert {path.name for path in written} == {"server.crt", "server.key"}
    assert (tmp_path / "ca/ca.crt").read_bytes() == authority
    assert [shaken(tmp_path, host) for host in (*HOSTS, "gpu-box.example.org", "10.0.0.5")] == [""] * 6


@pytest.mark.parametrize(("days", "renewed"), [(29, False), (31, False), (0, True)])
def test_a_certificate_is_kept_while_it_has_time_left(tmp_path: Path, days: int, renewed: bool) -> None:
    make(tmp_path, HOSTS, days)
    assert bool(make(tmp_path, HOSTS, 825)) is renewed
    assert shaken(tmp_path, "broker") == ""


def test_one_that_ends_within_thirty_days_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, HOSTS, 100)
    for passed, renewed in ((69, False), (71, True)):

        class Later(datetime):
            @classmethod
            def now(cls, tz: object = None, after: int = passed) -> datetime:
                return datetime.now(UTC) + timedelta(days=after)

        monkeypatch.setattr("embq.app.broker_admin.certificates.datetime", Later)
        assert bool(make(tmp_path, HOSTS, 100)) is renewed
    left = certificate(tmp_path).not_valid_after_utc - datetime.now(UTC)
    assert left > timedelta(days=170)


def test_it_holds_since_yesterday_and_never_longer_than_the_authority(tmp_path: Path) -> None:
    make(tmp_path, HOSTS, 100_000)
    authority = x509.load_pem_x509_certificate((tmp_path / "ca/ca.crt").read_bytes())
    assert certificate(tmp_path).not_valid_after_utc == authority.not_valid_after_utc
    assert datetime.now(UTC) - certificate(tmp_path).not_valid_before_utc > timedelta(hours=23)


def test_a_server_of_another_authority_or_with_another_key_is_made_anew(tmp_path: Path) -> None:
    make(tmp_path / "one", HOSTS, 825)
    make(tmp_path / "two", HOSTS, 825)
    for name in ("server.crt", "server.key"):
        (tmp_path / "two/broker/tls" / name).replace(tmp_path / "one/broker/tls" / name)
    assert shaken(tmp_path / "one", "broker") != ""
    assert make(tmp_path / "one", HOSTS, 825)
    assert shaken(tmp_path / "one", "broker") == ""
    make(tmp_path / "two", HOSTS, 825)
    (tmp_path / "two/broker/tls/server.key").replace(tmp_path / "one/broker/tls/server.key")
    assert make(tmp_path / "one", HOSTS, 825)
    assert shaken(tmp_path / "one", "broker") == ""


@pytest.mark.parametrize("lost", ["ca.key", "ca.crt"])
def test_an_authority_that_lost_a_file_is_never_replaced_in_silence(tmp_path: Path, lost: str) -> None:
    make(tmp_path, HOSTS, 825)
    (tmp_path / "ca" / lost).unlink()
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match="missing or damaged") as caught:
        make(tmp_path, HOSTS, 825)
    assert "backup" in caught.value.next_step
    assert snapshot(tmp_path) == before


def test_a_key_that_is_not_the_authoritys_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "one", HOSTS, 825)
    make(tmp_path / "two", HOSTS, 825)
    (tmp_path / "two/ca/ca.key").replace(tmp_path / "one/ca/ca.key")
    with pytest.raises(ConfigError, match="is not the key of"):
        make(tmp_path / "one", HOSTS, 825)


@pytest.mark.parametrize("host", ["", "box:6380", "redis://box", "a b", "bücher.example", "x" * 254])
def test_a_host_that_can_be_none_is_refused_before_anything_is_made(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match="neither a host name nor an IP address"):
        make(tmp_path / "secrets", [*HOSTS, host], 825)
    assert not (tmp_path / "secrets").exists()
