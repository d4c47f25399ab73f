"""Runs in the broker: the record that announces a run to the resident services, and how much of it waits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, cast

import redis
from msgspec import Meta

from embq.core import wire
from embq.core.errors import EmbqError, MalformedError
from embq.core.models import ModelConfig
from embq.core.queue import keys
from embq.core.queue.keys import ACTIVE, RUNS, run_key
from embq.core.rows.spec import RowSpec
from embq.core.run.control import LEAST_PRIORITY, MOST_PRIORITY, PRIORITY, RunState
from embq.core.run.layout import INPUTS
from embq.core.run.run_info import WorkerDefaults
from embq.core.storage.paths import place
from embq.core.wire import Count, PathText, RunId, ShortText, UnitCount

RECORD = "run record"
"""Noun for messages."""

_RUN_ID = re.compile(rb"[0-9a-f]{16}")

_Value = bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run, as far as a service must know it before it reads the output folder.

    Attributes:
        run: run id.
        output: absolute path of the output folder.
        model: config of the model that the workers load.
        units: number of units.
        retries: units among them that retry samples of others.
        rows: content of the run's rows.
        workers: defaults of its workers.
    """

    run: RunId
    output: PathText
    model: ModelConfig
    units: UnitCount
    rows: RowSpec = RowSpec()  # noqa: RUF009 - it is frozen
    retries: UnitCount = 0
    workers: WorkerDefaults = WorkerDefaults()  # noqa: RUF009 - it is frozen

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
                **({} if self.workers == WorkerDefaults() else {"workers": asdict(self.workers)}),
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> RunRecord | None:
        """The record in `text`; None if another version of embq wrote it (see `foreign_runs`).

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
    with client.pipeline() as pipe:
        pipe.hset(RUNS, record.run, record.to_json())
        pipe.sadd(ACTIVE, record.run)
        pipe.execute()


def register_again(client: redis.Redis, record: RunRecord) -> bool:
    """Announce a run that the broker has lost; False if it is there: it is over, or another version's."""
    is_lost = bool(client.hsetnx(RUNS, record.run, record.to_json()))
    if is_lost:
        client.sadd(ACTIVE, record.run)
    return is_lost


def go_on(client: redis.Redis, run: str) -> None:
    """Have the services look at a run that is registered."""
    client.sadd(ACTIVE, run)


def restore_active(client: redis.Redis) -> None:
    """Have the services look at every registered run that is not done: the broker may have lost which these are.

    Its cost grows with the runs that have ended; so it is for one service, and now and then.
    """
    runs = [run.decode() for run in cast("list[bytes]", client.hkeys(RUNS)) if _RUN_ID.fullmatch(run)]
    if missing := [run for run, work in zip(runs, backlogs(client, runs), strict=True) if work.state != RunState.DONE]:
        client.sadd(ACTIVE, *missing)


def end(client: redis.Redis, run: str, units: int) -> None:
    """Have the services look at a run no more, of which all `units` units are written."""
    client.srem(ACTIVE, run)
    # A producer that adds units registers the run again first, and then makes it active: one of both sees the other.
    raw = cast("bytes | None", client.hget(RUNS, run))
    record = records_of({run.encode(): raw}).get(run) if raw is not None else None
    if record is not None and record.units > units:
        client.sadd(ACTIVE, run)


def is_over(client: redis.Redis, run: str) -> bool:
    """Whether all units of a run are done, as the broker knows it."""
    return RunState.read(cast("bytes | None", client.hget(run_key(run, "meta"), "state"))) == RunState.DONE


def over(client: redis.Redis, runs: Iterable[str]) -> set[str]:
    """Those of some runs that are over and whose last commit the broker has seen, so that it knows all about them."""
    members = cast("set[bytes]", client.smembers(ACTIVE))
    listed = [run for run in runs if run.encode() not in members]
    with client.pipeline(transaction=False) as pipe:
        for run in listed:
            pipe.hget(run_key(run, "meta"), "last_commit_ms")
        return {run for run, last_commit in zip(listed, pipe.execute(), strict=True) if last_commit}


def active(client: redis.Redis) -> dict[str, RunRecord]:
    """The runs that are not over, by id; some that have just ended may be among them. Malformed records are skipped.

    The cost is that of these runs alone, however many have ended.
    """
    members = cast("set[bytes]", client.smembers(ACTIVE))
    runs = sorted(run for run in members if _RUN_ID.fullmatch(run))
    if not runs:
        return {}
    texts = cast("list[bytes | None]", client.hmget(RUNS, runs))
    return records_of({run: text for run, text in zip(runs, texts, strict=True) if text is not None})


def registered(client: redis.Redis) -> dict[str, RunRecord]:
    """All runs that the broker knows, by id; malformed records are skipped."""
    return records_of(cast("dict[bytes, bytes]", client.hgetall(RUNS)))


def records_of(raw: Mapping[bytes, bytes]) -> dict[str, RunRecord]:
    """The records in the hash of runs, by id; malformed ones are skipped."""
    records = {}
    for run, text in raw.items():
        try:
            if (record := _RECORDS.record(text)) is not None:
                if record.run.encode() != run:
                    raise wire.malformed(RECORD, f"it stands under another id than its own, {record.run}")
                records[record.run] = record
        except MalformedError as error:
            wire.skipped(RECORD, run, error)
    return records


class _RecordCache:
    """Records by their texts, which are read again and again.

    All are forgotten at the limit: if the oldest made room instead, a broker with a few runs more than fit would have
    every record parsed at every reading, because they are read in the same order each time.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._records: dict[bytes, RunRecord | None] = {}
        self._bytes = 0

    def record(self, text: bytes) -> RunRecord | None:
        """`RunRecord.from_json` of a text; raises as it does."""
        if text not in self._records:
            record = RunRecord.from_json(text)
            if self._bytes + len(text) > self._limit_bytes:
                self._records, self._bytes = {}, 0
            self._records[text] = record
            self._bytes += len(text)
            return record
        return self._records[text]


_RECORDS = _RecordCache(32 << 20)
"""Bytes of texts; a record has about 1,200, and takes three times as many in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRun:
    """A run that an embq of another protocol version has announced; services of this version do not serve it.

    Attributes:
        output: its output folder; "?" where its record has none.
        protocol: the version of its record.
    """

    run: str
    output: str
    protocol: str


def foreign_runs(client: redis.Redis) -> list[ForeignRun]:
    """The runs of other protocol versions; malformed records are skipped."""
    runs = []
    for run, text in sorted(cast("dict[bytes, bytes]", client.hgetall(RUNS)).items()):
        try:
            if wire.read_version(text, keys.VERSION, what="run record") is None:
                foreign = wire.read(_Foreign, text, what="run record")
                run_id = wire.convert(ShortText, wire.read_text(run, what="run record"), what="run record")
                runs.append(ForeignRun(run=run_id, output=foreign.output, protocol=str(foreign.v)))
        except MalformedError as error:
            wire.skipped("run record", run, error)
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Foreign:
    """The fields of a record in every version."""

    v: Count
    output: PathText = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The waiting part of a run; see `meta` in `embq.core.queue.keys`.

    Attributes:
        state: ABSENT if the broker has no queue of the run, or a malformed one.
    """

    state: RunState = RunState.ABSENT
    priority: Annotated[int, Meta(ge=LEAST_PRIORITY, le=MOST_PRIORITY)] = PRIORITY
    cursor: Count = 0
    total: Count = 0
    bytes: Annotated[int, Meta(ge=-(2**62), le=2**62)] = 0
    limit_bytes: Count = 0
    limit_entries: Count = 0

    FIELDS: ClassVar = ("state", "priority", "cursor", "total", "bytes", "limit_bytes", "limit_entries")

    @classmethod
    def of(cls, run: str, values: Sequence[_Value]) -> Backlog:
        """Parse the broker's answer for `FIELDS` of a run's `meta`."""
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


def backlogs(client: redis.Redis, runs: Sequence[str]) -> list[Backlog]:
    """The waiting part of each of some runs."""
    with client.pipeline(transaction=False) as pipe:
        for run in runs:
            pipe.hmget(run_key(run, "meta"), Backlog.FIELDS)
        return [Backlog.of(run, values) for run, values in zip(runs, pipe.execute(), strict=True)]


def units_unclaimed(client: redis.Redis, runs: Iterable[str]) -> int:
    """Units of runs that are running which were never hinted; some of them may be done."""
    return sum(backlog.unclaimed for backlog in backlogs(client, list(runs)) if backlog.state == RunState.RUNNING)
