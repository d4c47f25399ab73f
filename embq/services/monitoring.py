"""What a resident service tells of itself over HTTP, where that is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import redis
from redis.exceptions import RedisError

import embq
from core.errors import UnwellError
from core.service.health import STANDS_S, Health
from core.service.log import Events
from core.service.metrics import Meter, Readings, Role
from core.settings import Settings
from core.wire import skip_counts

FRESH_S = 1.0
"""Whoever asks more often is told the same again."""
PATIENCE_S = 5.0
"""Whoever asks while another's answer is read waits so long for it."""


class ServiceMonitor:
    """One service, and what is told of it.

    Attributes:
        health: what `/healthz` says. The service beats it from its loop.
        told: whether anybody can ask; where not, nothing is read and nothing listened to.
        address: HOST:PORT where; "" for nowhere.

    Args:
        clock: monotonic seconds.
        patience_s: how long one who asks waits while another's answer is read.
    """

    def __init__(
        self,
        role: Role,
        health: Health,
        *,
        told: bool,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.health = health
        self.told = told
        self.address = ""
        self._role: Role = role
        self._meters: list[Meter] = []
        self._clock = clock
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._text = b""
        self._read_at = float("-inf")

    def watch(self, client: redis.Redis, *meters: Meter) -> None:
        """From now on note whether the broker of `client` answers, and read `meters` when somebody asks."""
        if self.told:
            self.health.listen_to(client)
            self._meters = list(meters)

    def exposition(self) -> bytes:
        """What `/metrics` says, read at most once in FRESH_S.

        Raises UnwellError where a read has hung: a folder whose storage is gone may never answer.
        """
        if not self._lock.acquire(timeout=self._patience_s):
            raise UnwellError("what was asked for before is still being read")
        try:
            if self._clock() - self._read_at >= FRESH_S:
                self._text, self._read_at = self._read(), self._clock()
            return self._text
        finally:
            self._lock.release()

    def _read(self) -> bytes:
        readings = Readings(self._role)
        readings.put("embq_build_info", 1, self._role, embq.__version__)
        for what, count in skip_counts().items():
            readings.put("embq_malformed_total", count, what)
        for meter in self._meters:
            with suppress(RedisError):  # what the broker knows is not told while it is away
                meter(readings)
        return readings.text()


@contextmanager
def monitored(settings: Settings, role: Role, *, stands_s: float = STANDS_S) -> Iterator[ServiceMonitor]:
    """A service that answers `/metrics` and `/healthz` where its settings name an address.

    Raises TryLaterError where the port is taken, and ConfigError where the address cannot be used.

    Args:
        stands_s: its loop stands still when it has not moved for so long.
    """
    health = Health(stands_s=stands_s)
    service = ServiceMonitor(role, health, told=settings.metrics is not None)
    if settings.metrics is None:
        yield service
        return
    from core.service.endpoint import Endpoint

    endpoint = Endpoint(settings.metrics, exposition=service.exposition, complaint=health.complaint)
    service.address = str(endpoint.address)
    Events(role).info("metrics_served", url=endpoint.address.url("/metrics"))
    endpoint.start()
    try:
        yield service
    finally:
        health.stop()
        endpoint.close()
