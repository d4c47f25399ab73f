"""Frame of the resident services: start-up, client of the broker, metrics endpoint and report to the broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import redis
from redis.exceptions import RedisError

import embq
from embq.app.cli.authorization import authorized_client
from embq.core.broker.client import connect
from embq.core.errors import UnwellError
from embq.core.queue.heartbeats import Service
from embq.core.queue.reporting import Reporter, this_service
from embq.core.service.endpoint import Endpoint
from embq.core.service.health import STANDS_S, Health
from embq.core.service.log import Events, configure
from embq.core.service.metrics import Collector, MetricSamples, Role
from embq.core.service.stopping import StopFlag
from embq.core.settings import Settings
from embq.core.wire import skip_counts

FRESH_S = 1.0
"""A text of metrics is answered again for this long."""
PATIENCE_S = 5.0
"""Longest wait for a read that another request has begun."""


class Exposition:
    """The text of `/metrics`.

    Attributes:
        collectors: called for it.

    Args:
        clock: monotonic seconds.
        patience_s: longest wait for a read that another request has begun.
    """

    def __init__(
        self, role: Role, *, clock: Callable[[], float] = time.monotonic, patience_s: float = PATIENCE_S
    ) -> None:
        self.collectors: tuple[Collector, ...] = ()
        self._role: Role = role
        self._clock = clock
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._text = b""
        self._read_at = float("-inf")

    def text(self) -> bytes:
        """The metrics, read at most once in `FRESH_S`.

        Raises UnwellError while an earlier read hangs: a folder whose storage is gone may never answer.
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
        samples = MetricSamples(self._role)
        samples.put("embq_build_info", 1, self._role, embq.__version__)
        for what, count in skip_counts().items():
            samples.put("embq_malformed_total", count, what)
        for collect in self.collectors:
            with suppress(RedisError):  # metrics of the broker are left out while it is unreachable
                collect(samples)
        return samples.text()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentService:
    """A producer, worker or writer that has started.

    Attributes:
        only: the one run that it serves; "" for all.
        stopped: true once a signal has asked it to stop.
        client: of the broker; it waits for one that is away.
        health: what `/healthz` answers. The service beats it from its loop.
    """

    settings: Settings
    role: Role
    only: str
    stopped: StopFlag
    client: redis.Redis
    health: Health
    exposition: Exposition
    endpoint: Endpoint | None

    @contextmanager
    def reported(
        self, *collectors: Collector, refresh: Callable[[Service], Service] = lambda service: service
    ) -> Iterator[None]:
        """Answer metrics, and report this process to the broker by a client of its own, while the block runs.

        Args:
            collectors: called for `/metrics`.
            refresh: see `embq.core.queue.reporting.Reporter`.
        """
        address = ""
        if self.endpoint is not None:
            address = str(self.endpoint.address)
            self.health.listen_to(self.client)
            self.exposition.collectors = collectors

        def client(give_up: Callable[[], bool]) -> redis.Redis:
            return connect(self.settings.broker_url, password=self.settings.broker_password, give_up=give_up)

        this = this_service(self.role, version=embq.__version__, run=self.only, metrics=address)
        with Reporter(client, this, refresh=refresh):
            yield


@contextmanager
def resident_service(
    settings: Settings, role: Role, *, only: str = "", stands_s: float = STANDS_S
) -> Iterator[ResidentService]:
    """Start a resident service, with an endpoint for metrics and health if the settings name an address.

    Raises BrokerError if no broker answers at first, after its first answer every outage is waited out; ConfigError
    if the broker or the address cannot be used; TryLaterError if the port is taken.

    Args:
        only: the one run that it serves; "" for all.
        stands_s: its loop counts as hanging when it has not moved for so long.
    """
    configure()
    stopped = StopFlag()
    stopped.install()
    health, exposition = Health(stands_s=stands_s), Exposition(role)
    endpoint: Endpoint | None = None
    if settings.metrics is not None:
        endpoint = Endpoint(
            settings.metrics,
            exposition=exposition.text,
            complaint=health.complaint,
            allow_hosts=settings.allow_hosts,
        )
        Events(role).info("metrics_served", url=endpoint.address.url("/metrics"))
        endpoint.start()
    try:
        yield ResidentService(
            settings=settings,
            role=role,
            only=only,
            stopped=stopped,
            client=authorized_client(settings, role, patient=True, give_up=stopped),
            health=health,
            exposition=exposition,
            endpoint=endpoint,
        )
    finally:
        health.stop()
        if endpoint is not None:
            endpoint.close()
