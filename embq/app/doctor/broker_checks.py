"""Checks of the broker: reachability, configuration, clock, memory; transport, users and password files."""

from __future__ import annotations

import importlib.metadata
import shlex
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry
from rq.utils import as_text

from embq.app.doctor.check import Check, guarded
from embq.core.broker.address import BrokerAddress
from embq.core.broker.client import connect, problems, reach, user_of
from embq.core.broker.embedded import EmbeddedServer, server_binary
from embq.core.broker.tls import shake_hands
from embq.core.broker.users import ROLES, role_of
from embq.core.errors import ConfigError
from embq.core.networks import is_loopback, public_addresses
from embq.core.queue.reporting import CLOCK_NEXT, CLOCK_OFFSET_S, clock_ahead_s
from embq.core.redaction import masked
from embq.core.service.progress_line import duration, size_text
from embq.core.settings import Settings, broker_ca, password_file

MEMORY_HIGH = 0.8
"""Share of the memory limit above which workers may soon have to wait."""
RENEW_DAYS = 30
"""`embq broker init` renews a certificate this many days before its end."""

DANGEROUS = {"CONFIG": "CONFIG GET maxmemory", "MODULE": "MODULE LIST", "DEBUG": "DEBUG HELP"}
"""Command that no service needs -> harmless form that shows whether a user may run it."""


def broker(settings: Settings) -> Iterator[Check]:
    """The configured broker, or else the embedded server of `embq run`."""
    if settings.broker_url:
        yield from guarded("broker", _examine(settings.broker_url, settings.broker_password))
        return
    try:
        server_binary()
    except ConfigError as error:
        yield Check.passed("broker", error.message, error.next_step)
        return
    yield from guarded("broker", _examine_embedded())


def _examine_embedded() -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="embq-doctor-") as folder:
        server = EmbeddedServer(Path(folder) / "b", maxmemory_mb=64)
        try:
            url = server.start()
            with connect(url) as client:
                first, *other_checks = _essentials(client, url)
        finally:
            server.stop()
    yield replace(first, detail=f"none is configured; the embedded server starts: {first.detail}")
    yield from other_checks


def _examine(url: str, password: str) -> Iterator[Check]:
    with connect(url, password=password) as client:
        yield from [*_essentials(client, url), _memory(client), *_clients(client), *_security(client, url)]


def _essentials(client: redis.Redis, url: str) -> list[Check]:
    server = reach(client, url)
    checks = [Check("broker", "fail", problem, fix) for problem, fix in problems(client, server)]
    if not checks:
        place = "" if url.startswith("unix:") else f" at {masked(url)}"
        checks.append(Check.passed("broker", f"{server}{place}, up {server.uptime_s:,} s"))
    return [*checks, _queue(client), _clock(client)]


def _queue(client: redis.Redis) -> Check:
    """RQ's queue with embq's job class; only read."""
    from embq.core.queue.hints import hint_queue

    count, rq = hint_queue(client, "doctor").count, importlib.metadata.version("rq")
    return Check.passed("queue", f"RQ {rq} reads it, {count} hints wait in a queue of no run")


def _clock(client: redis.Redis) -> Check:
    ahead_s = clock_ahead_s(client)
    if abs(ahead_s) <= CLOCK_OFFSET_S:
        return Check.passed("clock", f"{ahead_s:+.3f} s from the broker's")
    side = "ahead of" if ahead_s > 0 else "behind"
    return Check.passed("clock", f"this machine's is {duration(abs(ahead_s))} {side} the broker's", CLOCK_NEXT)


def _memory(client: redis.Redis) -> Check:
    info = client.info("memory")
    used, limit = int(info["used_memory"]), int(info.get("maxmemory", 0))
    bound = limit or int(info.get("total_system_memory", 0))
    whose = "its limit" if limit else "its machine, for it has no limit"
    fix = "raise maxmemory; results wait in it until the writer has taken them, so look whether one is at work"
    detail = f"{size_text(used)} in use, of {size_text(bound)} of {whose}"
    return Check.passed("memory", detail, fix if bound and used > MEMORY_HIGH * bound else "")


def _clients(client: redis.Redis) -> list[Check]:
    """A warning where clients may take all memory. Only users that may read the server's settings see it."""
    if role_of(user_of(client)) not in ("", "admin"):  # which the server would log as an attempt
        return []
    try:
        limit = client.config_get("maxmemory-clients")
    except ResponseError:
        return []
    if not limit or limit.get("maxmemory-clients") != "0":  # servers before Redis 7 have no such limit
        return []
    detail = "unread replies of one client may take all of the broker's memory"
    fix = "set maxmemory-clients and client-output-buffer-limit as deploy/valkey.conf does"
    return [Check.passed("clients", detail, fix)]


# --- security ---


def _security(client: redis.Redis, url: str) -> Iterator[Check]:
    """Transport, user, permissions and password file; for a unix socket only the last."""
    address = BrokerAddress.of(url)
    if address.host:
        yield from _transport(address)
        yield from _user(client, address, url)
    yield from _secrets()


def _transport(address: BrokerAddress) -> Iterator[Check]:
    if address.checked:
        yield _certificate(address)
    elif address.scheme == "rediss":
        yield Check.passed("tls", "certificates are checked as the URL's own ssl_ parameters say")
    elif is_loopback(address.host):
        yield Check.passed("tls", "none, and none is needed on this machine")
    else:
        detail = f"none: anyone who listens in on the network of {address.host} reads everything"
        fix = "use rediss:// with the certificate that `embq broker init` makes"
        yield Check.passed("tls", detail, fix if public_addresses(address.host) else "")


def _certificate(address: BrokerAddress) -> Check:
    try:
        shown = shake_hands(address.host, address.port, broker_ca())
    except OSError as error:
        return Check.passed("tls", f"no second handshake could be made: {error}", "look at the server's log")
    days = int((shown.ends - time.time()) // 86400)
    detail = f"{shown.version}; the certificate for {', '.join(shown.names)} ends in {days:,} days"
    fix = "run `embq broker init` where its secrets are, which renews it, and restart the broker"
    return Check.passed("tls", detail, fix if days < RENEW_DAYS else "")


def _user(client: redis.Redis, address: BrokerAddress, url: str) -> Iterator[Check]:
    try:
        user = as_text(client.acl_whoami())
    except ResponseError:
        user = address.user or "default"
    role = role_of(user)
    if _answers_anybody(url):
        fix = "give it users and passwords: `embq broker init`"
        yield Check.passed("user", "everybody who reaches the broker may do everything: it asks for no password", fix)
    else:
        yield Check.passed("user", f"{user}: {ROLES[role].purpose}" if role else f"{user}, with a password")
    if role and not ROLES[role].everything:
        yield _rights(client, user, role)


def _rights(client: redis.Redis, user: str, role: str) -> Check:
    allowed = [name for name, command in DANGEROUS.items() if _may(client, command)]
    # FLUSHALL has no harmless form. A user without ACL DRYRUN is not one with all permissions.
    if _may(client, f"ACL DRYRUN {user} FLUSHALL"):
        allowed.append("FLUSHALL")
    if not allowed:
        return Check.passed("rights", f"{user} is refused {', '.join(DANGEROUS)}")
    fix = f"`embq broker init` writes the rights that a {role} needs; then `embq broker reload`"
    return Check.passed("rights", f"{user} may use {', '.join(allowed)}, which no {role} needs", fix)


def _may(client: redis.Redis, command: str) -> bool:
    try:
        answer = client.execute_command(*command.split())  # type: ignore[no-untyped-call]
    except ResponseError:  # it is not permitted, or switched off, or the server does not know it
        return False
    return "no permissions" not in repr(answer)


def _answers_anybody(url: str) -> bool:
    """True if the server accepts commands without a password."""
    parts = urlsplit(url)
    query = "&".join(part for part in parts.query.split("&") if not part.startswith(("username=", "password=")))
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=query))
    with connect(bare) as anonymous:
        anonymous.set_retry(Retry(NoBackoff(), 0))
        try:
            return bool(anonymous.dbsize() >= 0)
        except RedisError:
            return False


def _secrets() -> Iterator[Check]:
    if not (path := password_file()):
        return
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if mode & 0o077:
        detail = f"others on this machine may read {path} (mode {mode:o})"
        yield Check.passed("secrets", detail, f"chmod 600 {shlex.quote(str(path))}")
    else:
        yield Check.passed("secrets", f"{path} is ours alone")
