"""Clients of the broker (Redis or Valkey), the check that it loses and evicts no work, and its refusals as errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from embq.core.broker.address import BrokerAddress
from embq.core.broker.bounded import CONNECTIONS, MOST_ANSWER_BYTES
from embq.core.broker.retry_policy import FEW_TRIES, WAIT_FOR_EVER, Backoff, BrokerRetry, NotAllowedError
from embq.core.errors import BrokerError, ConfigError, EmbqError, OutputError
from embq.core.redaction import masked

MIN_REDIS = (6, 2)
"""First Redis with BLMOVE, XAUTOCLAIM and ACL channel rules; without BLMOVE, RQ silently loses jobs."""

MIN_VALKEY = (7, 2)
"""First Valkey release."""

ANSWER_S = 5.0
"""Time-out of one answer, after which the command is sent again on a new connection. Much less than a lease, so that a
heartbeat lost with a dead connection costs no unit."""

RESULT_S = 30.0
"""Time-out where commands carry results: it includes the time to send them."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Identity of a server.

    Attributes:
        name: "Redis" or "Valkey".
        version: (major, minor, patch).
        uptime_s: by its own clock, which may be set.
        incarnation: changes with each start.
    """

    name: str
    version: tuple[int, ...]
    uptime_s: int
    incarnation: str = ""

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"


def connect(
    url: str,
    *,
    password: str = "",
    patient: bool = False,
    give_up: Callable[[], bool] = lambda: False,
    answer_s: float = ANSWER_S,
    answer_bytes: int = MOST_ANSWER_BYTES,
) -> redis.Redis:
    """A client for `url`; nothing is sent yet.

    rediss:// checks the server's name and its certificate, against EMBQ_BROKER_CA or the system's CAs. redis:// is
    for private networks: a public address is refused, unless EMBQ_PLAIN_BROKER is yes.

    Args:
        url: redis://, rediss:// or unix://.
        password: used where the URL has none.
        patient: True for services: retry without limit while the server is unreachable, loading, full or a replica.
            False for commands that a person waits for: give up after about two seconds.
        give_up: whether a stop was requested; called before each retry, in the thread that waits. Once it is True, a
            patient client retries for a few seconds only, and then raises BrokerError.
        answer_s: time-out of one answer, the sending of the command included.
        answer_bytes: most bytes of values that are kept of an answer, see `embq.core.broker.bounded`.

    Raises:
        ConfigError: the URL cannot be used.
    """
    if urlsplit(url).scheme not in CONNECTIONS:
        raise ConfigError(
            f"broker URL {masked(url)!r} must start with redis://, rediss:// or unix://",
            next_step="for example --broker redis://localhost:6379",
        )
    errors: list[type[Exception]] = [ConnectionError, TimeoutError, BusyLoadingError]
    if patient:
        # Read-only: a failover is under way, and what we are connected to is not the server any more.
        errors += [OutOfMemoryError, ReadOnlyError]
    try:
        address = BrokerAddress.of(url)
        # Commands are re-sent when a reply is lost, so every write of embq is idempotent or checked by token.
        retry = BrokerRetry(Backoff(give_up, answer_s), WAIT_FOR_EVER if patient else FEW_TRIES, address.user)
        return redis.Redis.from_url(
            url,
            retry=retry,
            retry_on_error=errors,
            socket_timeout=answer_s,
            socket_connect_timeout=ANSWER_S,
            answer_bytes=answer_bytes,
            **{"connection_class": CONNECTIONS[urlsplit(url).scheme], **address.options()},
            **({"password": password} if password and not urlsplit(url).password else {}),
        )
    except ValueError as error:
        raise ConfigError(f"broker URL {masked(url)!r} cannot be used: {error}") from error


def reach(client: redis.Redis, url: str) -> ServerInfo:
    """The identity of the server; BrokerError or ConfigError if it cannot be used at all.

    Args:
        url: of the client, for the diagnosis of a failure; "" if the client had answers before.
    """
    address = BrokerAddress.of(url)
    address.check_handshake()
    try:
        info = client.info("server")
    except AuthenticationError as error:
        wrong = "invalid" in str(error) or "WRONGPASS" in str(error)
        user = f"the user {address.user!r}" if address.user else "the default user"
        raise ConfigError(
            f"the broker at {masked(url)} does not take this password for {user}, or does not let that user in"
            if wrong
            else f"the broker at {masked(url)} wants a password",
            next_step="put the user into the URL and the password into EMBQ_BROKER_PASSWORD_FILE; `embq broker init` "
            "makes a folder with a password for each user",
        ) from error
    except NoPermissionError as error:
        raise ConfigError(
            f"the broker at {masked(url)} refused us: {error}",
            next_step="put the user into the URL and the password into EMBQ_BROKER_PASSWORD_FILE",
        ) from error
    except RedisError as error:
        address.check_plain()
        raise BrokerError(
            f"no broker answers at {masked(url)} ({_brief(error)})",
            next_step="start it, or correct --broker / EMBQ_BROKER_URL; `embq doctor` checks it",
        ) from error
    name = "Valkey" if "valkey_version" in info else "Redis"
    text = str(info.get("valkey_version") or info["redis_version"])
    version = tuple(int(part) for part in re.findall(r"\d+", text)[:3])
    return ServerInfo(name, version, int(info.get("uptime_in_seconds", 0)), str(info.get("run_id", "")))


def user_of(client: redis.Redis) -> str:
    """The broker's user of this connection; "" if the broker has no such command."""
    try:
        user = client.acl_whoami()
    except ResponseError:
        return ""
    return user.decode() if isinstance(user, bytes) else str(user)


def now_ms(client: redis.Redis) -> int:
    """Milliseconds by the broker's clock, which all clients share."""
    seconds, micros = client.time()
    return int(seconds * 1000 + micros // 1000)


def problems(client: redis.Redis, server: ServerInfo) -> list[tuple[str, str]]:
    """Problems of the server's version, persistence and eviction: (problem, next step), worst first."""
    issues: list[tuple[str, str]] = []
    floor = MIN_VALKEY if server.name == "Valkey" else MIN_REDIS
    if server.version < floor:
        needed = ".".join(map(str, floor))
        issues.append((f"{server} is too old", f"use {server.name} {needed} or newer"))
    return issues + losses(client)


def losses(client: redis.Redis) -> list[tuple[str, str]]:
    """Settings by which the server would lose work, which may change while it runs: (problem, next step)."""
    issues: list[tuple[str, str]] = []
    info = client.info()
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        issues.append(
            (
                f"maxmemory-policy is {policy}, so the broker may throw work away",
                "run CONFIG SET maxmemory-policy noeviction, and set it in the server's configuration file",
            )
        )
    if not info.get("aof_enabled", 0):
        issues.append(
            (
                "the append-only file is off, so a restart of the broker forgets the queue",
                "run CONFIG SET appendonly yes, and set it in the server's configuration file",
            )
        )
    return issues


def check(client: redis.Redis, url: str) -> ServerInfo:
    """`reach`, then ConfigError for a server that would lose or evict work."""
    server = reach(client, url)
    if issues := problems(client, server):
        problem, next_step = issues[0]
        raise ConfigError(f"the broker at {masked(url)} cannot be used: {problem}", next_step=next_step, code="broker")
    return server


def refusal(error: RedisError) -> EmbqError:
    """The EmbqError for an error of redis-py: a refused command, or a broker that does not answer."""
    if str(error).startswith("MISCONF") or " MISCONF " in str(error):
        return OutputError(
            f"the broker's disk is full or broken, so it takes nothing more ({_brief(error)})",
            next_step="make room (`embq run` keeps its broker in the output folder), then run `embq resume` on the "
            "output folder; committed rows are safe",
            code="no_space",
        )
    if isinstance(error, AuthenticationError):
        return ConfigError(
            f"the broker's user was removed or has a new password ({_brief(error)})",
            next_step="give this process the user's present password (EMBQ_BROKER_PASSWORD_FILE; `embq broker init "
            "--user` makes a removed user again), and start it again",
            code="broker",
        )
    if isinstance(error, NotAllowedError):
        return ConfigError(
            f"the broker does not let its user {error.user or 'default'} do this ({_brief(error)})",
            next_step="log in as a user that may (docs/how-to/deploy/broker-users.md), or bring the users' rights "
            "up to this version: `embq broker init`, then `embq broker reload`",
            code="role",
        )
    if isinstance(error, (ConnectionError, TimeoutError, BusyLoadingError)):
        return BrokerError(
            f"the broker does not answer any more ({_brief(error)})",
            next_step="start it again, then repeat the command; `embq doctor` checks it",
        )
    return ConfigError(
        f"the broker refused a command ({_brief(error)})",
        next_step="`embq doctor` checks its version, its settings and our rights",
        code="broker",
    )


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
