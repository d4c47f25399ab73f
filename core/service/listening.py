"""Where a service listens: [HOST:]PORT, and the socket for it."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from core.errors import ConfigError, TryLaterError

LOOPBACK = "127.0.0.1"
_EVERYWHERE = {"0.0.0.0": LOOPBACK, "::": "::1"}
"""An address that stands for all of this machine -> the one under which it asks itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to listen.

    Attributes:
        host: a name or an address of this machine, without brackets.
        port: 0 finds a free one.
    """

    host: str = LOOPBACK
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address in `[HOST:]PORT`, an IPv6 host in brackets. Raises ValueError where it is none."""
        host, colon, port = text.strip().rpartition(":")
        if (colon and not host) or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is not [HOST:]PORT")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ValueError(f"{text!r}: an IPv6 host stands in brackets, as in [::1]:9101")
        return cls(host=host.strip("[]") or LOOPBACK, port=int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def url(self, path: str) -> str:
        """Where this machine finds `path` of who listens there."""
        host = _EVERYWHERE.get(self.host, self.host)
        return f"http://{Address(host=host, port=self.port)}{path}"


def bound(address: Address, *, taken: str, example: str) -> socket.socket:
    """A socket on an address. It does not listen yet.

    Args:
        taken: what to do where another program has the port.
        example: what to do where the address cannot be used.

    Raises:
        TryLaterError: `port_in_use`.
        ConfigError: `not_bindable`: the host is none of this machine's, or the port is not ours to take.
    """
    host, port = address.host, address.port
    try:
        family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(there)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise TryLaterError(
                f"port {port} of {host} is taken by another program", next_step=taken, code="port_in_use"
            ) from error
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error}", next_step=example, code="not_bindable"
        ) from error
    return listener
