"""Connecting to a Redis or Valkey server, and checking that it will not lose or evict work."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)
from redis.retry import Retry

from core.broker_address import BrokerAddress
from core.errors import BrokerError, ConfigError, EmbqError, OutputError
from core.masking import masked

MIN_REDIS = (6, 2)
"""First Redis with BLMOVE, XAUTOCLAIM and ACL channel rules; without BLMOVE, RQ silently loses jobs."""

MIN_VALKEY = (7, 2)
"""First Valkey release."""

WAIT_FOR_EVER = -1
FEW_TRIES = 5
"""As often does a client try again that does not wait for ever: about two seconds."""

STOPPING_S = 3.0
"""So long does a service that is to stop wait for a broker that is away; one that restarts is back by then."""

ANSWER_S = 5.0
"""A connection that gives no answer for this long is taken for dead, and the command is sent again on a new one. Much
less than a lease, so that a beat that a dead connection swallowed costs no unit."""

RESULT_S = 30.0
"""The same where commands carry results, because the time that it takes to send one counts."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Which server answered.

    Attributes:
        name: "Redis" or "Valkey".
        version: its own (major, minor, patch).
        uptime_s: by its own clock, which somebody may set.
        incarnation: another one after each start.
    """

    name: str
    version: tuple[int, ...]
    uptime_s: int
    incarnation: str = ""

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"


def mask(url: str) -> str:
    """The URL without its password, for messages and logs."""
    return masked(url)


class _Patience(ExponentialWithJitterBackoff):
    """Pauses of at most a second between tries; once a stop was asked for, tries for a few seconds only.

    Args:
        give_up: whether a stop was asked for.
        answer_s: how long one try may take.
    """

    def __init__(self, give_up: Callable[[], bool], answer_s: float) -> None:
        super().__init__(base=0.05, cap=1.0)
        self._give_up = give_up
        self._answer_s = answer_s
        self._away_since = self._failed = float("-inf")

    def __deepcopy__(self, memo: dict[int, Any]) -> _Patience:
        # redis-py copies it for every connection; what is asked must stay the one that was given.
        return _Patience(self._give_up, self._answer_s)

    def compute(self, failures: int) -> float:
        """The pause before the next try; BrokerError instead of it where nobody wants to wait any longer."""
        now = time.monotonic()
        # `failures` counts from each new connection on, which a server that stands still accepts again and again.
        if now - self._failed > self._answer_s + STOPPING_S:
            self._away_since = now
        self._failed = now
        if self._give_up() and now - self._away_since > STOPPING_S:
            raise BrokerError(
                "the broker was away when the stop was asked for",
                next_step="nothing that was committed is lost; what was in hand is done again once the broker is back",
            )
        return super().compute(failures)


def connect(
    url: str,
    *,
    password: str = "",
    patient: bool = False,
    give_up: Callable[[], bool] = lambda: False,
    answer_s: float = ANSWER_S,
) -> redis.Redis:
    """A client for `url`; nothing is sent yet.

    rediss:// checks the server's name and its certificate, against EMBQ_BROKER_CA or the system's CAs. redis:// is
    for one's own networks: to an address of others it is refused, unless EMBQ_PLAIN_BROKER says yes.

    Args:
        url: redis://, rediss:// or unix://.
        password: used where the URL has none.
        patient: True for services: wait as long as it takes while the server is away, loading, full or a replica.
            False for commands that a person waits for: give up after about two seconds.
        give_up: asked before each further try, in the thread that waits. Once it says yes, a patient client waits for
            a few seconds only, and raises BrokerError.
        answer_s: how long to wait for one answer, the sending of the command included.

    Raises:
        ConfigError: the URL is not one that can be used.
    """
    if urlsplit(url).scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"broker URL {mask(url)!r} must start with redis://, rediss:// or unix://",
            next_step="for example --broker redis://localhost:6379",
        )
    # Commands are re-sent when a reply is lost, so every write of embq is idempotent or checked by token.
    retry = Retry(_Patience(give_up, answer_s), WAIT_FOR_EVER if patient else FEW_TRIES)
    errors: list[type[Exception]] = [ConnectionError, TimeoutError, BusyLoadingError]
    if patient:
        # Read-only: a failover is under way, and what we are connected to is not the server any more.
        errors += [OutOfMemoryError, ReadOnlyError]
    try:
        address = BrokerAddress.of(url)
        return redis.Redis.from_url(
            url,
            retry=retry,
            retry_on_error=errors,
            socket_timeout=answer_s,
            socket_connect_timeout=ANSWER_S,
            **address.options(),
            **({"password": password} if password and not urlsplit(url).password else {}),
        )
    except ValueError as error:
        raise ConfigError(f"broker URL {mask(url)!r} cannot be used: {error}") from error


def reach(client: redis.Redis, url: str) -> ServerInfo:
    """Ask the server who it is; BrokerError or ConfigError in one line where it cannot be used at all.

    Args:
        client: asks.
        url: its own, so that an error can say what is wrong there; "" where it has had answers before.
    """
    address = BrokerAddress.of(url)
    address.look()
    try:
        info = client.info("server")
    except AuthenticationError as error:
        wrong = "invalid" in str(error) or "WRONGPASS" in str(error)
        user = f"the user {address.user!r}" if address.user else "the default user"
        raise ConfigError(
            f"the broker at {mask(url)} does not take this password for {user}, or does not let that user in"
            if wrong
            else f"the broker at {mask(url)} wants a password",
            next_step="put the user into the URL and the password into EMBQ_BROKER_PASSWORD_FILE; `embq broker init` "
            "makes a folder with a password for each user",
        ) from error
    except NoPermissionError as error:
        raise ConfigError(
            f"the broker at {mask(url)} refused us: {error}",
            next_step="put the user into the URL and the password into EMBQ_BROKER_PASSWORD_FILE",
        ) from error
    except RedisError as error:
        address.look_again()
        raise BrokerError(
            f"no broker answers at {mask(url)} ({_brief(error)})",
            next_step="start it, or correct --broker / EMBQ_BROKER_URL; `embq doctor` checks it",
        ) from error
    name = "Valkey" if "valkey_version" in info else "Redis"
    text = str(info.get("valkey_version") or info["redis_version"])
    version = tuple(int(part) for part in re.findall(r"\d+", text)[:3])
    return ServerInfo(name, version, int(info.get("uptime_in_seconds", 0)), str(info.get("run_id", "")))


def now_ms(client: redis.Redis) -> int:
    """Milliseconds by the broker's clock, the only one that all clients share."""
    seconds, micros = client.time()
    return int(seconds * 1000 + micros // 1000)


def problems(client: redis.Redis, server: ServerInfo) -> list[tuple[str, str]]:
    """What is wrong with the server's version, persistence and eviction: (what, how to mend it), worst first."""
    found: list[tuple[str, str]] = []
    floor = MIN_VALKEY if server.name == "Valkey" else MIN_REDIS
    if server.version < floor:
        needed = ".".join(map(str, floor))
        found.append((f"{server} is too old", f"use {server.name} {needed} or newer"))
    policy = client.info("memory").get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found.append(
            (
                f"maxmemory-policy is {policy}, so the broker may throw work away",
                "run CONFIG SET maxmemory-policy noeviction, and set it in the server's configuration file",
            )
        )
    if not client.info("persistence").get("aof_enabled", 0):
        found.append(
            (
                "the append-only file is off, so a restart of the broker forgets the queue",
                "run CONFIG SET appendonly yes, and set it in the server's configuration file",
            )
        )
    return found


def check(client: redis.Redis, url: str) -> ServerInfo:
    """`reach`, then refuse a server that would lose or evict work. One line says what is wrong and how to mend it."""
    server = reach(client, url)
    if found := problems(client, server):
        what, mend = found[0]
        raise ConfigError(f"the broker at {mask(url)} cannot be used: {what}", next_step=mend, code="broker")
    return server


def refusal(error: RedisError) -> EmbqError:
    """What it means for the user that the broker refused a command, or was away for longer than a client waits."""
    if str(error).startswith("MISCONF") or " MISCONF " in str(error):
        return OutputError(
            f"the broker's disk is full or broken, so it takes nothing more ({_brief(error)})",
            next_step="make room (`embq run` keeps its broker in the output folder), then run `embq resume` on the "
            "output folder; committed rows are safe",
            code="no_space",
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
