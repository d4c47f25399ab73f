"""Heartbeats: worker processes and services report themselves to the broker, and are read there by all others.

A worker process reports what it does with a model. A service (producer, writer, supervisor of workers) reports that it
is there, from its start on, also while there is nothing to do. Both are kept in the same way, see `Heartbeats`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Annotated, Any, Generic, NotRequired, Required, TypedDict, TypeVar, cast

import msgspec
import redis
from msgspec import Meta

from embq.core import wire
from embq.core.errors import MalformedError
from embq.core.models import ModelConfig
from embq.core.queue import keys
from embq.core.queue.keys import RATES, SERVICES, WORKERS, service_key, worker_key
from embq.core.queue.scripts import Script
from embq.core.wire import Count, LongText, Seconds, ShortText, UnitNumber, Word, WorkerName

T = TypeVar("T")

Share = Annotated[float, Meta(ge=0, le=1e6)]
"""Part of a time; a little above 1 by rounding."""

REPORT_S = 5.0
"""Seconds between two reports of a service; a machine shows in `embq status` within twice that."""
LIFE_S = 20.0
"""A service that has not reported for so long is forgotten."""

MAX_RATES = 256
"""Measured speeds that are kept, as the script `rate` has it."""

UnitSeconds = Annotated[float, Meta(ge=1e-6, le=1e9)]

_NAME = re.compile(rb"[A-Za-z0-9._-]{1,200}")


class Heartbeats(Generic[T]):
    """Reports of processes of one kind: a sorted set of names by time, and a key with the last report of each.

    Args:
        form: of a report; what is not of it is skipped.
        name_of: the name that a report gives.
        what: noun for messages.
        members: key of the sorted set: name -> ms of its last report, by the broker's clock.
        key: of the report of one name.
    """

    def __init__(
        self,
        form: type[T],
        name_of: Callable[[T], str],
        *,
        what: str,
        members: str,
        key: Callable[[str], str],
    ) -> None:
        self._form = form
        self._name_of = name_of
        self._what = what
        self._members = members
        self._key = key

    def report(
        self,
        client: redis.Redis,
        report: T | Mapping[str, object],
        *,
        scripts: Mapping[str, Script],
        life_s: float = LIFE_S,
    ) -> None:
        """Keep a report for `life_s` seconds; taken also while the server is out of memory.

        Args:
            report: a value of the form, or its fields as JSON-ready values.
        """
        name = self._name_of(cast("T", report))
        arguments = [name, wire.write(report), int(life_s * 1000)]
        scripts["report"](keys=[self._members, self._key(name)], args=arguments, client=client)

    def with_age(self, client: redis.Redis, *, of: Callable[[str], bool] = bool) -> Iterator[tuple[T, int, float]]:
        """(report, ms of its time by the broker's clock, its age in seconds).

        Args:
            of: whether the report of a name is wanted.
        """
        now_ms, listed = self._listed(client)
        ages = {name: max(0.0, (now_ms - at_ms) / 1000) for name, at_ms in listed.items() if of(name)}
        for name, report in self.reports(client, ages).items():
            yield report, int(listed[name]), ages[name]

    def reports(self, client: redis.Redis, names: Iterable[str]) -> dict[str, T]:
        """The reports that are kept of some names; what is no report of that name is skipped."""
        reports = {}
        for name, text in self._texts(client, names).items():
            if text is None:
                continue
            try:
                report = wire.read_part(self._form, text, what=self._what)
                if self._name_of(report) != name:
                    raise wire.malformed(self._what, f"it is of another name, {self._name_of(report)}")
                reports[name] = report
            except MalformedError as error:
                wire.skipped(self._what, name, error)
        return reports

    def forget_silent(self, client: redis.Redis) -> None:
        """Remove the names without a report, and members of the set that are no names."""
        texts = self._texts(client, self._listed(client)[1])
        members = cast("list[bytes]", client.zrange(self._members, 0, -1))
        if stale := [name for name in members if not _NAME.fullmatch(name) or texts.get(name.decode(), b"") is None]:
            client.zrem(self._members, *stale)

    def sign_off(self, client: redis.Redis, name: str) -> None:
        """Forget a process that has ended."""
        with client.pipeline() as pipe:
            pipe.zrem(self._members, name)
            pipe.delete(self._key(name))
            pipe.execute()

    def _listed(self, client: redis.Redis) -> tuple[int, dict[str, float]]:
        """ms by the broker's clock, and each name with the ms of its last report; malformed ones are skipped."""
        with client.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.zrange(self._members, 0, -1, withscores=True)
            (seconds, micros), scored = cast("tuple[tuple[int, int], list[tuple[bytes, float]]]", pipe.execute())
        listed = {}
        for raw, at_ms in scored:
            if _NAME.fullmatch(raw) and math.isfinite(at_ms):
                listed[raw.decode()] = at_ms
            else:
                wire.skipped("name of a reporter", raw, "it holds other signs, or its time is not finite")
        return seconds * 1000 + micros // 1000, listed

    def _texts(self, client: redis.Redis, names: Iterable[str]) -> dict[str, bytes | None]:
        listed = list(names)
        if not listed:
            return {}
        return dict(zip(listed, cast("list[bytes | None]", client.mget([*map(self._key, listed)])), strict=True))


# --- workers ---


class ModelShare(TypedDict):
    """A worker's part in one run: speed, units in hand, their size, and (u, token, tokens done) of each begun one.

    `samples` are those of the units in hand, as far as planning knows them; `handled` of them have become a row or a
    failure. Workers of earlier versions report neither.
    """

    tokens_per_s: wire.Rate
    units: Count
    size: Count
    begun: list[tuple[UnitNumber, ShortText, Count]]
    in_batch: Count
    samples: NotRequired[Count]
    handled: NotRequired[Count]


class Shares(TypedDict, total=False):
    """Shares of a stage's time, by its states."""

    busy: Share
    starved: Share
    blocked: Share


class TimeSpent(TypedDict):
    """Causes of a worker's waiting, in shares of a time; see `limit_detail` in docs/reference/status.md."""

    limit: NotRequired[Word]
    seconds: NotRequired[Seconds]
    causes: dict[Word, Share]
    stages: dict[Word, Shares]
    cores_needed: NotRequired[Count]
    cores_exact: NotRequired[bool]


class Attribution(TypedDict):
    """The bottleneck of a worker, recently and over its whole time."""

    threads: Count
    cores: Count
    decode: Word
    spent: NotRequired[dict[Word, dict[Word, Seconds]]]
    late: TimeSpent
    whole: TimeSpent


class WorkerReport(TypedDict, total=False):
    """Report of a worker; other fields are dropped."""

    name: Required[WorkerName]
    device: ShortText
    device_name: ShortText
    host: ShortText
    pid: Count
    model: Annotated[str, Meta(max_length=16_000)]
    version: ShortText
    serves: ShortText
    unseen: dict[ShortText, str]
    load_s: Seconds
    embed_s: Seconds
    ahead_s: Seconds
    unit_s: UnitSeconds
    rows: Count
    units: Count
    rows_per_s: wire.Rate
    limit: Word
    attribution: Attribution
    padding: Annotated[float, Meta(ge=-1e6, le=1e6)]
    memory_full: Count
    recomputed: Count
    held: Count
    runs: dict[ShortText, ModelShare]
    unit: ShortText
    run: ShortText
    stage: Word
    age_s: Seconds


WORKER_REPORTS = Heartbeats(
    WorkerReport, lambda report: report["name"], what="worker report", members=WORKERS, key=worker_key
)


class BriefReport(msgspec.Struct, frozen=True, kw_only=True):
    """What claiming and feeding need of a worker's report. Of thousands a second, nothing else is looked at."""

    name: WorkerName
    model: Annotated[str, Meta(max_length=16_000)] = ""
    ahead_s: Seconds | None = None
    unit_s: UnitSeconds | None = None
    held: Count | None = None


BRIEF_REPORTS = Heartbeats(
    BriefReport, lambda report: report.name, what="worker report", members=WORKERS, key=worker_key
)


def live_workers(client: redis.Redis) -> list[dict[str, Any]]:
    """The last report of each worker, with its age as `silent_s`."""
    return [{**report, "silent_s": round(age_s, 1)} for report, _, age_s in WORKER_REPORTS.with_age(client)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The last measured speed of a model on a kind of device.

    Attributes:
        device: the model of the device.
        rows_per_s: rows with units in hand all the time.
        dims: numbers of a row's vectors together.
    """

    device: ShortText
    rows_per_s: wire.Rate
    dims: Count


def report_rate(client: redis.Redis, model: ModelConfig, rate: Rate, *, scripts: Mapping[str, Script]) -> None:
    """Keep a measured speed beyond the life of the worker; the number of speeds is limited."""
    scripts["rate"](keys=[RATES], args=[f"{model.queue_key} {rate.device}", wire.write(rate)], client=client)


def forget_rates(client: redis.Redis) -> None:
    """Make room for further speeds where they have none, at the cost of any; see the script `rate`."""
    if client.hlen(RATES) >= MAX_RATES:
        fields = cast("list[bytes]", client.hrandfield(RATES, MAX_RATES // 2))
        client.hdel(RATES, *cast("list[str]", fields))


def measured_rates(client: redis.Redis, model: ModelConfig) -> list[Rate]:
    """The measured speeds of a model, by device."""
    return rates_of(model, kept_rates(client))


def kept_rates(client: redis.Redis) -> dict[bytes, bytes]:
    """The measured speeds of all models, as the broker has them; for `rates_of`."""
    return cast("dict[bytes, bytes]", client.hgetall(RATES))


def rates_of(model: ModelConfig, rates: Mapping[bytes, bytes]) -> list[Rate]:
    """The measured speeds of a model among all of `kept_rates`."""
    prefix = f"{model.queue_key} ".encode()
    ours = {field: text for field, text in sorted(rates.items()) if field.startswith(prefix)}
    return list(wire.read_each(Rate, ours, what="measured rate").values())


# --- services ---

ROLES = ("producer", "writer", "worker")
KEEPERS = ("producer", "writer")
"""Roles of which there are few: each of them sees all services, and all services see them."""
STATES = ("starting", "idle", "loading", "serving", "given_up", "over")
"""States of a device: its process is being started, waits for work, loads a model, has one, cannot serve, or has
finished the only run that it was started for."""

UNKNOWN = ("fp32",)
"""Precisions of a device whose report has none: every device computes in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One slot of a supervisor.

    Attributes:
        device: "cpu", "cuda:N" or "sim:SPEED".
        name: its model, such as "NVIDIA H200"; "" if unknown.
        state: one of `STATES`.
        worker: name of the process that serves it now; "" if there is none.
        precisions: those that it computes fast, best first; () for a GPU that its torch does not support.
        why: reason and next step if it was given up, else "".
        memory_used_bytes, memory_bytes: of a GPU, by all programs, and in all; 0 if unknown.
        uuid: of a GPU or MIG instance, the same for every process that sees it; "" if unknown.
    """

    device: ShortText
    name: ShortText
    state: Word
    worker: ShortText
    precisions: Annotated[tuple[Word, ...], Meta(max_length=16)] = UNKNOWN
    why: LongText = ""
    memory_used_bytes: Count = 0
    memory_bytes: Count = 0
    uuid: ShortText = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Report of a service.

    Attributes:
        name: unique for ever.
        role: one of `ROLES`.
        protocol: `embq.core.queue.keys.VERSION` of its code.
        run: the one run that it serves; "" for all.
        state: "running", or "draining" once a stop was requested.
        metrics: HOST:PORT of its metrics; "" for none.
        began_ms: when it first reported, by the broker's clock.
        clock_s: how far the clock of its machine is ahead of the broker's.
        devices: of a supervisor of workers.
        cores, memory_bytes: that it may use; 0 if unknown.
        cache_free_bytes: room on the disk of the model cache; 0 if unknown.
        packages: of a supervisor of workers: library that loads models -> version.
        refused: of the same: model that cannot be loaded there -> why, and what to do.
        fleet: of `embq fleet` that it belongs to; "" for none, None if its version does not report it.
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
    fleet: ShortText | None = None

    @property
    def speaks(self) -> str:
        """Its versions, for people."""
        return f"embq {self.version}, protocol {self.protocol}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A service that reports.

    Attributes:
        last_ms: time of its last report, by the broker's clock.
        silent_s: seconds since then.
    """

    service: Service
    last_ms: int
    silent_s: float

    def is_beside(self, other: Heard) -> bool:
        """True if both run at the same time: a killed service has not reported since the start of its successor."""
        return self.last_ms > other.service.began_ms and other.last_ms > self.service.began_ms


SERVICE_REPORTS = Heartbeats(
    Service, lambda service: service.name, what="service report", members=SERVICES, key=service_key
)


def services(client: redis.Redis, *, role: str = "") -> list[Heard]:
    """The services that report: producers, writers, then supervisors of workers; each by host.

    Args:
        role: of who asks. The many that are no `KEEPERS` are shown the keepers alone; "" shows all.
    """
    is_kept = re.compile(rf"\.(?:{'|'.join(KEEPERS)})\.").search
    is_shown = bool if role in ("", *KEEPERS) else lambda name: is_kept(name) is not None
    reports = [
        Heard(service=service, last_ms=last_ms, silent_s=round(age_s, 1))
        for service, last_ms, age_s in SERVICE_REPORTS.with_age(client, of=is_shown)
    ]
    return sorted(reports, key=_order)


def _order(report: Heard) -> tuple[int, str, str]:
    service = report.service
    return (ROLES.index(service.role) if service.role in ROLES else len(ROLES), service.host, service.name)


def competing_services(reports: Iterable[Heard]) -> list[tuple[Service, Service]]:
    """Pairs of producers, and of writers, that serve the same runs at the same time."""
    alike: dict[tuple[str, str], list[Heard]] = defaultdict(list)
    for report in reports:
        if report.service.role in KEEPERS:
            alike[report.service.role, report.service.run].append(report)
    return [
        (first.service, other.service)
        for group in alike.values()
        for first, other in combinations(group, 2)
        if first.is_beside(other)
    ]


def shared_devices(reports: Iterable[Heard]) -> list[tuple[Heard, Heard, list[str]]]:
    """Pairs of workers with the same devices, and those devices; they share them if one `is_beside` the other.

    A GPU is known by its UUID, because jobs on one machine may each see another GPU as cuda:0; a device without one by
    the machine's name.
    """
    users: dict[str, list[Heard]] = defaultdict(list)
    names: dict[str, str] = {}
    for report in reports:
        for device in report.service.devices if report.service.role == "worker" else ():
            identity = device.uuid or f"{report.service.host} {device.device}"
            is_used = device.state not in ("given_up", "over") and not device.device.startswith("sim:")
            if is_used and report not in users[identity]:
                users[identity].append(report)
                names[identity] = device.device
    pairs: dict[tuple[str, str], tuple[Heard, Heard, list[str]]] = {}
    for identity, group in users.items():
        for first, other in combinations(group, 2):
            pair = pairs.setdefault((first.service.name, other.service.name), (first, other, []))
            pair[2].append(names[identity])
    return list(pairs.values())


def hosts_of(pair: tuple[Service, Service]) -> str:
    """Both hosts, for people; with process ids where the names are equal."""
    if pair[0].host != pair[1].host:
        return " and ".join(sorted(service.host for service in pair))
    return " and ".join(f"{service.host} (process {service.pid})" for service in pair)
