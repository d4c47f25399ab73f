"""A listening socket, and the loop that answers on it until it is told to stop."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from core import networks
from core.networks import Address

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

BACKLOG = 128
"""Connections that wait to be accepted, and so many asyncio accepts at once, before any of them can be refused."""

DRAIN_S = 30
"""For requests that are being answered when a stop is asked for; longer than any of them takes."""


def bound(host: str, port: int) -> socket.socket:
    """A socket on `host`, and on `port` or, where that is 0, on a free one. It does not listen yet.

    Raises as `core.networks.bound` does.
    """
    return networks.bound(
        Address(host=host, port=port),
        taken="stop that program, or take another port: --port 0 finds a free one",
        example="--host 127.0.0.1 --port 1234 is for this machine alone",
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_of(app: ASGIApp) -> uvicorn.Server:
    """uvicorn with bounded connections."""
    import uvicorn

    from embq.serving.connections import MOST_OF_CLIENT, BoundedConnection, Connections, room

    bounds = Connections(room(), MOST_OF_CLIENT)
    config = uvicorn.Config(
        app,
        log_config=None,  # embq's own log, which `core.service.log` has set up
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
    return uvicorn.Server(config)


def serve(app: ASGIApp, listener: socket.socket, announce: Callable[[str], None]) -> None:
    """Answer until SIGTERM or SIGINT; what has begun by then is finished, for up to DRAIN_S.

    Args:
        announce: called with the URL when requests can be sent there.
    """
    server = server_of(app)

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    # For a signal that comes before uvicorn's own handlers are there, which it gives back to these when it has ended.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    listener.listen(BACKLOG)
    announce(_url(listener))
    server.run(sockets=[listener])
