"""What the broker knows across runs: the runs that were announced, and the workers that are heard of."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, NotRequired, Required, TypedDict, cast

import redis
from msgspec import Meta

from core import wire
from core.errors import EmbqError, MalformedError
from core.models import ModelConfig
from core.queue import keys
from core.queue.keys import RATES, RUNS, WORKERS, run_key, worker_key
from core.queue.scripts import Script
from core.rows.spec import RowSpec
from core.run.control import LEAST_PRIORITY, MOST_PRIORITY, PRIORITY
from core.run.layout import INPUTS
from core.storage.paths import place
from core.wire import Count, PathText, RunId, Seconds, ShortText, UnitCount, UnitNumber, Word, WorkerName

RECORD = "run record"
"""What messages call it."""

_Value = bytes | None
Share = Annotated[float, Meta(ge=0, le=1e6)]
"""Part of a time; a little above 1 by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a service must know of a run before it has seen the output folder.

    Attributes:
        run: run id.
        output: absolute path of the output folder.
        model: what the workers load.
        units: number of units.
        retries: units among them that do samples of others again.
        rows: what the run's rows hold.
    """

    run: RunId
    output: PathText
    model: ModelConfig
    units: UnitCount
    rows: RowSpec = RowSpec()  # noqa: RUF009 - it is frozen
    retries: UnitCount = 0

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps(
            {
                "v": keys.VERSION,
                "run": self.run,
                "output": self.output,
                **self.model.describe(),
                "rows": self.rows.describe(),
                "units": self.units,
                "retries": self.retries,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> RunRecord | None:
        """The record in `text`; None where another version of embq wrote it (see `foreign_runs`).

        Raises MalformedError for anything else.
        """
        fields = wire.read_version(text, keys.VERSION, what=RECORD)
        if fields is None:
            return None
        record = wire.convert(cls, {"rows": None, "retries": None, **fields, "model": fields}, what=RECORD)
        try:
            same = str(place(record.output)) == record.output
        except EmbqError as error:
            raise wire.malformed(RECORD, error) from error
        if not same:
            raise wire.malformed(RECORD, "its output is not an absolute path")
        if INPUTS in PurePosixPath(record.output).parts:
            raise wire.malformed(RECORD, f"its output lies in {INPUTS}, which holds what laptops send")
        return record


def register(client: redis.Redis, record: RunRecord) -> None:
    """Make a run known to the resident services; repeating it changes nothing."""
    client.hset(RUNS, record.run, record.to_json())


def register_again(client: redis.Redis, record: RunRecord) -> bool:
    """Make a run known that the broker has forgotten; False where it has not: another version of embq has it now."""
    return bool(client.hsetnx(RUNS, record.run, record.to_json()))


def registered(client: redis.Redis) -> dict[str, RunRecord]:
    """All runs that the broker knows, by id; what is no record of that id is skipped."""
    return records_of(cast("dict[bytes, bytes]", client.hgetall(RUNS)))


def records_of(raw: Mapping[bytes, bytes]) -> dict[str, RunRecord]:
    """The records among what the hash of runs holds, by id."""
    found = {}
    for run, text in raw.items():
        try:
            if (record := RunRecord.from_json(text)) is not None:
                if record.run.encode() != run:
                    raise wire.malformed(RECORD, f"it stands under another id than its own, {record.run}")
                found[record.run] = record
        except MalformedError as error:
            wire.skipped(RECORD, run, error)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """How much of a run waits, and for what; see `meta` in `core.queue.keys`.

    Attributes:
        state: "" where the broker has no queue of the run, or none that can be understood.
    """

    state: Word = ""
    priority: Annotated[int, Meta(ge=LEAST_PRIORITY, le=MOST_PRIORITY)] = PRIORITY
    cursor: Count = 0
    total: Count = 0
    bytes: Annotated[int, Meta(ge=-(2**62), le=2**62)] = 0
    limit_bytes: Count = 0
    limit_entries: Count = 0

    FIELDS: ClassVar = ("state", "priority", "cursor", "total", "bytes", "limit_bytes", "limit_entries")

    @classmethod
    def of(cls, run: str, values: Sequence[_Value]) -> Backlog:
        """What the broker answers when it is asked for `FIELDS` of a run's `meta`."""
        raw = {name.encode(): value for name, value in zip(cls.FIELDS, values, strict=True) if value is not None}
        try:
            return wire.read_hash(cls, raw, what="queue of a run")
        except MalformedError as error:
            wire.skipped("queue of a run", run, error)
            return cls()

    @property
    def unclaimed(self) -> int:
        """Units that were never hinted; some of them may be done."""
        return max(0, self.total - self.cursor)


def units_unclaimed(client: redis.Redis, runs: Iterable[str]) -> int:
    """Units of runs that are running which were never hinted; some of them may be done."""
    listed = list(runs)
    with client.pipeline(transaction=False) as pipe:
        for run in listed:
            pipe.hmget(run_key(run, "meta"), Backlog.FIELDS)
        found = [Backlog.of(run, values) for run, values in zip(listed, pipe.execute(), strict=True)]
    return sum(one.unclaimed for one in found if one.state == "running")


class ModelShare(TypedDict):
    """A worker's work for one run: its speed, the units in hand and their size, (u, token, tokens done) of each."""

    tokens_per_s: wire.Rate
    units: Count
    size: Count
    begun: list[tuple[UnitNumber, ShortText, Count]]
    in_batch: Count


class TimeSpent(TypedDict):
    """What held a worker up over a time, in shares of it, see the table of `limit_detail` in docs/operations.md."""

    limit: NotRequired[Word]
    seconds: NotRequired[Seconds]
    causes: dict[Word, Share]
    stages: dict[Word, dict[Word, Share]]
    cores_needed: NotRequired[Count]
    cores_exact: NotRequired[bool]


class Attribution(TypedDict):
    """What limits a worker, late and over its whole time."""

    threads: Count
    cores: Count
    decode: Word
    spent: NotRequired[dict[Word, dict[Word, Seconds]]]
    late: TimeSpent
    whole: TimeSpent


class WorkerReport(TypedDict, total=False):
    """What a worker says of itself; other fields are dropped."""

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
    unit_s: Annotated[float, Meta(ge=1e-6, le=1e9)]
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


def report_worker(
    client: redis.Redis, name: str, said: dict[str, Any], *, life_s: float, scripts: Mapping[str, Script]
) -> None:
    """Keep what a worker says of itself for `life_s` seconds; taken also while the server is out of memory."""
    scripts["report"](
        keys=[WORKERS, worker_key(name)], args=[name, json.dumps(said), int(life_s * 1000)], client=client
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What one worker last measured of a model on a kind of device.

    Attributes:
        device: the model of the device.
        rows_per_s: rows with units in hand all the time.
        dims: numbers of a row's vectors together.
    """

    device: ShortText
    rows_per_s: wire.Rate
    dims: Count


def report_rate(client: redis.Redis, model: ModelConfig, rate: Rate, *, scripts: Mapping[str, Script]) -> None:
    """Keep a measured speed; it outlives the worker, and of many models some are forgotten."""
    scripts["rate"](keys=[RATES], args=[f"{model.queue_key} {rate.device}", wire.write(rate)], client=client)


def measured_rates(client: redis.Redis, model: ModelConfig) -> list[Rate]:
    """The speeds that were measured of a model, by device."""
    raw = cast("dict[bytes, bytes]", client.hgetall(RATES))
    prefix = f"{model.queue_key} ".encode()
    ours = {field: text for field, text in sorted(raw.items()) if field.startswith(prefix)}
    return list(wire.read_each(Rate, ours, what="measured rate").values())


def fresh_workers(client: redis.Redis, *, within_s: float) -> list[tuple[WorkerReport, float]]:
    """What each worker said of itself that has reported within that time, and how many seconds ago it did."""
    fresh = {name: age for name, age in silences(client).items() if age <= within_s}
    return [(report, fresh[name]) for name, report in _reports(client, fresh).items()]


def live_workers(client: redis.Redis) -> list[dict[str, Any]]:
    """What each worker last said of itself that is heard of, and how many seconds ago it did, as `silent_s`."""
    ages = silences(client)
    return [{**report, "silent_s": round(ages[name], 1)} for name, report in _reports(client, ages).items()]


def reports_of(texts: Mapping[str, bytes | None]) -> dict[str, WorkerReport]:
    """The reports among what the keys of some workers hold, by name; what is no report of that worker is skipped."""
    found = {}
    for name, text in texts.items():
        if text is None:
            continue
        try:
            report = wire.read(WorkerReport, text, what="worker report")
            if report["name"] != name:
                raise wire.malformed("worker report", f"it is of another worker, {report['name']}")
            found[name] = report
        except MalformedError as error:
            wire.skipped("worker report", name, error)
    return found


def _reports(client: redis.Redis, names: Iterable[str]) -> dict[str, WorkerReport]:
    return reports_of(said_by(client, names, worker_key))


def silences(client: redis.Redis) -> dict[str, float]:
    """Name of each worker that is listed -> seconds since it reported."""
    now_ms, scored = listed(client, WORKERS)
    return {name: max(0.0, (now_ms - at_ms) / 1000) for name, at_ms in scored.items()}


def listed(client: redis.Redis, key: str) -> tuple[int, dict[str, float]]:
    """ms by the broker's clock, and of the list `WORKERS` or `SERVICES` each name with the ms of its last report."""
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.zrange(key, 0, -1, withscores=True)
        (seconds, micros), scored = cast("tuple[tuple[int, int], list[tuple[bytes, float]]]", pipe.execute())
    return seconds * 1000 + micros // 1000, names_of(scored)


def names_of(scored: Iterable[tuple[bytes, float]]) -> dict[str, float]:
    """The names of reporters among the members of a list of them, with their scores; what is no name is skipped."""
    found = {}
    for raw, at_ms in scored:
        if _NAME.fullmatch(raw) and math.isfinite(at_ms):
            found[raw.decode()] = at_ms
        else:
            wire.skipped("name of a reporter", raw, "it holds other signs, or its time is not finite")
    return found


_NAME = re.compile(rb"[A-Za-z0-9._-]{1,200}")


def said_by(client: redis.Redis, names: Iterable[str], key: Callable[[str], str]) -> dict[str, bytes | None]:
    """What reporters last said of themselves; None where that was forgotten."""
    listed = list(names)
    if not listed:
        return {}
    return dict(zip(listed, cast("list[bytes | None]", client.mget([key(name) for name in listed])), strict=True))


def forget_silent(client: redis.Redis, key: str = WORKERS, report_key: Callable[[str], str] = worker_key) -> None:
    """Take off the list `key` what was not heard of for the life of a report, and what is no name of a reporter."""
    said = said_by(client, listed(client, key)[1], report_key)
    members = cast("list[bytes]", client.zrange(key, 0, -1))
    if gone := [one for one in members if not _NAME.fullmatch(one) or said.get(one.decode(), b"") is None]:
        client.zrem(key, *gone)


def sign_off(client: redis.Redis, name: str) -> None:
    """Forget a worker that has ended."""
    with client.pipeline() as pipe:
        pipe.zrem(WORKERS, name)
        pipe.delete(worker_key(name))
        pipe.execute()
