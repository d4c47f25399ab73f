"""The machines that the broker hears of: every producer, every writer and every supervisor of workers reports itself.

A worker process reports what it does with a model (`core.registry`); a service reports that it is there, from its start
on, also while there is nothing to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any, cast

import redis

from core import protocol
from core.protocol import RUNS, SERVICES, service_key
from core.scripts import Script

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

    device: str
    name: str
    state: str
    worker: str
    precisions: tuple[str, ...] = UNKNOWN
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What a service says of itself.

    Attributes:
        name: unique for ever.
        role: one of `ROLES`.
        protocol: `core.protocol.VERSION` of its code.
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

    name: str
    role: str
    host: str
    pid: int
    version: str
    protocol: int = protocol.VERSION
    python: str = ""
    run: str = ""
    state: str = "running"
    metrics: str = ""
    began_ms: int = 0
    clock_s: float = 0.0
    devices: tuple[Device, ...] = ()
    cores: int = 0
    memory_bytes: int = 0
    cache_free_bytes: int = 0
    packages: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Service | None:
        """The report in `text`; None where it is none. Fields that another version has added are left out."""
        try:
            data = json.loads(text)
            devices = tuple(
                Device(
                    **{name: str(one[name]) for name in ("device", "name", "state", "worker")},
                    precisions=tuple(map(str, one.get("precisions", UNKNOWN))),
                    why=str(one.get("why", "")),
                )
                for one in data.get("devices", ())
            )
            known = {name: data[name] for name in cls.__dataclass_fields__ if name in data and name != "devices"}
            service = cls(**known, devices=devices)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        return service if _is_sound(service) else None

    @property
    def speaks(self) -> str:
        """Its versions, for people."""
        return f"embq {self.version}, protocol {self.protocol}"


def _is_sound(service: Service) -> bool:
    """Whether every field has the type that it is declared to have: a report comes from another machine."""
    texts = (*("name", "role", "host", "version", "python"), *("run", "state", "metrics"))
    numbers = ("pid", "protocol", "began_ms", "clock_s", "cores", "memory_bytes", "cache_free_bytes")
    return (
        all(isinstance(getattr(service, name), str) for name in texts)
        and all(isinstance(getattr(service, name), (int, float)) for name in numbers)
        and all(
            isinstance(told, dict) and all(isinstance(text, str) for text in told.values())
            for told in (service.packages, service.refused)
        )
    )


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
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.zrange(SERVICES, 0, -1, withscores=True)
        (seconds, micros), scored = cast("tuple[tuple[int, int], list[tuple[bytes, float]]]", pipe.execute())
    if not scored:
        return []
    now_ms = seconds * 1000 + micros // 1000
    said = cast("list[bytes | None]", client.mget([service_key(name.decode("utf-8", "replace")) for name, _ in scored]))
    heard = [
        Heard(service=service, last_ms=int(at_ms), silent_s=round(max(0.0, now_ms - at_ms) / 1000, 1))
        for text, (_, at_ms) in zip(said, scored, strict=True)
        if text is not None and (service := Service.from_json(text)) is not None
    ]
    return sorted(heard, key=_order)


def _order(heard: Heard) -> tuple[int, str, str]:
    service = heard.service
    return (ROLES.index(service.role) if service.role in ROLES else len(ROLES), service.host, service.name)


def forget_gone(client: redis.Redis) -> None:
    """Take the names of services that are not heard of any more off the list."""
    names = cast("list[bytes]", client.zrange(SERVICES, 0, -1))
    said = (
        cast("list[bytes | None]", client.mget([service_key(name.decode("utf-8", "replace")) for name in names]))
        if names
        else []
    )
    if gone := [name for name, text in zip(names, said, strict=True) if text is None]:
        client.zrem(SERVICES, *gone)


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
    """The runs that the broker knows under another protocol version."""
    found = []
    for run, text in sorted(cast("dict[bytes, bytes]", client.hgetall(RUNS)).items()):
        try:
            data: Any = json.loads(text)
            told = data if isinstance(data, dict) else {}
        except ValueError:
            told = {}
        if told.get("v") != protocol.VERSION:
            output, version = str(told.get("output", "?")), str(told.get("v", "?"))
            found.append(ForeignRun(run=run.decode("utf-8", "replace"), output=output, protocol=version))
    return found
