"""DNS rebinding: every HTTP server answers to names that no page in a browser can have."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from embq.core.networks import Address, HostNames
from embq.core.service.endpoint import Endpoint
from embq.training.shards import serving
from tests.ui.thumbnail_server import served_here

Asked = Callable[[str], int]
"""Host header -> status of the answer."""

EVERYWHERE = "0.0.0.0"
OWN = ("10.1.2.3", "10.1.2.3:1234", "[fe80::1]:80", "127.0.0.1:9", "localhost:1234", "allowed.example:80")
FOREIGN = (
    *("evil.example", "evil.example:1234", "localhost.evil.example", "127.0.0.1.evil.example", "10.1.2.3@evil.example"),
    *("evil.example/localhost", "localhost/?", "localhost, evil.example", "[::1", "[evil.example]", ":80"),
)


@contextmanager
def application(verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """`embq serve` or `embq ui`, told to listen on all addresses."""
    options = [*(["--follow"] if verb == "serve" else []), "--host", EVERYWHERE, "--allow-host", "allowed.example"]
    with served_here(monkeypatch, verb, folder, *options) as client:
        yield lambda host: client.get("/fleet", headers={"host": host}).status_code


@contextmanager
def endpoint() -> Iterator[Asked]:
    """The endpoint of a producer, writer or worker."""
    service = Endpoint(Address(port=0), exposition=lambda: b"", complaint=lambda: "", allow_hosts=["allowed.example"])
    service.start()

    def asked(host: str) -> int:
        connection = http.client.HTTPConnection(service.address.host, service.address.port, timeout=10)
        connection.request("GET", "/metrics", headers={"Host": host})
        status = connection.getresponse().status
        connection.close()
        return status

    yield asked
    service.close()


@contextmanager
def shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """`embq shards serve`."""
    (folder / "a.tar").write_bytes(b"x")
    monkeypatch.setenv("EMBQ_ALLOW_HOSTS", "allowed.example")
    client = TestClient(serving.app(folder, host=EVERYWHERE))
    yield lambda host: client.get("/a.tar", headers={"host": host}).status_code


@pytest.mark.parametrize("kind", ["serve", "ui", "endpoint", "shards"])
def test_a_server_answers_to_addresses_and_own_names_only(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"endpoint": endpoint, "shards": lambda: shards(tmp_path, monkeypatch)}
    with made.get(kind, lambda: application(kind, tmp_path, monkeypatch))() as asked:
        own = OWN if kind == "endpoint" else (*OWN, socket.gethostname(), f"{socket.getfqdn().upper()}.:1234")
        assert {host: asked(host) for host in own} == dict.fromkeys(own, 200)
        # What is no host at all may be refused as malformed.
        assert {host for host in FOREIGN if asked(host) not in (400, 421)} == set()


def test_on_loopback_the_machine_has_the_names_of_loopback_only() -> None:
    hosts = HostNames(listens_on="127.0.0.1")
    assert hosts.accept("localhost:80")
    assert hosts.accept("127.1")
    assert hosts.accept("")
    assert not hosts.accept(f"{socket.gethostname()}.evil.example")
    assert hosts.accept(socket.gethostname()) == (socket.gethostname() == "localhost")
