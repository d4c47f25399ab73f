"""Network addresses: private and public ones, hosts that an operator allows, and the address to listen on."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from embq.core.errors import ConfigError, TryLaterError

OWN = tuple(
    ip_network(network)
    for network in (
        "127.0.0.0/8",  # this machine
        "::1/128",
        "0.0.0.0/32",  # where one connects to it, this machine too
        "::/128",
        "10.0.0.0/8",  # private networks, RFC 1918; Docker's are among them
        "172.16.0.0/12",
        "192.168.0.0/16",
        "fc00::/7",  # RFC 4193
        "169.254.0.0/16",  # of one cable, RFC 3927 and RFC 4291
        "fe80::/10",
        "100.64.0.0/10",  # RFC 6598: shared by a carrier, and what Tailscale numbers its encrypted networks from
    )
)


def public_addresses(host: str) -> list[str]:
    """The addresses of `host` outside private networks; none for an unknown host."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in infos)
    return [address for address in addresses if not _own(ip_address(address))]


def _own(address: IPv4Address | IPv6Address) -> bool:
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in network for network in OWN)


SPECIAL = tuple(
    ip_network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by a carrier
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local, with the metadata service of most clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # multicast tunnels
        "192.88.99.0/24",  # 6to4 relays, withdrawn
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
        "::/96",  # unspecified, loopback, IPv4-compatible
        "::ffff:0:0:0/96",  # IPv4-translated
        "64:ff9b:1::/48",  # translation within one network
        "100::/64",  # discarded
        "100:0:0:1::/64",  # dummy
        "2001::/23",  # protocol assignments; Teredo, ORCHID and benchmarks are among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
        "5f00::/16",  # segment routing
        "fc00::/7",  # private
        "fe80::/10",  # link-local
        "fec0::/10",  # site-local, withdrawn
        "ff00::/8",  # multicast
    )
)
"""Addresses outside the public internet: IANA's registries for special purposes (RFC 6890), multicast, and those that
RFC 3879 and RFC 4291 withdrew. Written out, because `ipaddress` differs between versions of Python."""

_NAT64 = ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """True if an IP address belongs to the public internet; an IPv4 address in an IPv6 one (mapped, NAT64) decides."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        inside = ip.ipv4_mapped or (IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None)
        if inside is not None:
            return is_public(str(inside))
    return not any(ip in network for network in SPECIAL)


def is_loopback(host: str) -> bool:
    """True if a name or an address is of this machine only."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def numeric(host: str) -> str | None:
    """The address that a numeric host is, in any spelling such as 127.1; None for a name."""
    try:
        return str(ip_address(host.partition("%")[0]))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except (OSError, UnicodeError):
        return None


class Hosts:
    """Hosts and networks that an operator allows: `files.lan`, `10.0.0.5:8080`, `[fd00::5]`, `10.0.0.0/8`.

    An entry without a port allows every port. Raises ValueError with the first entry that is malformed.

    Attributes:
        entries: as they were given.
    """

    def __init__(self, entries: Sequence[str] = ()) -> None:
        self.entries = tuple(entries)
        self._named: set[tuple[str, int | None]] = set()
        self._networks = []
        for entry in entries:
            try:
                if "/" in entry:
                    self._networks.append(ip_network(entry, strict=False))
                elif (match := _HOST.fullmatch(entry)) is not None:
                    self._named.add((_canonical(match[1] or match[2] or entry), int(match[3]) if match[3] else None))
                else:
                    self._named.add((str(ip_address(entry)), None))
            except ValueError:
                raise ValueError(entry) from None

    def names(self, host: str, port: int | None) -> bool:
        """True if a name or an address is among them."""
        host = _canonical(host)
        if (host, None) in self._named or (host, port) in self._named:
            return True
        try:
            ip = ip_address(host)
        except ValueError:
            return False
        return any(ip in network for network in self._networks)


_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::(\d{1,5}))?")


def _canonical(host: str) -> str:
    """A name in lower case; an address in its usual spelling, an IPv4-mapped one as IPv4."""
    try:
        ip = ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower().rstrip(".")
    return str(getattr(ip, "ipv4_mapped", None) or ip)


class HostNames:
    """The names by which clients may address an HTTP server of this machine.

    The host name of a web page may resolve to this machine later (DNS rebinding), and its script then reads answers as
    those of its own origin. Its requests still carry that name in the Host header. So only names that cannot be a
    page's are accepted: IP addresses, localhost, `allowed`, and the machine's own names.

    Args:
        allowed: further names, such as those by which a proxy passes requests on.
        listens_on: host of the listening socket; on loopback the machine's own names are not accepted.
    """

    def __init__(self, allowed: Iterable[str] = (), *, listens_on: str = "") -> None:
        own = () if is_loopback(listens_on) else (socket.gethostname(), socket.getfqdn())
        self._names = {_canonical(name) for name in ("localhost", *own, *allowed, listens_on)}

    def accept(self, header: str) -> bool:
        """True for a Host header that names this machine, and for none: browsers always send one."""
        if not header or (match := _HOST.fullmatch(header)) is None:
            return not header
        name = match[1] or match[2]
        return name in self._names or numeric(name) is not None or _canonical(name) in self._names


LOOPBACK = "127.0.0.1"
_EVERYWHERE = {"0.0.0.0": LOOPBACK, "::": "::1"}
"""Wildcard address -> loopback address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address to listen on.

    Attributes:
        host: a name or an address of this machine, without brackets.
        port: 0 for a free one.
    """

    host: str = LOOPBACK
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address in `[HOST:]PORT`, an IPv6 host in brackets. Raises ValueError if it is none."""
        host, colon, port = text.strip().rpartition(":")
        if (colon and not host) or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is not [HOST:]PORT")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ValueError(f"{text!r}: an IPv6 host stands in brackets, as in [::1]:9101")
        return cls(host=host.strip("[]") or LOOPBACK, port=int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def url(self, path: str) -> str:
        """URL of `path` at this address, for clients on this machine."""
        host = _EVERYWHERE.get(self.host, self.host)
        return f"http://{Address(host=host, port=self.port)}{path}"


def bound(address: Address, *, taken: str, example: str) -> socket.socket:
    """A socket on an address. It does not listen yet.

    Args:
        taken: what to do if another program has the port.
        example: what to do if the address cannot be used.

    Raises:
        TryLaterError: `port_in_use`.
        ConfigError: `not_bindable`: the host is none of this machine's, or the port is not ours to take.
    """
    host, port = address.host, address.port
    try:
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(sockaddr)
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


def client_network(host: str) -> bytes:
    """The client behind an address: an IPv4 address, or the /64 network of an IPv6 one, all of which it may have."""
    try:
        ip = ip_address(host)
    except ValueError:
        return b""
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.packed[:8]
