"""Services of the fleet with their devices, as `embq status` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import redis

from embq.app.status.display import FittedTable
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
    *("clock_s", "metrics", "cores", "memory_bytes", "cache_free_bytes", "packages", "refused"),
)
"""Fields of a service's report that `embq status --json` has."""
OF_A_SLOT = tuple(one.name for one in fields(Device))
OF_A_WORKER = ("model", "rows_per_s", "stage", "unit", "age_s")
OF_A_DEVICE = ("device", "state", "rows/s", "model", "card", "measured", "unit")
"""Columns of a device."""
DROPPED = ("measured", "unit", "version", "card", "model", "host")
"""Columns that narrow terminals lack, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """Services, workers and speeds at one moment.

    Attributes:
        heard: the services that report.
        workers: name of a worker process -> its report.
        measured: name of a device -> model of a known run -> rows per second, as last measured.
        foreign: runs of another protocol version.
        wanted: models of the runs that are not over.
    """

    heard: list[Heard] = field(default_factory=list)
    workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    foreign: list[ForeignRun] = field(default_factory=list)
    wanted: set[str] = field(default_factory=set)

    def to_json(self) -> list[dict[str, Any]]:
        """The shape of "services" that `embq status --json` promises."""
        return [
            {
                **{name: getattr(one.service, name) for name in OF_A_SERVICE},
                "up_s": round(max(0, one.last_ms - one.service.began_ms) / 1000, 1) if one.service.began_ms else 0.0,
                "silent_s": one.silent_s,
                "devices": [self._device(device) for device in one.service.devices],
            }
            for one in self.heard
        ]

    def warnings(self) -> list[str]:
        """Warnings, a line each."""
        lines = [
            f"two services of the kind {pair[0].role} serve the same runs, on {hosts_of(pair)}: "
            f"{TWO_NEXT[pair[0].role]}"
            for pair in competing_services(self.heard)
        ]
        spoken = sorted({one.service.speaks for one in self.heard})
        if len(spoken) > 1:
            lines.append(f"the services differ in version ({'; '.join(spoken)}): `embq doctor` tells what it means")
        lines += [
            f"run {run.run} for {run.output} was announced under protocol version {run.protocol}, and this embq "
            f"speaks {VERSION}: {FOREIGN_NEXT}"
            for run in self.foreign
        ]
        return [
            *map(printable, lines),
            *self.given_up(),
            *self.unseen(),
            *(line for model in sorted(self.wanted) for line in self.refusals(model)),
        ]

    def given_up(self) -> list[str]:
        """Devices that were given up, and why; a line each."""
        given_up = {
            (one.service.host, device.device, device.name): device.why
            for one in self.heard
            for device in one.service.devices
            if device.why
        }
        return [
            printable(
                f"{host} has given up {device}{f' ({name})' if name else ''}, until the worker there is started "
                f"again: {why}"
            )
            for (host, device, name), why in given_up.items()
        ]

    def unseen(self, run: str = "") -> list[str]:
        """Inputs of a run, or of all runs, that a machine lacks; a line each."""
        lacks = {
            (str(worker.get("host")), of_run): source
            for worker in self.workers.values()
            for of_run, source in worker.get("unseen", {}).items()
            if run in ("", of_run)
        }
        return [
            printable(f"{host} has no {source} of run {of_run}, and leaves its units to other machines")
            for (host, of_run), source in sorted(lacks.items())
        ]

    def refusals(self, model: str) -> list[str]:
        """Machines that cannot load a model, and why; a line each."""
        return [
            printable(f"{model} cannot be loaded on {one.service.host}, until the worker there is started again: {why}")
            for one in self.heard
            if (why := one.service.refused.get(model))
        ]

    def _device(self, device: Device) -> dict[str, Any]:
        report = self.workers.get(device.worker, {})
        # The computing process knows the name even where the supervisor could not read it.
        name = str(report.get("device_name") or device.name)
        measured = [{"model": model, "rows_per_s": rate} for model, rate in self.measured.get(name, {}).items()]
        return {
            **{name: getattr(device, name) for name in OF_A_SLOT},
            "name": name,
            **{key: report.get(key) for key in OF_A_WORKER},
            "measured": measured,
        }


def fleet_status(client: redis.Redis) -> FleetStatus:
    """The fleet now. Raises redis.exceptions.RedisError where the broker is away."""
    return fleet_of(client, registered(client), live_workers(client), services(client))


def fleet_of(
    client: redis.Redis, records: Mapping[str, RunRecord], workers: list[dict[str, Any]], heard: list[Heard]
) -> FleetStatus:
    """The fleet by reports that were read before; raises as `fleet_status` does.

    Args:
        records: all runs that the broker knows, by id.
    """
    models = {record.model.queue_key: record.model for record in records.values()}
    kept = kept_rates(client) if heard else {}
    measured: dict[str, dict[str, float]] = {}
    for model in models.values():
        for rate in rates_of(model, kept):
            measured.setdefault(rate.device, {})[model.spec] = rate.rows_per_s
    going = active(client)
    waiting = zip(going.values(), backlogs(client, list(going)), strict=True)
    return FleetStatus(
        heard=heard,
        workers={str(worker.get("name")): worker for worker in workers},
        measured=measured,
        foreign=foreign_runs(client),
        wanted={record.model.spec for record, one in waiting if not one.state.ended},
    )


def table(fleet: FleetStatus, *, verbose: bool = False) -> FittedTable:
    """A line for each service, and for each device of a worker."""
    rows = []
    for one, told in zip(fleet.heard, fleet.to_json(), strict=True):
        first = {"role": told["role"], "host": _host(told)}
        for device in told["devices"] or [None]:
            facts = _of_device(device) if device is not None else dict.fromkeys(OF_A_DEVICE, "-")
            if device is None or one.service.state == "draining":
                facts["state"] = told["state"]
            rows.append({**first, **facts, "version": _version(told)})
            first = dict.fromkeys(first, "")
    return FittedTable(rows, DROPPED, verbose)


def plain_lines(fleet: FleetStatus) -> list[str]:
    """A line for each service, for logs."""
    return [
        printable(
            f"machine role={one['role']} host={one['host']} version={one['version']} state={one['state']} "
            f"devices={','.join(device['device'] + ':' + device['state'] for device in one['devices']) or '-'} "
            f"rate={sum(device['rows_per_s'] or 0.0 for device in one['devices']):.1f}/s"
        )
        for one in fleet.to_json()
    ]


def _version(told: dict[str, Any]) -> str:
    return str(told["version"]) if told["protocol"] == VERSION else f"{told['version']} (protocol {told['protocol']})"


def _host(told: dict[str, Any]) -> str:
    ahead_s = told["clock_s"]
    if abs(ahead_s) <= CLOCK_OFFSET_S:
        return str(told["host"])
    return f"{told['host']} (clock {duration(abs(ahead_s))} {'ahead' if ahead_s > 0 else 'behind'})"


def _of_device(device: dict[str, Any]) -> dict[str, str]:
    idle = device["state"] == "serving" and device["model"] and not device["unit"]
    rate = f"{device['rows_per_s']:,.1f}" if device["rows_per_s"] else "-"
    facts = (device["device"], "idle" if idle else device["state"], rate, device["model"] or "-", device["name"] or "-")
    return dict(zip(OF_A_DEVICE, (*map(str, facts), _measured(device), _unit(device)), strict=True))


def _measured(device: dict[str, Any]) -> str:
    """The last measured rate of the loaded model, or of another one."""
    told = sorted(device["measured"], key=lambda one: one["model"] != device["model"])
    more = f" and {len(told) - 1} more" if len(told) > 1 else ""
    return f"{told[0]['rows_per_s']:,.1f}/s {told[0]['model']}{more}" if told else "-"


def _unit(device: dict[str, Any]) -> str:
    return f"{device['unit'][:8]} {duration(device['age_s'] or 0.0)}" if device["unit"] else "-"
