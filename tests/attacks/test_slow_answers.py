"""Servers that send a byte now and then, for ever: each answer has one end, whatever a single read may wait."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from socket import socket
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest

import embq
from embq.app.broker_admin.certificates import make
from embq.app.verbs import services
from embq.core.errors import EmbqError
from embq.retrieval.searching.http_client import Address, fetch_json
from embq.retrieval.serving import image_url
from embq.retrieval.serving.http_errors import HttpError
from embq.sources.access import allowed_hosts, filesystems, ranged_reads
from embq.sources.access.clients import http
from embq.training.launch import ssh_host

LIMIT_S = 0.5
DRIP_S, DRIPS = 0.05, 160
"""A byte so often, and so many before the server gives up: 8 s."""
BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
HEADERS = b"HTTP/1.1 200 OK\r\nX-Long: "


class Dripping(ThreadingTCPServer):
    """A server that begins every answer in one way, and sends a byte now and then from there."""

    def __init__(self, start: bytes, context: ssl.SSLContext | None = None) -> None:
        self.start, self.context, self.over, self.sent = start, context, threading.Event(), 0
        super().__init__(("127.0.0.1", 0), _Drip)

    def handle_error(self, *of: object) -> None:
        """Clients leave."""


class _Drip(BaseRequestHandler):
    server: Dripping
    request: socket

    def handle(self) -> None:
        context = self.server.context
        connection = context.wrap_socket(self.request, server_side=True) if context else self.request
        with connection:
            connection.recv(1 << 16)
            connection.sendall(self.server.start)
            while self.server.sent < DRIPS and not self.server.over.wait(DRIP_S):
                connection.sendall(b"1")
                self.server.sent += 1


def _image(port: int, trusting: ssl.SSLContext) -> None:
    image_url.fetch_image(f"https://localhost:{port}/", allowed=lambda _: True, context=trusting)


def _range(url: str) -> None:
    ranged_reads.read_range(url, 0, 100_000)


CLIENTS: dict[str, Callable[[int, ssl.SSLContext], object]] = {
    "image of a query": _image,
    "search": lambda port, _: fetch_json(Address(f"http://127.0.0.1:{port}"), "/search", {}, timeout_s=LIMIT_S),
    "health": lambda port, _: services.ask_health(f"http://127.0.0.1:{port}/healthz"),
    "http input": lambda port, _: _range(f"http://127.0.0.1:{port}/a"),
    "shards of a training": lambda port, _: ssh_host._unanswered(f"http://127.0.0.1:{port}/a"),
}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module, name in (
        *((image_url, "MOST_SECONDS"), (services, "ANSWER_S"), (ssh_host, "REACH_S")),
        *((http, "GRACE_S"), (filesystems, "CONNECT_S"), (filesystems, "ANSWER_S")),
    ):
        monkeypatch.setattr(module, name, LIMIT_S, raising=False)
    monkeypatch.setattr(ranged_reads, "PAUSES_S", ())
    monkeypatch.setattr(allowed_hosts, "_REACH", [allowed_hosts.ANYWHERE])
    filesystems._connect.cache_clear()
    yield
    filesystems._connect.cache_clear()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("start", [pytest.param(HEADERS, id="headers"), pytest.param(BODY, id="body")])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_leaves_a_server_that_drips(client: str, start: bytes, tmp_path: Path) -> None:
    if client == "shards of a training" and start == BODY:
        return  # it reads the headers alone
    secure, trusting = None, ssl.create_default_context()
    if client == "image of a query":
        make(tmp_path, ["localhost"], 10)
        secure, trusting = (
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
            ssl.create_default_context(cafile=tmp_path / "ca/ca.crt"),
        )
        secure.load_cert_chain(tmp_path / "broker/tls/server.crt", tmp_path / "broker/tls/server.key")
    with Dripping(start, secure) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            with suppress(EmbqError, HttpError):
                CLIENTS[client](server.server_address[1], trusting)
            assert server.sent < DRIPS / 2
        finally:
            server.over.set()
            server.shutdown()


@pytest.mark.usefixtures("hasty")
def test_a_slow_answer_that_keeps_the_least_rate_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    body = bytes(20 * 200)

    class Steady(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(b"HTTP/1.1 206 Partial\r\nContent-Length: %d\r\n\r\n" % len(body))
            for _ in range(20):
                threading.Event().wait(DRIP_S)
                self.request.sendall(body[:200])

    with ThreadingTCPServer(("127.0.0.1", 0), Steady) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/a"
        assert ranged_reads.read_range(url, 0, len(body)) == body
        server.shutdown()


def test_no_other_client_of_http_is_made() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in Path(embq.__file__).parent.rglob("*.py")}
    made = {name for name, text in texts.items() if re.search(r"\b(?:urlopen|build_opener|HTTPS?Connection)\(", text)}
    assert made - {"answers.py", "image_url.py"} == set()
