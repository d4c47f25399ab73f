"""A thread in which a service reports itself to the broker, and notices who else does."""

from __future__ import annotations

import platform
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from os import getpid
from types import TracebackType

import redis
from redis.exceptions import BusyLoadingError, ConnectionError, ReadOnlyError, TimeoutError

from core.errors import EmbqError
from core.queue.keys import SERVICES, service_key
from core.queue.registry import forget_silent
from core.queue.scripts import Script, load_scripts
from core.queue.service_registry import REPORT_S, Service, foreign_runs, report_service, services, sign_off_service
from core.service.fleet_warnings import Notices
from core.service.log import Events

LOGS_AS = {"worker": "supervisor"}
"""Role -> the name that its log has, where it is another one."""
KEEPERS = ("producer", "writer")
"""Roles that keep the list of services; others may have no right to take names off it."""
STOP_S = 3.0
"""What the broker gets at the end to forget a service; it does so by itself as well."""


def this_service(role: str, *, version: str, run: str = "", metrics: str = "") -> Service:
    """A service in this process, under a name of its own.

    Args:
        version: of embq.
        run: the one run that it serves; "" for all.
        metrics: HOST:PORT of its metrics; "" for none.
    """
    host = socket.gethostname()
    return Service(
        name=f"{re.sub(r'[^A-Za-z0-9]+', '-', host)}.{role}.{secrets.token_hex(3)}",
        role=role,
        host=host,
        pid=getpid(),
        version=version,
        python=platform.python_version(),
        run=run,
        metrics=metrics,
    )


def clock_ahead_s(client: redis.Redis) -> float:
    """How far the clock of this machine is ahead of the broker's."""
    before = time.time()
    seconds, micros = client.time()
    return (before + time.time()) / 2 - float(seconds) - float(micros) / 1e6


class Reporter(threading.Thread):
    """Reports a service every `REPORT_S` seconds while the `with` block goes on, and has it forgotten afterwards.

    The service itself never waits for it: a broker that is away is asked again later.

    Args:
        connect: makes a client that nobody else uses, and that gives up soon; gets what says that it is to stop.
        service: what stays the same of it.
        look: what is different now of what it said before; asked before each report, in this thread.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[], bool]], redis.Redis],
        service: Service,
        *,
        look: Callable[[Service], Service] = lambda service: service,
        every_s: float = REPORT_S,
    ) -> None:
        super().__init__(name="reporter", daemon=True)
        self.service = service
        self._connect = connect
        self._look = look
        self._every_s = every_s
        self._over = threading.Event()
        self._scripts: dict[str, Script] = {}
        self._log = Events(LOGS_AS.get(service.role, service.role))
        self._notices = Notices(self._log)
        self._refused = ""

    def __enter__(self) -> Reporter:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self.join(STOP_S)

    def run(self) -> None:
        """Report until the block is over."""
        try:
            self._report_until_over()
        except Exception:  # noqa: BLE001 - thread boundary; the service goes on unseen
            self._log.bug("bug")

    def _report_until_over(self) -> None:
        with self._connect(self._over.is_set) as client:
            while True:
                self._patiently(client, self._report)
                if self._over.wait(self._every_s):
                    break
            if self.service.began_ms:
                self._patiently(client, lambda client: sign_off_service(client, self.service.name))

    def _patiently(self, client: redis.Redis, action: Callable[[redis.Redis], None]) -> None:
        """Do it, or leave it for the next time; a refusal that does not end by itself is told of once."""
        try:
            action(client)
        except (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError):
            return
        except (redis.exceptions.RedisError, EmbqError) as error:
            why = str(error)
            if why != self._refused and not self._over.is_set():
                self._refused = why
                self._log.warning("service_not_reported", why=why)

    def _report(self, client: redis.Redis) -> None:
        self._scripts = self._scripts or load_scripts(client)
        ahead_s = clock_ahead_s(client)
        began_ms = self.service.began_ms or round((time.time() - ahead_s) * 1000)
        self.service = self._look(replace(self.service, began_ms=began_ms, clock_s=round(ahead_s, 3) + 0.0))
        report_service(client, self.service, scripts=self._scripts)
        if self.service.role in KEEPERS:
            forget_silent(client, SERVICES, service_key)
        self._notices.clock(ahead_s)
        self._notices.others(self.service, services(client))
        self._notices.runs(foreign_runs(client))
