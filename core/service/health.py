"""Whether a service is well: its loop moves, the broker answers, and it has nothing to complain of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from core.redaction import masked

STANDS_S = 30.0
"""A loop that has not moved for so long stands still; a tick of one takes less than a second."""
PING_S = 1.0
SILENT_S = 5.0
"""A broker that has not answered for so long is away. As long as a client waits for one answer (see `connect`)."""


def single_try_client(client: redis.Redis, *, answer_s: float) -> redis.Redis:
    """A client of its own for the same server, that waits for one answer and no longer.

    For who must tell at once that the broker is away; a patient client would wait with it.
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
    """What `/healthz` of a service says. Safe to ask from any thread.

    Args:
        stands_s: the loop stands still when it has not moved for so long.
        clock: monotonic seconds.
    """

    def __init__(self, *, stands_s: float = STANDS_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._stands_s = stands_s
        self._clock = clock
        self._moved: float | None = None
        self._heard = clock()
        self._refused = ""
        self._pinging: threading.Thread | None = None
        self._stopped = threading.Event()
        self.also: Callable[[], str] = lambda: ""
        """A complaint of the service itself, or ""."""

    def beat(self) -> None:
        """The loop of the service moves."""
        self._moved = self._clock()

    def listen_to(self, client: redis.Redis) -> None:
        """Note from now on, every second in a thread of its own, whether the broker of `client` answers."""
        self._heard = self._clock()
        pinger = single_try_client(client, answer_s=SILENT_S / 2)
        self._pinging = threading.Thread(target=self._ping, args=(pinger,), name="health", daemon=True)
        self._pinging.start()

    def stop(self) -> None:
        """Note no more; does not wait for a broker that is away."""
        self._stopped.set()

    def complaint(self) -> str:
        """What is wrong, in one line; "" where nothing is."""
        now = self._clock()
        if self._pinging is not None and now - self._heard > SILENT_S:
            why = f" ({self._refused})" if self._refused else ""
            return f"the broker has not answered for {now - self._heard:.0f} s{why}"
        if self._moved is None:
            return "starting"
        if now - self._moved > self._stands_s:
            return f"the loop has stood still for {now - self._moved:.0f} s"
        return self.also()

    def _ping(self, client: redis.Redis) -> None:
        while not self._stopped.wait(PING_S):
            try:
                client.ping()
            except RedisError as error:
                self._refused = masked(" ".join(str(error).split()))
            else:
                self._heard, self._refused = self._clock(), ""
        client.close()
