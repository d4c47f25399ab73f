"""What the broker knows across runs: the runs that were announced, and the workers that are heard of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import redis

from core import protocol
from core.models import ModelConfig
from core.protocol import RATES, RUNS, WORKERS, run_key, worker_key
from core.rows import RowSpec
from core.scripts import Script


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

    run: str
    output: str
    model: ModelConfig
    units: int
    rows: RowSpec = RowSpec()  # noqa: RUF009 - it is frozen
    retries: int = 0

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps(
            {
                "v": protocol.VERSION,
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
        """The record in `text`; None where another version of embq wrote it (`core.fleet.foreign_runs` tells of it)."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("v") != protocol.VERSION:
            return None
        return cls(
            run=data["run"],
            output=data["output"],
            model=ModelConfig.from_description(data),
            rows=RowSpec.from_description(data["rows"]),
            units=data["units"],
            retries=data["retries"],
        )


def register(client: redis.Redis, record: RunRecord) -> None:
    """Make a run known to the resident services; repeating it changes nothing."""
    client.hset(RUNS, record.run, record.to_json())


def register_again(client: redis.Redis, record: RunRecord) -> bool:
    """Make a run known that the broker has forgotten; False where it has not: another version of embq has it now."""
    return bool(client.hsetnx(RUNS, record.run, record.to_json()))


def registered(client: redis.Redis) -> dict[str, RunRecord]:
    """All runs that the broker knows, by id."""
    raw = cast("dict[bytes, bytes]", client.hgetall(RUNS))
    records = (RunRecord.from_json(text) for text in raw.values())
    return {record.run: record for record in records if record is not None}


def units_unclaimed(client: redis.Redis, runs: Iterable[str]) -> int:
    """Units of runs that are running which were never hinted; some of them may be done."""
    with client.pipeline(transaction=False) as pipe:
        for run in runs:
            pipe.hmget(run_key(run, "meta"), ["state", "total", "cursor"])
        answers = pipe.execute()
    return sum(max(0, int(total) - int(cursor)) for state, total, cursor in answers if state == b"running")


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

    device: str
    rows_per_s: float
    dims: int


def report_rate(client: redis.Redis, model: ModelConfig, rate: Rate, *, scripts: Mapping[str, Script]) -> None:
    """Keep a measured speed; it outlives the worker, and of many models some are forgotten."""
    said = {"device": rate.device, "rows_per_s": rate.rows_per_s, "dims": rate.dims}
    scripts["rate"](keys=[RATES], args=[f"{model.queue_key} {rate.device}", json.dumps(said)], client=client)


def measured_rates(client: redis.Redis, model: ModelConfig) -> list[Rate]:
    """The speeds that were measured of a model, by device."""
    raw = cast("dict[bytes, bytes]", client.hgetall(RATES))
    prefix = f"{model.queue_key} ".encode()
    return [Rate(**json.loads(text)) for field, text in sorted(raw.items()) if field.startswith(prefix)]


def fresh_workers(client: redis.Redis, *, within_s: float) -> list[tuple[dict[str, Any], float]]:
    """What each worker said of itself that has reported within that time, and how many seconds ago it did."""
    fresh = {name: age for name, age in _ages(client).items() if age <= within_s}
    return [(json.loads(text), fresh[name]) for name, text in _said(client, fresh).items() if text is not None]


def live_workers(client: redis.Redis) -> list[dict[str, Any]]:
    """What each worker last said of itself that is heard of, and how many seconds ago it did, as `silent_s`."""
    ages = _ages(client)
    alive = {name: text for name, text in _said(client, ages).items() if text is not None}
    return [{**json.loads(text), "silent_s": round(ages[name], 1)} for name, text in alive.items()]


def forget_silent(client: redis.Redis) -> None:
    """Take workers off the list that were not heard of for three leases."""
    if gone := [name for name, text in _said(client, _ages(client)).items() if text is None]:
        client.zrem(WORKERS, *gone)


def _ages(client: redis.Redis) -> dict[str, float]:
    """Name of each worker that is listed -> seconds since it reported."""
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.zrange(WORKERS, 0, -1, withscores=True)
        (seconds, micros), scored = cast("tuple[tuple[int, int], list[tuple[bytes, float]]]", pipe.execute())
    now = seconds + micros / 1e6
    return {name.decode(): max(0.0, now - at_ms / 1000) for name, at_ms in scored}


def _said(client: redis.Redis, names: Iterable[str]) -> dict[str, bytes | None]:
    """What workers last said of themselves; None where that was forgotten."""
    listed = list(names)
    if not listed:
        return {}
    said = cast("list[bytes | None]", client.mget([worker_key(name) for name in listed]))
    return dict(zip(listed, said, strict=True))


def sign_off(client: redis.Redis, name: str) -> None:
    """Forget a worker that has ended."""
    with client.pipeline() as pipe:
        pipe.zrem(WORKERS, name)
        pipe.delete(worker_key(name))
        pipe.execute()
