"""A listening socket, and the loop that answers on it until it is told to stop."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from core import listening
from core.listening import Address

if TYPE_CHECKING:
    from starlette.types import ASGIApp

DRAIN_S = 30
"""For requests that are being answered when a stop is asked for; longer than any of them takes."""


def bound(host: str, port: int) -> socket.socket:
    """A socket on `host`, and on `port` or, where that is 0, on a free one. It does not listen yet.

    Raises as `core.listening.bound` does.
    """
    return listening.bound(
        Address(host=host, port=port),
        taken="stop that program, or take another port: --port 0 finds a free one",
        example="--host 127.0.0.1 --port 1234 is for this machine alone",
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: ASGIApp, listener: socket.socket, announce: Callable[[str], None]) -> None:
    """Answer until SIGTERM or SIGINT; what has begun by then is finished, for up to DRAIN_S.

    Args:
        announce: called with the URL when requests can be sent there.
    """
    import uvicorn

    config = uvicorn.Config(
        app,
        log_config=None,  # embq's own log, which `core.log` has set up
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        loop="asyncio",
        http="h11",
        ws="none",
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=DRAIN_S,
    )
    server = uvicorn.Server(config)

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    # For a signal that comes before uvicorn's own handlers are there, which it gives back to these when it has ended.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    listener.listen(1024)
    announce(_url(listener))
    server.run(sockets=[listener])
