"""Services of the fleet with their devices, as `embq status` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import redis

from embq.app.status.display import FittedTable
from embq.core.broker.client import losses
from embq.core.queue.heartbeats import (
    Device,
    Heard,
    competing_services,
    hosts_of,
    kept_rates,
    live_workers,
    rates_of,
    services,
)
from embq.core.queue.keys import VERSION
from embq.core.queue.reporting import CLOCK_OFFSET_S, FOREIGN_NEXT, TWO_NEXT
from embq.core.queue.runs import ForeignRun, RunRecord, active, backlogs, foreign_runs, registered
from embq.core.redaction import printable
from embq.core.service.progress_line import duration

OF_A_SERVICE = (
    *("name", "role", "host", "pid", "version", "protocol", "python", "run", "state"),
    *("clock_s", "metrics", "cores", "memory_bytes", "cache_free_bytes", "packages", "refused", "fleet"),
)
"""Fields of a service's report that `embq status --json` has."""
OF_A_SLOT = tuple(item.name for item in fields(Device))
OF_A_WORKER = ("model", "rows_per_s", "stage", "unit", "age_s")
OF_A_DEVICE = ("device", "state", "rows/s", "model", "card", "measured", "unit")
"""Columns of a device."""
DROPPED = ("measured", "unit", "version", "card", "model", "host")
"""Columns that narrow terminals lack, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """Services, workers and speeds at one moment.

    Attributes:
        reports: those of the services.
        workers: name of a worker process -> its report.
        measured: name of a device -> model of a known run -> rows per second, as last measured.
        foreign: runs of another protocol version.
        active_models: models of the runs that are not over.
        losses: settings by which the broker would lose work, and next steps.
    """

    reports: list[Heard] = field(default_factory=list)
    workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    foreign: list[ForeignRun] = field(default_factory=list)
    active_models: set[str] = field(default_factory=set)
    losses: list[tuple[str, str]] = field(default_factory=list)

    def to_json(self) -> list[dict[str, Any]]:
        """The shape of "services" that `embq status --json` promises."""
        return [
            {
                **{name: getattr(report.service, name) for name in OF_A_SERVICE},
                "up_s": round(max(0, report.last_ms - report.service.began_ms) / 1000, 1)
                if report.service.began_ms
                else 0.0,
                "silent_s": report.silent_s,
                "devices": [self._device(device) for device in report.service.devices],
            }
            for report in self.reports
        ]

    def warnings(self) -> list[str]:
        """Warnings, a line each."""
        lines = [f"{problem}: {next_step}" for problem, next_step in self.losses]
        lines += [
            f"two services of the kind {pair[0].role} serve the same runs, on {hosts_of(pair)}: "
            f"{TWO_NEXT[pair[0].role]}"
            for pair in competing_services(self.reports)
        ]
        versions = sorted({report.service.speaks for report in self.reports})
        if len(versions) > 1:
            lines.append(f"the services differ in version ({'; '.join(versions)}): `embq doctor` tells what it means")
        lines += [
            f"run {run.run} for {run.output} was announced under protocol version {run.protocol}, and this embq "
            f"speaks {VERSION}: {FOREIGN_NEXT}"
            for run in self.foreign
        ]
        refusals = [line for model in sorted(self.active_models) for line in self.refusals(model)]
        return [*map(printable, lines), *self.given_up(), *self.unseen(), *refusals]

    def given_up(self) -> list[str]:
        """Devices that were given up, and why; a line each."""
        reasons = {
            (report.service.host, f"{device.device} ({device.name})" if device.name else device.device): device.why
            for report in self.reports
            for device in report.service.devices
            if device.why
        }
        return [
            printable(f"{host} has given up {device}, until the worker there is started again: {why}")
            for (host, device), why in reasons.items()
        ]

    def unseen(self, run: str = "") -> list[str]:
        """Inputs of a run, or of all runs, that a machine lacks; a line each."""
        missing = {
            (str(worker.get("host")), of_run): source
            for worker in self.workers.values()
            for of_run, source in worker.get("unseen", {}).items()
            if run in ("", of_run)
        }
        return [
            printable(f"{host} has no {source} of run {of_run}, and leaves its units to other machines")
            for (host, of_run), source in sorted(missing.items())
        ]

    def refusals(self, model: str) -> list[str]:
        """Machines that cannot load a model, and why; a line each."""
        return [
            printable(
                f"{model} cannot be loaded on {report.service.host}, until the worker there is started again: {why}"
            )
            for report in self.reports
            if (why := report.service.refused.get(model))
        ]

    def _device(self, device: Device) -> dict[str, Any]:
        report = self.workers.get(device.worker, {})
        # The computing process knows the name even if the supervisor could not read it.
        name = str(report.get("device_name") or device.name)
        measured = [{"model": model, "rows_per_s": rate} for model, rate in self.measured.get(name, {}).items()]
        return {
            **{name: getattr(device, name) for name in OF_A_SLOT},
            "name": name,
            **{key: report.get(key) for key in OF_A_WORKER},
            "measured": measured,
        }


def fleet_status(client: redis.Redis) -> FleetStatus:
    """The fleet now. Raises redis.exceptions.RedisError if the broker is unreachable."""
    return fleet_of(client, registered(client), live_workers(client), services(client))


def fleet_of(
    client: redis.Redis, records: Mapping[str, RunRecord], workers: list[dict[str, Any]], reports: list[Heard]
) -> FleetStatus:
    """The fleet by reports that were read before; raises as `fleet_status` does.

    Args:
        records: all runs that the broker knows, by id.
    """
    models = {record.model.queue_key: record.model for record in records.values()}
    rates = kept_rates(client) if reports else {}
    measured: dict[str, dict[str, float]] = {}
    for model in models.values():
        for rate in rates_of(model, rates):
            measured.setdefault(rate.device, {})[model.spec] = rate.rows_per_s
    going = active(client)
    waiting = zip(going.values(), backlogs(client, list(going)), strict=True)
    return FleetStatus(
        reports=reports,
        workers={str(worker.get("name")): worker for worker in workers},
        measured=measured,
        foreign=foreign_runs(client),
        losses=losses(client),
        active_models={record.model.spec for record, backlog in waiting if not backlog.state.ended},
    )


def table(fleet: FleetStatus, *, verbose: bool = False) -> FittedTable:
    """A line for each service, and for each device of a worker."""
    rows = []
    for service in fleet.to_json():
        first = {"role": service["role"], "host": _host(service)}
        for device in service["devices"] or [None]:
            cells = _cells(device) if device is not None else dict.fromkeys(OF_A_DEVICE, "-")
            if device is None or service["state"] == "draining":
                cells["state"] = service["state"]
            rows.append({**first, **cells, "version": _version(service)})
            first = dict.fromkeys(first, "")
    return FittedTable(rows, DROPPED, verbose)


def plain_lines(fleet: FleetStatus) -> list[str]:
    """A line for each service, for logs."""
    return [
        printable(
            f"machine role={entry['role']} host={entry['host']} version={entry['version']} state={entry['state']} "
            f"devices={','.join(device['device'] + ':' + device['state'] for device in entry['devices']) or '-'} "
            f"rate={sum(device['rows_per_s'] or 0.0 for device in entry['devices']):.1f}/s"
        )
        for entry in fleet.to_json()
    ]


def _version(service: dict[str, Any]) -> str:
    other = f" (protocol {service['protocol']})" if service["protocol"] != VERSION else ""
    return f"{service['version']}{other}"


def _host(service: dict[str, Any]) -> str:
    ahead_s = service["clock_s"]
    if abs(ahead_s) <= CLOCK_OFFSET_S:
        return str(service["host"])
    return f"{service['host']} (clock {duration(abs(ahead_s))} {'ahead' if ahead_s > 0 else 'behind'})"


def _cells(device: dict[str, Any]) -> dict[str, str]:
    is_idle = device["state"] == "serving" and device["model"] and not device["unit"]
    # The last measured rate of the loaded model, or of another one.
    measured = sorted(device["measured"], key=lambda rate: rate["model"] != device["model"])
    suffix = f" and {len(measured) - 1} more" if len(measured) > 1 else ""
    return {
        "device": device["device"],
        "state": "idle" if is_idle else device["state"],
        "rows/s": f"{device['rows_per_s']:,.1f}" if device["rows_per_s"] else "-",
        "model": device["model"] or "-",
        "card": device["name"] or "-",
        "measured": f"{measured[0]['rows_per_s']:,.1f}/s {measured[0]['model']}{suffix}" if measured else "-",
        "unit": f"{device['unit'][:8]} {duration(device['age_s'] or 0.0)}" if device["unit"] else "-",
    }
