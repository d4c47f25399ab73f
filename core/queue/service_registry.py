"""The machines that the broker hears of: every producer, every writer and every supervisor of workers reports itself.

A worker process reports what it does with a model (`core.queue.registry`); a service reports that it is there, from
its start on, also while there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Annotated, cast

import redis
from msgspec import Meta

from core import wire
from core.errors import MalformedError
from core.queue import keys
from core.queue.keys import RUNS, SERVICES, service_key
from core.queue.registry import listed, said_by
from core.queue.scripts import Script
from core.wire import Count, LongText, PathText, ShortText, Word, WorkerName

REPORT_S = 5.0
"""Seconds between two reports; a machine shows in `embq status` within twice that."""
LIFE_S = 20.0
"""A service that was not heard of for so long is forgotten."""
ROLES = ("producer", "writer", "worker")
STATES = ("starting", "idle", "loading", "serving", "given_up", "over")
"""Of a device: its process is being started; waits for work; loads a model; has one; cannot serve; or the only run that
was asked for is over."""

UNKNOWN = ("fp32",)
"""Precisions of a device that does not say: every device computes in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One slot of a supervisor.

    Attributes:
        device: "cpu", "cuda:N" or "sim:SPEED".
        name: its model, such as "NVIDIA H200"; "" where that is not known.
        state: one of `STATES`.
        worker: name of the process that serves it now; "" where there is none.
        precisions: those that it computes fast, best first; () for a GPU that the torch there has no code for.
        why: for what it was given up, and what helps; "" where it was not.
    """

    device: ShortText
    name: ShortText
    state: Word
    worker: ShortText
    precisions: Annotated[tuple[Word, ...], Meta(max_length=16)] = UNKNOWN
    why: LongText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What a service says of itself.

    Attributes:
        name: unique for ever.
        role: one of `ROLES`.
        protocol: `core.queue.keys.VERSION` of its code.
        run: the one run that it serves; "" for all.
        state: "running", or "draining" once a stop was asked for.
        metrics: HOST:PORT of its metrics; "" for none.
        began_ms: when it first reported, by the broker's clock.
        clock_s: how far the clock of its machine is ahead of the broker's.
        devices: of a supervisor of workers.
        cores, memory_bytes: that it may use; 0 where it does not say.
        cache_free_bytes: room on the disk of the model cache; 0 where it does not say.
        packages: of a supervisor of workers: library that loads models -> version.
        refused: of the same: model that cannot be loaded there -> why, and what to do.
    """

    name: WorkerName
    role: Word
    host: ShortText
    pid: Count
    version: ShortText
    protocol: Count = keys.VERSION
    python: ShortText = ""
    run: ShortText = ""
    state: Word = "running"
    metrics: ShortText = ""
    began_ms: Count = 0
    clock_s: Annotated[float, Meta(ge=-1e12, le=1e12)] = 0.0
    devices: Annotated[tuple[Device, ...], Meta(max_length=1_024)] = ()
    cores: Count = 0
    memory_bytes: Count = 0
    cache_free_bytes: Count = 0
    packages: dict[ShortText, ShortText] = field(default_factory=dict)
    refused: dict[str, LongText] = field(default_factory=dict)

    def to_json(self) -> str:
        """The report as JSON text."""
        return wire.write(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Service:
        """The report in `text`; MalformedError where it is none. Fields that another version has added are left out."""
        return wire.read(cls, text, what="service report")

    @property
    def speaks(self) -> str:
        """Its versions, for people."""
        return f"embq {self.version}, protocol {self.protocol}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A service that the broker hears of.

    Attributes:
        last_ms: its last report, by the broker's clock.
        silent_s: seconds since then.
    """

    service: Service
    last_ms: int
    silent_s: float

    def is_beside(self, other: Heard) -> bool:
        """Whether both are at work at the same time. One that was killed has not reported since the next one began."""
        return self.last_ms > other.service.began_ms and other.last_ms > self.service.began_ms


def report_service(client: redis.Redis, service: Service, *, scripts: Mapping[str, Script]) -> None:
    """Keep what a service says of itself for `LIFE_S` seconds; taken also while the server is out of memory."""
    scripts["report"](
        keys=[SERVICES, service_key(service.name)],
        args=[service.name, service.to_json(), int(LIFE_S * 1000)],
        client=client,
    )


def services(client: redis.Redis) -> list[Heard]:
    """The services that are heard of: producers, writers, then supervisors of workers; each by host. Only reads."""
    now_ms, scored = listed(client, SERVICES)
    reports = reports_of(said_by(client, scored, service_key))
    heard = [
        Heard(service=service, last_ms=int(scored[name]), silent_s=round(max(0.0, now_ms - scored[name]) / 1000, 1))
        for name, service in reports.items()
    ]
    return sorted(heard, key=_order)


def reports_of(texts: Mapping[str, bytes | None]) -> dict[str, Service]:
    """The reports among what the keys of some services hold, by name; what is no report of that service is skipped."""
    found = {}
    for name, text in texts.items():
        try:
            if text is not None:
                service = Service.from_json(text)
                if service.name != name:
                    raise wire.malformed("service report", f"it is of another service, {service.name}")
                found[name] = service
        except MalformedError as error:
            wire.skipped("service report", name, error)
    return found


def _order(heard: Heard) -> tuple[int, str, str]:
    service = heard.service
    return (ROLES.index(service.role) if service.role in ROLES else len(ROLES), service.host, service.name)


def sign_off_service(client: redis.Redis, name: str) -> None:
    """Forget a service that has ended."""
    with client.pipeline() as pipe:
        pipe.zrem(SERVICES, name)
        pipe.delete(service_key(name))
        pipe.execute()


def two_of_a_kind(heard: Iterable[Heard]) -> list[tuple[Service, Service]]:
    """Pairs of producers, and of writers, that serve the same runs at the same time."""
    return [
        (one.service, other.service)
        for one, other in combinations(heard, 2)
        if one.service.role == other.service.role
        and one.service.role in ("producer", "writer")
        and one.service.run == other.service.run
        and one.is_beside(other)
    ]


def whereabouts(pair: tuple[Service, Service]) -> str:
    """Both hosts, for people; with their processes where the hosts have one name."""
    if pair[0].host != pair[1].host:
        return " and ".join(sorted(service.host for service in pair))
    return " and ".join(f"{service.host} (process {service.pid})" for service in pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRun:
    """A run that an embq of another protocol version has announced: services of this one do not see it.

    Attributes:
        output: its output folder, as far as its record says.
        protocol: the version that it was announced under.
    """

    run: str
    output: str
    protocol: str


def foreign_runs(client: redis.Redis) -> list[ForeignRun]:
    """The runs that the broker knows under another protocol version; what is no record is skipped."""
    found = []
    for run, text in sorted(cast("dict[bytes, bytes]", client.hgetall(RUNS)).items()):
        try:
            if wire.read_version(text, keys.VERSION, what="run record") is None:
                told = wire.read(_Foreign, text, what="run record")
                run_id = wire.convert(ShortText, wire.read_text(run, what="run record"), what="run record")
                found.append(ForeignRun(run=run_id, output=told.output, protocol=str(told.v)))
        except MalformedError as error:
            wire.skipped("run record", run, error)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Foreign:
    """What a record says in every version."""

    v: Count
    output: PathText = "?"
