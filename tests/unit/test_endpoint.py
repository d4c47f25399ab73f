"""The endpoint of a service, asked over real sockets."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest

from embq.core.errors import UnwellError
from embq.core.networks import Address
from embq.core.service import endpoint
from embq.core.service.endpoint import Endpoint
from tests.support.waiting import wait_until


class Told:
    """State of the service, set by the test."""

    def __init__(self) -> None:
        self.complaint = ""
        self.hung = False

    def exposition(self) -> bytes:
        if self.hung:
            raise UnwellError("what was asked for before is still being read")
        return b"embq_up 1\n"


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def address(told: Told) -> Iterator[Address]:
    service = Endpoint(Address(port=0), exposition=told.exposition, complaint=lambda: told.complaint)
    service.start()
    yield service.address
    service.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((service.address.host, service.address.port), 5)


def ask(address: Address, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers["Content-Type"], body


def test_each_path_answers_what_it_is_for(address: Address, told: Told) -> None:
    plain = "text/plain; charset=utf-8"
    assert ask(address, "/metrics?x=1") == (200, endpoint.CONTENT_TYPE, b"embq_up 1\n")
    assert ask(address, "/healthz") == (200, plain, b"ok\n")
    assert ask(address, "/healthz", "HEAD") == (200, plain, b"")
    assert ask(address, "/") == (404, plain, b"there are /metrics and /healthz\n")
    assert ask(address, "/metrics", "POST")[0] == 501
    told.complaint = "the loop has stood still for 31 s"
    assert ask(address, "/healthz") == (503, plain, b"the loop has stood still for 31 s\n")
    told.hung = True
    assert ask(address, "/metrics") == (503, plain, b"what was asked for before is still being read\n")


def test_those_who_say_nothing_take_no_place_for_ever(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint._Handler, "timeout", 3.0)
    silent = [socket.create_connection((address.host, address.port)) for _ in range(endpoint.MOST_CLIENTS)]
    try:
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(address, "/healthz")

        def answered() -> bool:
            try:
                return ask(address, "/healthz")[0] == 200
            except (ConnectionError, http.client.HTTPException):
                return False

        wait_until(answered, deadline_s=30)
    finally:
        for one in silent:
            one.close()
