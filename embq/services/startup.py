"""How resident services begin: at a broker that they may use, and known there to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from core.settings import Settings
from embq.cli.options import required_url

if TYPE_CHECKING:
    import redis

    from core.queue.heartbeats import Service
    from core.queue.reporting import Reporter


def service_client(settings: Settings, verb: str, *, give_up: Callable[[], bool], instead: str = "") -> redis.Redis:
    """A patient client for a resident service, after checking that the broker can be used, and by our user.

    Raises BrokerError where no broker answers at first; after its first answer every outage is waited out.

    Args:
        verb: the service.
        give_up: whether it is to stop; then it does not wait for a broker that is away.
        instead: what else a user can do whom the broker does not let do this.
    """
    from core.broker.client import check, connect, reach
    from embq.cli.authorization import require

    url = required_url(settings)
    with connect(url, password=settings.broker_password) as first:
        reach(first, url)
    client = connect(url, password=settings.broker_password, patient=True, give_up=give_up)
    check(client, url)
    require(client, verb, instead=instead)
    return client


def reporter(
    settings: Settings,
    role: str,
    *,
    only: str,
    metrics: str = "",
    look: Callable[[Service], Service] = lambda service: service,
) -> Reporter:
    """Reports this process to the broker as a service, by a client of its own.

    Args:
        role: see `core.queue.heartbeats.ROLES`.
        only: the one run that it serves; "" for all.
        metrics: HOST:PORT of its metrics; "" for none.
        look: see `core.queue.reporting.Reporter`.
    """
    import embq
    from core.broker.client import connect
    from core.queue.reporting import Reporter, this_service

    def client(give_up: Callable[[], bool]) -> redis.Redis:
        return connect(settings.broker_url, password=settings.broker_password, give_up=give_up)

    return Reporter(client, this_service(role, version=embq.__version__, run=only, metrics=metrics), look=look)
