"""Plain redis:// goes to networks of one's own unless somebody has said so; [HOST:]PORT is listened on or refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from embq.core.broker.bounded import Bounded
from embq.core.broker.client import connect
from embq.core.errors import ConfigError, Exit, TryLaterError
from embq.core.networks import Address, bound, public_addresses
from embq.core.settings import Settings


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.8.9.1",
        "::1",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.1.1",
        "fe80::1",
        "fd00::1",
        "100.64.0.1",
        "100.127.255.255",
        "::ffff:10.0.0.1",
        "localhost",
    ],
)
def test_an_address_of_ones_own_networks_is_not_public(host: str) -> None:
    assert public_addresses(host) == []
    with connect(f"redis://{f'[{host}]' if ':' in host else host}:6379"):
        pass


@pytest.mark.parametrize(
    "host",
    [
        "203.0.113.9",
        "8.8.8.8",
        "172.32.0.1",
        "172.15.0.1",
        "100.128.0.1",
        "100.63.0.1",
        "192.169.0.1",
        "11.0.0.1",
        "2001:db8::1",
        "fe00::1",
        "::ffff:8.8.8.8",
        "::ffff:808:808",
    ],
)
def test_plain_redis_to_any_other_is_refused_before_anything_is_sent(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(f"redis://worker:PASS@{f'[{host}]' if ':' in host else host}:6379")
    assert (caught.value.code, caught.value.exit_code) == ("plain_broker", Exit.CONFIG)
    assert "rediss://" in caught.value.next_step
    assert "ssh -N -L" in caught.value.next_step
    assert "PASS" not in caught.value.message + caught.value.next_step


def test_one_public_address_among_those_of_a_name_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        found = {"box.example.org": ["10.0.0.5", "203.0.113.9"], "broker": ["172.18.0.2", "fd00::2"]}[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with connect("redis://broker:6379"):
        pass
    with pytest.raises(ConfigError, match=r"box\.example\.org has the public address 203\.0\.113\.9"):
        connect("redis://box.example.org:6379")
    with pytest.raises(ConfigError):
        connect("redis://?host=box.example.org")


def test_whoever_trusts_that_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "no"):
        monkeypatch.setenv("EMBQ_PLAIN_BROKER", text)
        with pytest.raises(ConfigError, match="public address"):
            connect("redis://203.0.113.9")
    monkeypatch.setenv("EMBQ_PLAIN_BROKER", "yes")
    with connect("redis://203.0.113.9"):
        pass
    monkeypatch.setenv("EMBQ_PLAIN_BROKER", "true")
    with pytest.raises(ConfigError, match="neither yes nor no"):
        connect("redis://203.0.113.9")


def test_tls_may_go_anywhere_and_a_socket_is_always_here() -> None:
    for url in ("rediss://203.0.113.9:6380", "unix:///run/embq/broker.sock", "redis://no-such-host.invalid"):
        with connect(url) as client:
            assert issubclass(client.connection_pool.connection_class, Bounded)


@pytest.mark.parametrize("parameter", ["ssl_cert_reqs=none", "ssl_check_hostname=false"])
def test_a_certificate_that_is_not_checked_is_asked_for_twice(parameter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis-py then shows the password to whoever answers, and says nothing."""
    url = f"rediss://worker:PASS@10.0.0.5:6380?{parameter}"
    with pytest.raises(ConfigError, match=parameter) as caught:
        connect(url)
    assert (caught.value.code, caught.value.exit_code) == ("unchecked_broker", Exit.CONFIG)
    assert "EMBQ_BROKER_CA" in caught.value.next_step
    assert "PASS" not in caught.value.message + caught.value.next_step
    monkeypatch.setenv("EMBQ_PLAIN_BROKER", "yes")
    with connect(url):
        pass


def test_a_certificate_that_redis_py_checks_is_its_own_matter() -> None:
    with connect("rediss://10.0.0.5:6380?ssl_cert_reqs=required&ssl_ca_certs=/etc/ssl/certs/ca-certificates.crt"):
        pass


# --- addresses that are listened on ---


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        ("9101", "127.0.0.1", 9101, "http://127.0.0.1:9101/x"),
        ("0.0.0.0:9101", "0.0.0.0", 9101, "http://127.0.0.1:9101/x"),
        ("[::]:1", "::", 1, "http://[::1]:1/x"),
        ("[::1]:65535", "::1", 65535, "http://[::1]:65535/x"),
        ("gpu-box:0", "gpu-box", 0, "http://gpu-box:0/x"),
    ],
)
def test_an_address_is_a_port_with_or_without_a_host(text: str, host: str, port: int, url: str) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.url("/x")) == (host, port, url)


@pytest.mark.parametrize("text", ["x", ":9101", "box:", "65536", "-1", "::1:9101", "1.5", "http://box:9101", "٣"])
def test_what_is_no_address_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"\[HOST:\]PORT|brackets"):
        Address.parse(text)
    monkeypatch.setenv("EMBQ_METRICS", text)
    with pytest.raises(ConfigError, match="EMBQ_METRICS"):
        Settings.from_environment()


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_is_another_programs_matter(taken: int) -> None:
    with pytest.raises(TryLaterError, match=f"port {taken} of 127.0.0.1 is taken") as error:
        bound(Address(port=taken), taken="another port", example="")
    assert (error.value.code, error.value.next_step) == ("port_in_use", "another port")


def test_an_address_of_another_machine_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192.0.2.1, port 9101") as error:
        bound(Address(host="192.0.2.1", port=9101), taken="", example="--metrics 9101")
    assert (error.value.code, error.value.next_step) == ("not_bindable", "--metrics 9101")
