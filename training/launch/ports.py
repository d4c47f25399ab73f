"""Ports on which the processes of a training meet."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

from core.errors import ConfigError, UsageError


def listener(port: int) -> socket.socket:
    """A listening socket on all addresses of this host.

    Args:
        port: 0 for a free one.

    Raises OSError where another program has it.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)


def greet(listening: socket.socket, greeting: bytes) -> None:
    """Send a greeting to whoever connects, until the socket is shut down.

    Who connects hangs up first. Else the port would be kept from its next user for a minute.
    """
    with ExitStack() as connected, suppress(OSError):
        while True:
            one, _ = listening.accept()
            connected.enter_context(one)
            with suppress(OSError):
                one.sendall(greeting)


def free_port() -> int:
    """A port that nobody has now. Somebody else may take it before it is used."""
    with listener(0) as found:
        return int(found.getsockname()[1])


def taken(host: str, port: int, free: int) -> ConfigError:
    """The error for a port on which the processes were to meet, and another program listens."""
    return ConfigError(
        f"port {port} of {host} is taken by another program, maybe by another training",
        next_step=f"--rendezvous {free} is free there; without --rendezvous a free port is found",
        code="port_taken",
    )


def meeting_point(text: str) -> tuple[str, int]:
    """The host, "" where it is not said, and the port, 0 where it is not said, of `--rendezvous [HOST:]PORT`."""
    host, colon, port = text.rpartition(":")
    if not text:
        return "", 0
    if not port.isdecimal() or not 0 < int(port) < 65536 or (colon and not host.strip("[]")):
        raise UsageError(f"--rendezvous {text}: this is no port", next_step="such as 29500, or 10.0.0.1:29500")
    return host, int(port)
