"""Which addresses belong to networks that are somebody's own, where strangers do not read along."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

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
    """The addresses of `host` that lie outside one's own networks; none where it has none, or is not known at all."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found)
    return [address for address in addresses if not _own(ip_address(address))]


def _own(address: IPv4Address | IPv6Address) -> bool:
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in network for network in OWN)
