"""Checks of the services that report to a broker: presence, versions, duplicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import redis

from embq.app.doctor.check import Check
from embq.core.process.libraries import model_packages
from embq.core.queue.heartbeats import Heard, Service, competing_services, hosts_of, services
from embq.core.queue.keys import VERSION
from embq.core.queue.reporting import FOREIGN_NEXT, TWO_NEXT, this_service, versions_next
from embq.core.queue.runs import foreign_runs
from embq.core.redaction import printable


def fleet(client: redis.Redis, version: str) -> Iterator[Check]:
    """Presence and versions of services, runs of another protocol version, and duplicate services.

    Args:
        version: of embq here.
    """
    heard = services(client)
    yield _present(heard)
    yield from _versions(this_service("command", version=version), [one.service for one in heard])
    for pair in competing_services(heard):
        detail = f"two services of the kind {pair[0].role} serve the same runs, on {hosts_of(pair)}"
        yield Check("services", "warn", printable(detail), TWO_NEXT[pair[0].role])
    for run in foreign_runs(client):
        detail = f"run {run.run} for {run.output} was announced under protocol version {run.protocol}, not {VERSION}"
        yield Check("runs", "warn", printable(detail), FOREIGN_NEXT)


def _present(heard: Sequence[Heard]) -> Check:
    roles = Counter(one.service.role for one in heard)
    told = [f"{role} on {', '.join(_hosts(heard, role))}" for role in roles]
    missing = [role for role in ("producer", "writer") if not roles[role]]
    if not missing:
        return Check("services", "ok", printable("; ".join(told)))
    detail = f"no {' and no '.join(missing)} reports to this broker{', only ' if told else ''}{'; '.join(told)}"
    return Check("services", "warn", printable(detail), f"start {' and '.join(f'`embq {role}`' for role in missing)}")


def _hosts(heard: Sequence[Heard], role: str) -> list[str]:
    return sorted({one.service.host for one in heard if one.service.role == role})


def _versions(own: Service, others: Sequence[Service]) -> Iterator[Check]:
    """A row for each version of embq that differs from ours, or one for none."""
    differing = {
        (other.version, other.protocol): other
        for other in others
        if (other.version, other.protocol) != (own.version, own.protocol)
    }
    for other in differing.values():
        state = "fail" if other.protocol != own.protocol else "warn"
        detail = f"{own.speaks} here, {other.speaks} on {other.host} ({other.role})"
        yield Check("versions", state, printable(detail), versions_next(own, other))
    if not differing:
        yield Check("versions", "ok", f"{own.speaks}{', like all services' if others else ''}")


def libraries(client: redis.Redis) -> Iterator[Check]:
    """Versions of the libraries that load models, compared with those of other workers."""
    own = model_packages()
    said = ", ".join(f"{name} {version}" for name, version in own.items())
    others = [one.service for one in services(client) if one.service.role == "worker" and one.service.packages]
    differing = {
        f"{name} {own.get(name, 'is missing')} here, {version} on {other.host}": None
        for other in others
        for name, version in other.packages.items()
        if own.get(name) != version
    }
    if not differing:
        yield Check("libraries", "ok", f"{said or 'none that load models'}{', like all workers' if others else ''}")
        return
    yield Check(
        "libraries",
        "warn",
        printable("; ".join(differing)),
        "install the same versions: where a library builds another model of the same files, a run that was begun with "
        "the other one is refused here (wrong_model); `embq worker --check --load` finds out",
    )
