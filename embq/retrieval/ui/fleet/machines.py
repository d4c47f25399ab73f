"""Machines and devices of the fleet page. Devices that vanished stay for a day, grey; ended ones for a minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from embq.app.status.eta import SILENT_S
from embq.app.status.fleet import FleetStatus
from embq.core.queue.heartbeats import REPORT_S, Device, Heard

KEPT_S = {"lost": 24 * 3600.0, "ended": 60.0}
"""State of devices that are gone -> for how long they are shown."""
MOST_KEPT = 5_000
"""Devices that are gone and still shown."""
CARDS = 48
"""Devices up to which each has a card; more are cells."""
SPARK_S, SPARKS = 10.0, 60
"""Seconds of a point of a device's rate, and points: ten minutes."""

GREY = ("silent", "lost", "ended")
"""States of devices that report nothing: for some seconds, since they vanished, since they signed off."""

DeviceKey = tuple[str, str, int]
"""Host, device, and number among the processes on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """A device at one moment.

    Attributes:
        state: of the device's process, or one of `GREY`.
        rows_per_s: of its worker; None if that says nothing.
        busy: share of the last 10 s in which the device computed; None if unknown.
        memory_used_bytes, memory_bytes: of a GPU; 0 if unknown.
        unit, stage, age_s: its oldest unit, if that is, and for how long it is held.
        seen_s: time of the last report, in seconds since the epoch.
        rates: rows per second in each `SPARK_S` of the last ten minutes, oldest first, None if unknown; () if
            there are more than `CARDS` devices.
    """

    host: str
    device: str
    number: int
    name: str
    state: str
    model: str = ""
    rows_per_s: float | None = None
    busy: float | None = None
    memory_used_bytes: int = 0
    memory_bytes: int = 0
    unit: str = ""
    stage: str = ""
    age_s: float = 0.0
    why: str = ""
    seen_s: float = 0.0
    rates: tuple[float | None, ...] = ()

    @property
    def key(self) -> DeviceKey:
        """Its identity: a supervisor that is started again has other names, and the same devices."""
        return (self.host, self.device, self.number)

    @property
    def grey(self) -> bool:
        """True if it reports nothing."""
        return self.state in GREY


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineView:
    """A machine: its services and devices."""

    host: str
    services: tuple[Heard, ...]
    devices: tuple[DeviceView, ...]

    @property
    def cores(self) -> int:
        """That its workers may use; 0 if unknown."""
        return max((report.service.cores for report in self.services if report.service.role == "worker"), default=0)

    @property
    def memory_bytes(self) -> int:
        """That its workers may use; 0 if unknown."""
        return max(
            (report.service.memory_bytes for report in self.services if report.service.role == "worker"), default=0
        )

    @property
    def rows_per_s(self) -> float:
        """Of all devices."""
        return sum(device.rows_per_s or 0.0 for device in self.devices)

    @property
    def grey(self) -> bool:
        """True if none of its services reports."""
        return all(service.silent_s > SILENT_S for service in self.services)


@dataclass(slots=True)
class _Spark:
    """Means of a rate over each `SPARK_S`."""

    points: deque[tuple[int, float, int]] = field(default_factory=lambda: deque(maxlen=SPARKS))

    def add(self, now_s: float, rate: float) -> None:
        bucket = int(now_s // SPARK_S)
        if self.points and self.points[-1][0] == bucket:
            _, total, count = self.points.pop()
            self.points.append((bucket, total + rate, count + 1))
        else:
            self.points.append((bucket, rate, 1))

    def values(self, now_s: float) -> tuple[float | None, ...]:
        means = {bucket: total / count for bucket, total, count in self.points}
        last = int(now_s // SPARK_S)
        return tuple(means.get(bucket) for bucket in range(last - SPARKS + 1, last + 1))


class MachineMemory:
    """Makes views of machines, and remembers devices that are gone."""

    def __init__(self) -> None:
        self._last_seen: dict[DeviceKey, tuple[DeviceView, float]] = {}
        self._sparks: dict[DeviceKey, _Spark] = {}

    def update(self, fleets: Iterable[FleetStatus], now_s: float) -> tuple[MachineView, ...]:
        """The machines now, by name.

        Args:
            fleets: of the sources that answer.
            now_s: seconds since the epoch.
        """
        services: dict[str, list[Heard]] = {}
        devices: dict[DeviceKey, DeviceView] = {}
        for fleet in fleets:
            for report in _without_predecessors(fleet.reports):
                services.setdefault(report.service.host, []).append(report)
                for device in report.service.devices:
                    view = _device(fleet, report, device, devices, now_s)
                    devices[view.key] = view
        self._rate(devices, now_s)
        self._last_seen |= {key: (view, now_s - view.seen_s) for key, view in devices.items()}
        departed = [self._departed(*self._last_seen[key]) for key in self._last_seen.keys() - devices.keys()]
        departed = [former for former in departed if now_s - former.seen_s < KEPT_S[former.state]]
        departed = sorted(departed, key=lambda former: -former.seen_s)[:MOST_KEPT]
        remembered = devices.keys() | {former.key for former in departed}
        self._last_seen = {key: value for key, value in self._last_seen.items() if key in remembered}
        self._sparks = {key: spark for key, spark in self._sparks.items() if key in devices}
        by_host: dict[str, list[DeviceView]] = {host: [] for host in services}
        for view in [*devices.values(), *departed]:
            by_host.setdefault(view.host, []).append(view)
        return tuple(
            MachineView(
                host=host,
                services=tuple(services.get(host, ())),
                devices=tuple(sorted(by_host[host], key=lambda view: (len(view.device), view.device, view.number))),
            )
            for host in sorted(by_host)
        )

    def _rate(self, devices: dict[DeviceKey, DeviceView], now_s: float) -> None:
        """Keep the rates of devices, and give them to their views if each has a card."""
        for key, device in devices.items():
            spark = self._sparks.setdefault(key, _Spark())
            if device.rows_per_s is not None:
                spark.add(now_s, device.rows_per_s)
            if len(devices) <= CARDS:
                devices[key] = replace(device, rates=spark.values(now_s))

    @staticmethod
    def _departed(device: DeviceView, silent_s: float) -> DeviceView:
        """A device whose service is gone: one that ends in order signs off at once, one that is killed falls silent."""
        if device.state in ("lost", "ended"):
            return device
        state = "lost" if silent_s > REPORT_S + 1 else "ended"
        return replace(device, state=state, rows_per_s=None, busy=None, unit="", stage="", rates=())


def _without_predecessors(reports: Sequence[Heard]) -> list[Heard]:
    """The services without supervisors that were killed and have a successor on their machine."""
    of_host: dict[str, list[Heard]] = {}
    for report in reports:
        if report.service.role == "worker":
            of_host.setdefault(report.service.host, []).append(report)
    return [
        candidate
        for candidate in reports
        if not any(
            other.service.began_ms > candidate.last_ms
            for other in (of_host[candidate.service.host] if candidate.service.role == "worker" else ())
        )
    ]


def _device(fleet: FleetStatus, status: Heard, device: Device, taken: Container[DeviceKey], now_s: float) -> DeviceView:
    service, silent = status.service, status.silent_s > SILENT_S
    report = fleet.workers.get(device.worker, {})
    if silent or float(report.get("silent_s", 0.0)) > SILENT_S:
        report = {}
    number = 0
    while (service.host, device.device, number) in taken:
        number += 1
    return DeviceView(
        host=service.host,
        device=device.device,
        number=number,
        name=str(report.get("device_name") or device.name),
        state="silent" if silent else _state(device.state, service.state, report),
        model=str(report.get("model") or ""),
        rows_per_s=float(report["rows_per_s"]) if "rows_per_s" in report else None,
        busy=_busy(report),
        memory_used_bytes=device.memory_used_bytes,
        memory_bytes=device.memory_bytes,
        unit=str(report.get("unit") or ""),
        stage=str(report.get("stage") or ""),
        age_s=float(report.get("age_s") or 0.0),
        why=device.why,
        seen_s=now_s - status.silent_s,
    )


def _state(device: str, service: str, report: dict[str, Any]) -> str:
    if service == "draining":
        return service
    return "waiting" if device == "serving" and report.get("model") and not report.get("unit") else device


def _busy(report: dict[str, Any]) -> float | None:
    attribution = report.get("attribution")
    busy = attribution["late"]["stages"].get("embed", {}).get("busy") if attribution else None
    return None if busy is None else min(1.0, float(busy))
