"""Clients that hold `embq serve` up: idle and slow connections, and those that no bound has been made for."""

from __future__ import annotations

import http.client
import logging
import os
import re
import resource
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from embq.app.services import http_server as server_module
from embq.app.services.http_server import bound, server_of
from embq.core.networks import client_network
from embq.core.rows.spec import RowSpec
from embq.core.service import log
from embq.retrieval.ui.fleet.live import MOST_STREAMS
from tests.e2e.served import Server, served
from tests.support.outputs.build import build, write_jsonl
from tests.support.outputs.index import build_index
from tests.support.waiting import wait_until

IDLE = 1100
LARGE = 64 * 2**20
"""Bytes of an answer: more than the buffers of two sockets hold."""


@pytest.fixture(scope="module")
def files() -> Iterator[None]:
    """As many files as the clients of a test need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192) if hard != -1 else 8192, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of one index that may open 1,024 files, as most systems allow."""
    folder = tmp_path_factory.mktemp("served")
    texts = write_jsonl(folder / "texts.jsonl", [{"id": f"k{i}", "text": f"text {i}"} for i in range(40)])
    root = build(folder / "docs", [texts], model="stub:8", unit_samples=40, rows=RowSpec(normalize=True))
    build_index(root, output="text")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        with served(root, "--no-model") as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            resource.prlimit(server.command.process.pid, resource.RLIMIT_NOFILE, (1024, 1024))
            yield server
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connected(url: str) -> socket.socket:
    host, port = re.fullmatch(r"http://([\d.]+):(\d+)", url).groups()  # type: ignore[union-attr]
    return socket.create_connection((host, int(port)), 30)


def closed(client: socket.socket) -> bool:
    """True if the server has closed a connection; bytes that it sent before are dropped."""
    client.setblocking(False)
    with suppress(BlockingIOError):
        try:
            while client.recv(2**20):
                pass
        except ConnectionError:
            pass
        return True
    return False


def test_a_client_is_served_while_others_hold_connections_open(server: Server, files: None) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(server.url)) for _ in range(IDLE)]
        for _ in range(5):
            assert server.ask("/indices-list").json == ["docs"]
            assert len(server.ask("/knn-service", {"embedding_input": [1.0] * 8, "num_images": 3}).json) == 3
        held = len(os.listdir(f"/proc/{server.command.process.pid}/fd"))
        assert held < server_module.MOST_OF_CLIENT + 200
        wait_until(lambda: sum(map(closed, idle)) >= IDLE - server_module.MOST_OF_CLIENT)
    assert server.command.stderr.count("connections_closed") == 1
    assert len(server.command.stderr) < 20_000
    assert "Traceback" not in server.command.stderr


def test_one_client_cannot_take_all_event_streams(server: Server, files: None) -> None:
    """Clients are told apart by their addresses, of which loopback has many."""
    port = int(server.url.rpartition(":")[2])
    with ExitStack() as stack:

        def status_of_stream(source: str) -> bytes:
            stream = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30, source_address=(source, 0)))
            stream.sendall(b"GET /ui/fleet/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return stream.recv(12)

        first = Counter(status_of_stream("127.0.0.1") for _ in range(MOST_STREAMS))
        assert first == {b"HTTP/1.1 200": MOST_STREAMS * 3 // 4, b"HTTP/1.1 503": MOST_STREAMS // 4}
        assert status_of_stream("127.0.0.2") == b"HTTP/1.1 200"
    wait_until(lambda: server.ask("/ui/fleet/events?run=none").status == 200)  # the rooms of those that left are free


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
    ],
)
def test_the_addresses_that_one_machine_may_have_are_one_client(one: str, other: str, same: bool) -> None:
    assert (client_network(one) == client_network(other)) == same


# --- with shorter times and lower bounds, in this process ---


@contextmanager
def running(most: int = 100, most_of_client: int = 100, begun: list[Request] | None = None) -> Iterator[str]:
    """uvicorn as `embq serve` sets it up, over an application of its own; gives its URL.

    Args:
        begun: gets the requests for /echo.
    """
    begun = [] if begun is None else begun

    async def echo(request: Request) -> Response:
        begun.append(request)
        try:
            return Response(await request.body())
        except ClientDisconnect:
            return Response(status_code=400)

    async def deaf(request: Request) -> Response:
        return Response(b"no body is read")

    async def large(request: Request) -> Response:
        return Response(bytes(LARGE))

    app = Starlette(
        routes=[
            Route("/echo", echo, methods=["POST"]),
            Route("/deaf", deaf, methods=["GET", "POST"]),
            Route("/large", large),
        ]
    )
    with pytest.MonkeyPatch.context() as patch, bound("127.0.0.1", 0) as listener:
        patch.setattr(server_module, "room", lambda: most)
        patch.setattr(server_module, "MOST_OF_CLIENT", most_of_client)
        server = server_of(app)
        listener.listen(16)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REQUEST_S", 0.3)
    monkeypatch.setattr(server_module, "ANSWER_S", 0.6)


def drip(client: socket.socket, data: bytes = b"x") -> bool:
    """Send a little; whether the server has closed the connection."""
    client.setblocking(True)
    try:
        client.sendall(data)
    except ConnectionError:
        return True
    return closed(client)


POST = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"", b""),
        (b"GET /deaf HTT", b""),
        (b"GET /deaf HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", b"x"),
        (GET % b"/deaf" + b"GET /deaf HTTP/1.1\r\nX-Slow: ", b"x"),
        (POST % b"/echo", b"x"),
        (POST % b"/deaf", b"x"),
        (POST % b"/nowhere", b"x"),
    ],
    ids=["silent", "cut headers", "slow headers", "slow second headers", "slow body", "unread body", "no route"],
)
def test_a_request_that_does_not_arrive_ends_its_connection(quick: None, first: bytes, then: bytes) -> None:
    with running() as url, connected(url) as client:
        client.sendall(first)
        wait_until(lambda: drip(client, then) if then else closed(client), 20)


def test_an_answer_that_is_read_too_slowly_ends_its_connection(quick: None) -> None:
    with running() as url, connected(url) as client:
        client.sendall(GET % b"/large")
        client.settimeout(20)
        slowly, read = threading.Event(), 0
        with suppress(ConnectionError):
            while read < LARGE and (data := client.recv(2**16)):
                read += len(data)
                slowly.wait(0.01)
        assert 0 < read < LARGE


def test_a_connection_that_rests_between_requests_is_kept(quick: None) -> None:
    """An honest client with few requests keeps its connection."""
    with running() as url:
        client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        ports = set()
        rested = threading.Event()
        for _ in range(3):
            client.request("POST", "/echo", b"hello")
            assert client.getresponse().read() == b"hello"
            ports.add(client.sock.getsockname())
            rested.wait(0.5)  # longer than a request may take, on purpose
        client.close()
        assert len(ports) == 1


@pytest.mark.parametrize(("most", "most_of_client"), [(4, 100), (100, 4)])
def test_the_longest_idle_connection_makes_room_and_a_busy_one_never(most: int, most_of_client: int) -> None:
    begun: list[Request] = []
    with running(most, most_of_client, begun) as url, ExitStack() as stack:

        def new(first: bytes) -> socket.socket:
            client = stack.enter_context(connected(url))
            client.sendall(first)
            return client

        busy = [new(POST % b"/echo") for _ in range(2)]
        wait_until(lambda: len(begun) == 2)
        idle = [new(b"GET") for _ in range(2)]
        late = [new(b"GET") for _ in range(2)]
        wait_until(lambda: all(map(closed, idle)))
        assert not any(map(closed, [*busy, *late]))
        for client in busy:
            client.settimeout(30)
            client.sendall(bytes(1_000_000))
            assert client.recv(15) == b"HTTP/1.1 200 OK"


def test_where_all_are_busy_the_new_connection_goes() -> None:
    begun: list[Request] = []
    with running(2, 100, begun) as url, ExitStack() as stack:
        busy = [stack.enter_context(connected(url)) for _ in range(2)]
        for client in busy:
            client.sendall(POST % b"/echo")
        wait_until(lambda: len(begun) == 2)
        asked = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)

        def turned_away() -> bool:
            try:
                asked.request("GET", "/deaf")
                asked.getresponse().read()
            except (ConnectionError, http.client.HTTPException):
                return True
            finally:
                asked.close()
            return False

        wait_until(turned_away)
        assert not any(map(closed, busy))


def test_a_server_asks_for_files_and_bounds_connections_by_what_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    for limits, room in [((1024, 524288), 768), ((1024, 1024), 512), ((256, 256), 128), ((-1, -1), 768)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert server_module.room() == room
    assert given == [(4096, 524288)]


def test_what_a_client_can_repeat_fills_no_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log.configure()
    events = log.Events("serve")
    with running() as url:
        for _ in range(200):
            with connected(url) as client:
                client.sendall(b"\0\r\n\r\n")
                client.settimeout(30)
                assert client.recv(12) == b"HTTP/1.1 400"
    for _ in range(200):
        try:
            raise ValueError
        except ValueError:
            events.bug("bug", route="/search")
        events.info("asked", n=1)
    lines = capsys.readouterr().err.splitlines()
    invalid = [line for line in lines if "Invalid HTTP request" in line]
    assert len(invalid) == 30
    assert "left out" in invalid[-1]
    assert len([line for line in lines if " bug route" in line]) == 30
    assert len([line for line in lines if " asked n=1" in line]) == 200
