"""Checks of the services that report to a broker: presence, versions, duplicates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import redis

from embq.app.doctor.check import Check
from embq.core.process.libraries import model_packages
from embq.core.queue.heartbeats import Heard, Service, competing_services, hosts_of, services, shared_devices
from embq.core.queue.keys import VERSION
from embq.core.queue.reporting import FOREIGN_NEXT, TWO_NEXT, this_service, versions_next
from embq.core.queue.runs import foreign_runs


def fleet(client: redis.Redis, version: str) -> Iterator[Check]:
    """Presence and versions of services, runs of another protocol version, and duplicate services.

    Args:
        version: of embq here.
    """
    reports = services(client)
    reporting = [report.service for report in reports]
    yield _present(reporting)
    yield from _versions(this_service("command", version=version), reporting)
    for pair in competing_services(reports):
        detail = f"two services of the kind {pair[0].role} serve the same runs, on {hosts_of(pair)}"
        yield Check.passed("services", detail, TWO_NEXT[pair[0].role])
    yield from device_checks(reports)
    for run in foreign_runs(client):
        detail = f"run {run.run} for {run.output} was announced under protocol version {run.protocol}, not {VERSION}"
        yield Check.passed("runs", detail, FOREIGN_NEXT)


def device_checks(reports: Iterable[Heard], *, fleet: str = "") -> list[Check]:
    """A row for each two workers that share devices.

    Args:
        fleet: that one of them belongs to; "" for any workers.
    """
    return [
        Check.passed(
            "workers",
            f"{', '.join(devices)} shared by two workers: {_worker(first.service)} and {_worker(other.service)}",
            "each gets a part of their speed and memory: end one of the two (`embq fleet drain`), or give each "
            "devices of its own with --devices",
        )
        for first, other, devices in shared_devices(reports)
        if first.is_beside(other) and (not fleet or fleet in (first.service.fleet, other.service.fleet))
    ]


def _worker(service: Service) -> str:
    return f"{service.host} {f'of fleet {service.fleet}' if service.fleet else 'of no fleet'}, process {service.pid}"


def _present(reporting: Sequence[Service]) -> Check:
    hosts: dict[str, set[str]] = defaultdict(set)
    for service in reporting:
        hosts[service.role].add(service.host)
    present = "; ".join(f"{role} on {', '.join(sorted(names))}" for role, names in hosts.items())
    missing = [role for role in ("producer", "writer") if role not in hosts]
    if not missing:
        return Check.passed("services", present)
    detail = f"no {' and no '.join(missing)} reports to this broker{', only ' if present else ''}{present}"
    return Check.passed("services", detail, f"start {' and '.join(f'`embq {role}`' for role in missing)}")


def _versions(own: Service, reporting: Sequence[Service]) -> Iterator[Check]:
    """A row for each version of embq that differs from ours, or one row if none does."""
    differing = {
        (other.version, other.protocol): other
        for other in reporting
        if (other.version, other.protocol) != (own.version, own.protocol)
    }
    for other in differing.values():
        state = "fail" if other.protocol != own.protocol else "warn"
        detail = f"{own.speaks} here, {other.speaks} on {other.host} ({other.role})"
        yield Check("versions", state, detail, versions_next(own, other))
    if not differing:
        yield Check.passed("versions", f"{own.speaks}{', like all services' if reporting else ''}")


def libraries(client: redis.Redis) -> Iterator[Check]:
    """Versions of the libraries that load models, compared with those of other workers."""
    own = model_packages()
    workers = [report.service for report in services(client) if report.service.role == "worker"]
    workers = [worker for worker in workers if worker.packages]
    differing = {
        f"{name} {own.get(name, 'is missing')} here, {version} on {worker.host}": None
        for worker in workers
        for name, version in worker.packages.items()
        if own.get(name) != version
    }
    if differing:
        yield Check.passed(
            "libraries",
            "; ".join(differing),
            "install the same versions: if a library builds another model of the same files, a run that was begun "
            "with the other one is refused here (wrong_model); `embq worker --check --load` finds out",
        )
    else:
        versions = ", ".join(f"{name} {version}" for name, version in own.items()) or "none that load models"
        yield Check.passed("libraries", f"{versions}{', like all workers' if workers else ''}")
