"""Thread in which a service reports itself to the broker, and warns of other services that do not fit."""

from __future__ import annotations

import platform
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from os import getpid
from types import TracebackType

import redis
from redis.exceptions import BusyLoadingError, ConnectionError, ReadOnlyError, TimeoutError

from embq.core.broker.client import losses
from embq.core.errors import EmbqError
from embq.core.queue.heartbeats import (
    KEEPERS,
    REPORT_S,
    SERVICE_REPORTS,
    Heard,
    Service,
    competing_services,
    hosts_of,
    services,
)
from embq.core.queue.keys import RUNS
from embq.core.queue.runs import ForeignRun, foreign_runs
from embq.core.queue.scripts import Script, load_scripts
from embq.core.service.log import Events
from embq.core.settings import fleet_name, machine_name

CLOCK_OFFSET_S = 5.0
"""Largest difference of clocks without a warning. Leases and ages depend on the broker's clock alone, but logs are
compared by eye, and certificates are valid by the clock of each machine."""
CLOCK_NEXT = (
    "set both machines' clocks by NTP (chrony, systemd-timesyncd); leases and rows do not depend on it, "
    "certificates and times in logs do"
)
FOREIGN_NEXT = (
    "it is served by services of that version only; upgrade all machines, then run embq resume on its output folder"
)
TWO_NEXT = {
    "producer": "harmless, but of no use: stop one of them, or give each stack a broker of its own",
    "writer": "each run is written by one of them at a time; stop one, or give each stack a broker of its own, "
    "because a writer that does not see a run's folder cannot write it",
}
"""Role -> consequence and next step if two services of it serve the same runs."""


def versions_next(own: Service, other: Service) -> str:
    """Consequence and next step if two services have different versions."""
    if own.protocol != other.protocol:
        return "they do not see each other's runs: upgrade all machines to one version"
    return "they work together; upgrade the older one when it is convenient"


class FleetWarnings:
    """Warns once each of other versions, competing services, runs of another version, a clock that differs, and a
    broker that would lose work.

    Args:
        log: of the service.
    """

    def __init__(self, log: Events) -> None:
        self._log = log
        self._warned: set[tuple[str, ...]] = set()

    def clock(self, ahead_s: float) -> None:
        """Check how far the clock of this machine is ahead of the broker's."""
        if abs(ahead_s) > CLOCK_OFFSET_S and self._first("clock"):
            self._log.warning("clock_differs", ahead_s=round(ahead_s, 1), next=CLOCK_NEXT)

    def broker(self, issues: list[tuple[str, str]]) -> None:
        """Check the settings of the broker, which services check at their start and anybody may change later."""
        for why, next_step in issues:
            if self._first("broker", why):
                self._log.error("broker_unsafe", why=why, next=next_step)

    def peers(self, own: Service, peers: list[Heard]) -> None:
        """Check the services that report."""
        for other in [peer.service for peer in peers if peer.service.name != own.name and peer.last_ms > own.began_ms]:
            same = (other.version, other.protocol) == (own.version, own.protocol)
            if not same and self._first("versions", other.role, other.host, other.speaks):
                self._log.warning(
                    "versions_differ",
                    other=f"{other.role} on {other.host}",
                    theirs=other.speaks,
                    ours=own.speaks,
                    next=versions_next(own, other),
                )
        for pair in competing_services(peers):
            hosts = hosts_of(pair)
            if own.name in [service.name for service in pair] and self._first("two", hosts):
                self._log.warning("two_of_a_kind", role=own.role, hosts=hosts, next=TWO_NEXT[own.role])

    def runs(self, foreign: list[ForeignRun]) -> None:
        """Warn of runs of another protocol version."""
        for run in foreign:
            if self._first("run", run.run):
                self._log.warning("run_of_another_version", run=run.run, protocol=run.protocol, next=FOREIGN_NEXT)

    def _first(self, *what: str) -> bool:
        new = what not in self._warned
        self._warned.add(what)
        return new


RECORDS_S = 60.0
"""The records of all runs are read when their number has changed, and after so long: a thousand of them are 0.4 MB, and
each machine looks each five seconds."""
LOGS_AS = {"worker": "supervisor"}
"""Role -> name of its log, if that differs."""
STOP_S = 3.0
"""Time-out of signing off at the end; the report expires by itself as well."""


def this_service(role: str, *, version: str, run: str = "", metrics: str = "") -> Service:
    """A service in this process, under a unique name.

    Args:
        version: of embq.
        run: the one run that it serves; "" for all.
        metrics: HOST:PORT of its metrics; "" for none.
    """
    host = machine_name()
    return Service(
        name=f"{re.sub(r'[^A-Za-z0-9]+', '-', host)}.{role}.{secrets.token_hex(3)}",
        role=role,
        host=host,
        pid=getpid(),
        version=version,
        python=platform.python_version(),
        run=run,
        metrics=metrics,
        fleet=fleet_name(),
    )


def clock_ahead_s(client: redis.Redis) -> float:
    """Seconds by which the clock of this machine is ahead of the broker's, the least that its answer allows.

    The broker read its clock at some moment of the call, which takes seconds over a bad link.
    """
    start = time.time()
    seconds, micros = client.time()
    broker_s = float(seconds) + float(micros) / 1e6
    low_s, high_s = sorted((start - broker_s, time.time() - broker_s))
    return min(max(0.0, low_s), high_s)


class Reporter(threading.Thread):
    """Reports a service every `REPORT_S` seconds during the `with` block, and signs it off afterwards.

    The service never waits for it: where the broker is unreachable, the report is made later.

    Args:
        connect: makes an impatient client for this thread alone; its argument says whether a stop was requested.
        service: the first report.
        refresh: makes the present report of the last one; called before each report, in this thread.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[], bool]], redis.Redis],
        service: Service,
        *,
        refresh: Callable[[Service], Service] = lambda service: service,
        every_s: float = REPORT_S,
    ) -> None:
        super().__init__(name="reporter", daemon=True)
        self.service = service
        self._connect = connect
        self._refresh = refresh
        self._every_s = every_s
        self._over = threading.Event()
        self._scripts: dict[str, Script] = {}
        self._log = Events(LOGS_AS.get(service.role, service.role))
        self._notices = FleetWarnings(self._log)
        self._refused = ""
        self._records, self._records_at = -1, 0.0

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
                self._patiently(client, lambda client: SERVICE_REPORTS.sign_off(client, self.service.name))

    def _patiently(self, client: redis.Redis, action: Callable[[redis.Redis], None]) -> None:
        """Do it, or leave it for the next time; a lasting refusal is logged once."""
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
        self.service = self._refresh(replace(self.service, began_ms=began_ms, clock_s=round(ahead_s, 3) + 0.0))
        SERVICE_REPORTS.report(client, self.service, scripts=self._scripts)
        if self.service.role in KEEPERS:  # others may lack the right to
            SERVICE_REPORTS.forget_silent(client)
            self._notices.broker(losses(client))
        self._notices.clock(ahead_s)
        self._notices.peers(self.service, services(client, role=self.service.role))
        records, now = client.hlen(RUNS), time.monotonic()
        if records != self._records or now >= self._records_at:
            self._notices.runs(foreign_runs(client))
            self._records, self._records_at = records, now + RECORDS_S
