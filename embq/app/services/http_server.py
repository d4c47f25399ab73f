"""The HTTP server: listening socket, bounded connections, and the loop until SIGTERM or SIGINT.

uvicorn bounds requests, and the idle time of a connection between two of them. A connection that sends no whole
request, or reads no response, it keeps for ever; here each has deadlines, and above the limits the connection that has
been without a request for longest is closed.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from embq.core import networks
from embq.core.networks import Address, client_network
from embq.core.process.limits import open_files
from embq.core.service.log import Events

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

MOST_IN_FLIGHT = 256
"""Above this, POST requests are refused: each holds its body, and the last one would wait for all before it. Of one
client above three quarters of it, so that none keeps out the others by itself."""

MOST_CONNECTIONS, MOST_OF_CLIENT = 3 * MOST_IN_FLIGHT, 2 * MOST_IN_FLIGHT
"""The limit for one client is above that of concurrent requests: all may come through one proxy, which is to get the
error for too many requests."""

REQUEST_S = 10.0
"""Deadline for the headers of a request, from the connection or their first byte; also for the rest of an unread
body."""

ANSWER_S = 120.0
"""Deadline from the headers of a request until its response is read; the body has 30 s of it, see `app.BODY_S`."""

REPORT_S = 60.0
"""Between two log events about closed connections."""


class Connections:
    """The open connections of a server, in the order in which they became idle."""

    def __init__(self, most: int, most_of_client: int) -> None:
        self._most, self._most_of_client = most, most_of_client
        self._open: dict[BoundedConnection, bytes] = {}
        self._closed, self._report_at = 0, 0.0
        self._log = Events("serve")

    def admit(self, connection: BoundedConnection) -> None:
        """Admit a connection; above a limit the longest idle one is closed, or the new one if none is idle."""
        client = client_network(connection.client[0] if connection.client else "")
        same = [other for other, whose in self._open.items() if whose == client]
        self._open[connection] = client
        if len(same) >= self._most_of_client:
            self._close(next((other for other in same if other.waits), connection))
        elif len(self._open) > self._most:
            self._close(next((other for other in self._open if other.waits), connection))

    def forget(self, connection: BoundedConnection) -> None:
        """Remove a closed connection."""
        self._open.pop(connection, None)

    def answered(self, connection: BoundedConnection) -> None:
        """Mark a connection as idle from now on."""
        if (client := self._open.pop(connection, None)) is not None:
            self._open[connection] = client

    def _close(self, connection: BoundedConnection) -> None:
        self.forget(connection)
        connection.transport.abort()
        self._closed += 1
        if (now := time.monotonic()) >= self._report_at:
            self._report_at = now + REPORT_S
            self._log.warning("connections_closed", closed=self._closed, open=len(self._open))
            self._closed = 0


class BoundedConnection(H11Protocol):
    """A connection of uvicorn with deadlines for a request and for reading its response."""

    def __init__(self, *, bounds: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._bounds = bounds
        self._phase: tuple[str, object] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._bounds.admit(self)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """The response is with the transport; the next request may start."""
        super().on_response_complete()
        self._bounds.answered(self)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._bounds.forget(self)
        self._set(None)
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.transport.is_closing():
            return  # what is left is written within the time that runs already
        if not self.waits:
            self._set(("answer", self.cycle))
        elif self._phase == ("answer", self.cycle) and self.transport.get_write_buffer_size():
            return
        elif self.cycle is not None and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._set(None)  # uvicorn's own time between two requests runs
        else:
            self._set(("request", self.cycle))

    def _set(self, phase: tuple[str, object] | None) -> None:
        if phase == self._phase:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._phase = phase
        seconds = ANSWER_S if phase is not None and phase[0] == "answer" else REQUEST_S
        self._deadline = None if phase is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        read = self.waits and not self.transport.is_closing() and not self.transport.get_write_buffer_size()
        if self._phase == ("answer", self.cycle) and read:
            self._watch()  # its answer was read meanwhile
        else:
            self.transport.abort()


def room() -> int:
    """The limit of connections by the open-file limit, after raising that."""
    return int(min(MOST_CONNECTIONS, max(8, open_files() / 2)))


BACKLOG = 128
"""Connections that wait to be accepted; asyncio accepts as many at once."""

DRAIN_S = 30
"""Time for running requests to end after a stop signal; longer than any of them takes."""


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to `host` and `port`, or to a free port for 0. It does not listen yet.

    Raises as `embq.core.networks.bound` does.
    """
    return networks.bound(
        Address(host=host, port=port),
        taken="stop that program, or use another port: --port 0 finds a free one",
        example="--host 127.0.0.1 --port 1234 is for this machine only",
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{Address(host=host, port=port)}"


def server_of(app: ASGIApp, leave: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """A uvicorn server with bounded connections.

    Args:
        leave: called in the event loop when the server begins to stop, to end responses that would go on.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            leave()
            await super().shutdown(sockets)

    bounds = Connections(room(), MOST_OF_CLIENT)
    config = uvicorn.Config(
        app,
        log_config=None,  # embq's own log, which `embq.core.service.log` has set up
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        loop="asyncio",
        http=partial(BoundedConnection, bounds=bounds),  # type: ignore[arg-type]
        ws="none",
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=DRAIN_S,
    )
    return Server(config)


def serve(
    app: ASGIApp,
    listener: socket.socket,
    announce: Callable[[str], None],
    *,
    leave: Callable[[], None] = lambda: None,
) -> None:
    """Answer requests until SIGTERM or SIGINT; running requests get up to DRAIN_S to finish.

    Args:
        announce: called with the URL when requests can be sent.
        leave: see `server_of`.
    """
    server = server_of(app, leave)

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    # For a signal before uvicorn installs its own handlers; it restores these when it ends.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    listener.listen(BACKLOG)
    announce(_url(listener))
    server.run(sockets=[listener])
