"""Security of the broker: transport, users and permissions, password files."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from embq.app.doctor.check import Check
from embq.core.broker.address import BrokerAddress
from embq.core.broker.client import connect
from embq.core.broker.tls import shake_hands
from embq.core.broker.users import ROLES, role_of
from embq.core.networks import is_loopback, public_addresses
from embq.core.settings import broker_ca, password_file

RENEW_DAYS = 30
"""`embq broker init` renews a certificate so many days before its end."""

DANGEROUS = {"CONFIG": "CONFIG GET maxmemory", "MODULE": "MODULE LIST", "DEBUG": "DEBUG HELP"}
"""Command that no service needs -> harmless form that shows whether a user may run it."""


def security(client: redis.Redis, url: str) -> Iterator[Check]:
    """Transport, user, permissions and password file; for a unix socket only the last."""
    address = BrokerAddress.of(url)
    if address.host:
        yield from _transport(address)
        yield from _user(client, address, url)
    yield from _secrets()


def _transport(address: BrokerAddress) -> Iterator[Check]:
    if not address.checked:
        if address.scheme == "rediss":
            detail = "certificates are checked as the URL's own ssl_ parameters say"
        elif is_loopback(address.host):
            detail = "none, and none is needed on this machine"
        else:
            detail = f"none: whoever listens in on the network of {address.host} reads everything"
            if public_addresses(address.host):
                yield Check("tls", "warn", detail, "use rediss:// with the certificate that `embq broker init` makes")
                return
        yield Check("tls", "ok", detail)
        return
    try:
        shown = shake_hands(address.host, address.port, broker_ca())
    except OSError as error:
        yield Check("tls", "warn", f"no second handshake could be made: {error}", "look at the server's log")
        return
    days = int((shown.ends - time.time()) // 86400)
    detail = f"{shown.version}; the certificate for {', '.join(shown.names)} ends in {days:,} days"
    if days < RENEW_DAYS:
        fix = "run `embq broker init` where its secrets are, which renews it, and restart the broker"
        yield Check("tls", "warn", detail, fix)
    else:
        yield Check("tls", "ok", detail)


def _user(client: redis.Redis, address: BrokerAddress, url: str) -> Iterator[Check]:
    try:
        user = _text(client.acl_whoami())
    except ResponseError:
        user = address.user or "default"
    role = role_of(user)
    if _answers_anybody(url):
        fix = "give it users and passwords: `embq broker init`"
        yield Check("user", "warn", "everybody who reaches the broker may do everything: it asks for no password", fix)
    else:
        yield Check("user", "ok", f"{user}: {ROLES[role].purpose}" if role else f"{user}, with a password")
    if role and not ROLES[role].everything:
        yield from _rights(client, user, role)


def _rights(client: redis.Redis, user: str, role: str) -> Iterator[Check]:
    allowed = [name for name, command in DANGEROUS.items() if _may(client, command)]
    # FLUSHALL has no harmless form. A user without ACL DRYRUN is not one with all permissions.
    if _may(client, f"ACL DRYRUN {user} FLUSHALL"):
        allowed.append("FLUSHALL")
    if allowed:
        fix = f"`embq broker init` writes the rights that a {role} needs; then `embq broker reload`"
        yield Check("rights", "warn", f"{user} may use {', '.join(allowed)}, which no {role} needs", fix)
    else:
        yield Check("rights", "ok", f"{user} is refused {', '.join(DANGEROUS)}")


def _may(client: redis.Redis, command: str) -> bool:
    try:
        answer = client.execute_command(*command.split())  # type: ignore[no-untyped-call]
    except ResponseError:  # it is not permitted, or switched off, or the server does not know it
        return False
    return "no permissions" not in _text(answer)


def _answers_anybody(url: str) -> bool:
    """True if the server accepts commands without a password."""
    parts = urlsplit(url)
    query = "&".join(part for part in parts.query.split("&") if not part.startswith(("username=", "password=")))
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=query))
    with connect(bare) as stranger:
        stranger.set_retry(Retry(NoBackoff(), 0))
        try:
            return bool(stranger.dbsize() >= 0)
        except RedisError:
            return False


def _secrets() -> Iterator[Check]:
    if not (path := password_file()):
        return
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if mode & 0o077:
        yield Check("secrets", "warn", f"others on this machine may read {path} (mode {mode:o})", f"chmod 600 {path}")
    else:
        yield Check("secrets", "ok", f"{path} is ours alone")


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
