"""Hosts that this process may read from (protection against server-side request forgery).

URLs come over the network and from rows of tables, so a worker could be made to query its private network. Addresses
that are not public are refused unless an operator has named them. The checked addresses are those that are connected
to, and each redirect is checked. Storage whose endpoint is configured on this machine (S3, Google, Azure) is not
checked: no URL can change it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from embq.core.errors import SourceError
from embq.core.networks import Hosts, is_public
from embq.core.storage.paths import is_url
from embq.sources.access.patterns import expand_braces
from embq.sources.access.urls import is_inside

_PORTS = {"http": 80, "https": 443, "hdfs": 8020, "sftp": 22}


class RefusedHost(Exception):
    """A host that may not be read from. No OSError, which clients take for trouble with the network."""

    def __init__(self, message: str, next_step: str) -> None:
        super().__init__(message)
        self.next_step = next_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Hosts and URLs that may be read from.

    Attributes:
        roots: URLs to read in or below; None for any. Their hosts may be private.
        hosts: hosts that may be read from though they are not public, and that redirects may lead to.
    """

    roots: tuple[str, ...] | None = None
    hosts: Hosts = field(default_factory=Hosts)

    @classmethod
    def of(cls, roots: Sequence[str], private_hosts: Sequence[str]) -> Reach:
        """From EMBQ_ROOTS and EMBQ_PRIVATE_HOSTS."""
        return cls(roots=tuple(root for root in roots if is_url(root)) if roots else None, hosts=Hosts(private_hosts))

    @classmethod
    def from_description(cls, described: Mapping[str, Any] | None) -> Reach:
        """The inverse of `describe`."""
        if described is None:
            return ANYWHERE
        roots = described["roots"]
        return cls(roots=None if roots is None else tuple(roots), hosts=Hosts(described["hosts"]))

    def describe(self) -> dict[str, Any] | None:
        """As JSON-ready values, for another process; None for no limit."""
        return {"roots": self.roots, "hosts": self.hosts.entries}

    def names(self, host: str, port: int | None) -> bool:
        """True if the operator has named a host, so that its addresses do not matter."""
        return self.hosts.names(host, port) or any(endpoint(root) == (host, port) for root in self.roots or ())

    def check(self, url: str) -> None:
        """RefusedHost for a URL outside of the roots, on a host that is not named beside them."""
        if self.roots is None or any(is_inside(url, root) for root in self.roots) or self.hosts.names(*endpoint(url)):
            return
        raise RefusedHost(
            f"{url} is outside of what the worker on {socket.gethostname()} may read",
            "start that worker with this host in EMBQ_ROOTS; then embq retry",
        )

    def check_addresses(self, host: str, port: int | None, addresses: Sequence[str]) -> None:
        """RefusedHost if a host has an address that may not be connected to."""
        if self.names(host, port):
            return
        for address in addresses:
            if not is_public(address) and not self.hosts.names(address, port):
                raise RefusedHost(
                    f"{host} has the address {address}, which is not public",
                    f"if it is meant, start that worker with EMBQ_PRIVATE_HOSTS={host}; then embq retry",
                )

    def resolve(self, host: str, port: int) -> list[str]:
        """The addresses of a host, all of which may be connected to; OSError if it has none."""
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
        self.check_addresses(host, port, addresses)
        return addresses


def endpoint(url: str) -> tuple[str, int | None]:
    """Host, in lower case, and port of a URL; SourceError if it names none."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(parts.scheme.lower())
    except ValueError as error:
        raise SourceError(f"{url!r}: not a URL: {error}", code="source_missing") from error


def hosts_named(inputs: Sequence[str]) -> list[str]:
    """The hosts in inputs as a person names them, braces expanded; an input that is no such URL has none."""
    hosts: list[str] = []
    for text in inputs:
        scheme, _, rest = text.partition("://")
        if scheme.lower() in _PORTS:
            host = rest.partition("/")[0].rpartition("@")[2]
            hosts += expand_braces(host, "'https://{a,b}.example.org/*.tar'") if "{" in host else [host]
    return list(dict.fromkeys(hosts))


class _Anywhere(Reach):
    """No limit: for a user's own process, which reads the inputs that the user names."""

    def describe(self) -> None:
        return None

    def names(self, host: str, port: int | None) -> bool:
        return True


ANYWHERE: Reach = _Anywhere()

_REACH = [ANYWHERE]


def limit(reach: Reach) -> None:
    """Limit this process. Workers call it before they read anything; other processes are not limited."""
    _REACH[0] = reach


def current() -> Reach:
    """The limit of this process."""
    return _REACH[0]
