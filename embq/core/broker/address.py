"""Broker URLs: their parts, and the connection options for TLS or for plain text in private networks."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis.connection import parse_url

from embq.core.broker.bounded import BoundedSSLConnection
from embq.core.broker.tls import context, shake_hands, speaks_tls
from embq.core.errors import ConfigError
from embq.core.networks import public_addresses
from embq.core.settings import broker_ca, plain_broker_allowed

PORT = 6379
"""Default port of a URL."""


class _TlsConnection(BoundedSSLConnection):
    """Trusts the file of EMBQ_BROKER_CA alone if it is set; redis-py would add it to the system's CAs."""

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        return context(self.ca_certs or "").wrap_socket(sock, server_hostname=self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """The parts of a broker URL.

    Attributes:
        scheme: redis, rediss or unix.
        user: "" is the server's user `default`.
        host, port: "" and 0 for a unix socket.
        checked: whether embq checks the certificate; a URL with ssl_ parameters of its own leaves that to redis-py.
        unchecked_by: the parameter of the URL that turns the check of the server off; "" for none.
    """

    scheme: str
    user: str = ""
    host: str = ""
    port: int = 0
    checked: bool = False
    unchecked_by: str = ""

    @classmethod
    def of(cls, url: str) -> BrokerAddress:
        """Parse a URL; ValueError if it is none. "" gives an address without a scheme."""
        if not url:
            return cls(scheme="")
        scheme, options = urlsplit(url).scheme, parse_url(url)  # type: ignore[no-untyped-call]
        user = str(options.get("username", ""))
        if scheme == "unix":
            return cls(scheme=scheme, user=user)
        host, port = str(options.get("host", "localhost")), int(options.get("port", PORT))
        own = any(name.startswith("ssl_") for name in options)
        is_secure = scheme == "rediss"
        return cls(
            scheme=scheme,
            user=user,
            host=host,
            port=port,
            checked=is_secure and not own,
            unchecked_by=_unchecked_by(options) if is_secure else "",
        )

    def options(self) -> dict[str, Any]:
        """Connection options for redis-py; ConfigError if the password could be read on its way."""
        if self.checked:
            ca = broker_ca()
            context(ca)
            return {"connection_class": _TlsConnection, "ssl_ca_certs": ca or None}
        if self.unchecked_by and not plain_broker_allowed():
            raise ConfigError(
                f"the broker's URL has {self.unchecked_by}: any server on the way to {self.host} is then taken for the "
                "broker, and is shown the password",
                next_step="leave it out, and set EMBQ_BROKER_CA to the certificate of the broker's authority; "
                "EMBQ_PLAIN_BROKER=yes where that network is as good as your own",
                code="unchecked_broker",
            )
        if self.scheme == "redis" and not plain_broker_allowed() and (public := public_addresses(self.host)):
            raise ConfigError(
                f"the broker {self.host} has the public address {public[0]}, and redis:// would send the password and "
                "everything else there in plain text",
                next_step="use rediss:// (`embq broker init` makes the certificate), or a tunnel: "
                f"ssh -N -L 6379:127.0.0.1:6379 {self.host} and --broker redis://localhost:6379; "
                "EMBQ_PLAIN_BROKER=yes where that network is as good as your own",
                code="plain_broker",
            )
        return {}

    def check_handshake(self) -> None:
        """Shake hands once; ConfigError if no later attempt can succeed either, as with a wrong certificate."""
        if self.checked:
            with suppress(OSError):
                shake_hands(self.host, self.port, broker_ca())

    def check_plain(self) -> None:
        """ConfigError if connecting failed because the server speaks TLS and the URL is redis://."""
        if self.scheme == "redis" and speaks_tls(self.host, self.port):
            raise ConfigError(
                f"{self.host}:{self.port} speaks TLS, and redis:// does not",
                next_step="write rediss:// instead, and set EMBQ_BROKER_CA to the broker's ca.crt",
                code="tls",
            )


def _unchecked_by(options: Mapping[str, Any]) -> str:
    if str(options.get("ssl_cert_reqs", "")).lower() == "none":
        return "ssl_cert_reqs=none"
    return "ssl_check_hostname=false" if options.get("ssl_check_hostname") is False else ""
