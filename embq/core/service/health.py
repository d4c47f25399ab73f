"""Health of a service: its loop advances, the broker answers, and the service reports no problem."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from embq.core.redaction import masked

STANDS_S = 30.0
"""Time without a beat after which a loop hangs; a round of one takes less than a second."""
PING_S = 1.0
SILENT_S = 5.0
"""Time without an answer after which the broker is unreachable: the time-out of one answer (see `connect`)."""


def single_try_client(client: redis.Redis, *, answer_s: float) -> redis.Redis:
    """Another client for the same server, with one retry and a short time-out.

    For checks that must notice at once that the broker is unreachable.
    """
    pool = client.connection_pool
    options = {
        **pool.connection_kwargs,
        # Once more, because the first try may meet a connection that died long ago.
        "retry": Retry(NoBackoff(), 1),
        "socket_timeout": answer_s,
        "socket_connect_timeout": answer_s,
    }
    return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=pool.connection_class, **options))


class Health:
    """State behind `/healthz` of a service. Thread-safe.

    Args:
        stands_s: time without a beat after which the loop hangs.
        clock: monotonic seconds.
    """

    def __init__(self, *, stands_s: float = STANDS_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._stands_s = stands_s
        self._clock = clock
        self._advanced_at: float | None = None
        self._answered_at = clock()
        self._refused = ""
        self._pinging: threading.Thread | None = None
        self._stopped = threading.Event()
        self.also: Callable[[], str] = lambda: ""
        """A problem that the service itself reports, or ""."""

    def beat(self) -> None:
        """Note that the loop of the service advances."""
        self._advanced_at = self._clock()

    def listen_to(self, client: redis.Redis) -> None:
        """Start a thread that pings the broker of `client` every second."""
        self._answered_at = self._clock()
        pinger = single_try_client(client, answer_s=SILENT_S / 2)
        self._pinging = threading.Thread(target=self._ping, args=(pinger,), name="health", daemon=True)
        self._pinging.start()

    def stop(self) -> None:
        """Stop the pings, without waiting for the broker."""
        self._stopped.set()

    def complaint(self) -> str:
        """The problem in one line; "" for a healthy service."""
        now = self._clock()
        if self._pinging is not None and now - self._answered_at > SILENT_S:
            why = f" ({self._refused})" if self._refused else ""
            return f"the broker has not answered for {now - self._answered_at:.0f} s{why}"
        if self._advanced_at is None:
            return "starting"
        if now - self._advanced_at > self._stands_s:
            return f"the loop has stood still for {now - self._advanced_at:.0f} s"
        return self.also()

    def _ping(self, client: redis.Redis) -> None:
        while not self._stopped.wait(PING_S):
            try:
                client.ping()
            except RedisError as error:
                self._refused = masked(" ".join(str(error).split()))
            else:
                self._answered_at, self._refused = self._clock(), ""
        client.close()
