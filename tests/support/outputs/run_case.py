"""One run in an output folder, and those who work on it: the real ledger, feeder and writer, and simulated workers."""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from rq import Queue
from rq.serializers import JSONSerializer

from embq.core.formats.folders import row_folders
from embq.core.formats.part import write_unit
from embq.core.models import ModelConfig
from embq.core.queue.hints import Hint, HintJob, drop, hint_queue
from embq.core.queue.keys import VERSION
from embq.core.queue.ledger import Ledger, new_token
from embq.core.queue.result_stream import PART_SUFFIX, PublishVerdict
from embq.core.queue.runs import RunRecord, register
from embq.core.queue.scripts import load_scripts
from embq.core.rows.results import encode_batches, failure_batch, row_batch, row_schema
from embq.core.rows.spec import RowSpec
from embq.core.run.commit_log import CommitLog
from embq.core.run.layout import Layout
from embq.core.run.manifest import first_segment_writer
from embq.core.run.reader import row_tables
from embq.core.run.run_info import RunInfo, run_id
from embq.core.storage.hashing import HashingFile
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import Place, opened
from embq.core.units import Failure, Sample, Unit
from embq.producer.feeder import Feeder
from embq.worker.stages import publish
from embq.writer.run_writer import RunWriter
from tests.support.fakes.clock import FakeClock

DIM = 4
FINGERPRINT = "f" * 32
LEASE_S = 20.0


def unit_of(number: int, samples: int = 3) -> Unit:
    return Unit(kind="lines", source=f"/nowhere/{number}.txt", stop=9, samples=samples)


def sample(number: int, ordinal: int) -> Sample:
    return Sample(ordinal=ordinal, key=f"{number}:{ordinal}", text=f"text {ordinal} of {number}")


def vector(number: int, ordinal: int) -> list[float]:
    """The embedding that every simulated worker computes for a sample; exact in float16."""
    return [number, ordinal, number - ordinal, 0.5]


@dataclass(slots=True)
class RunCase:
    """One run in an output folder, with simulated workers around the real ledger, feeder and writer."""

    client: redis.Redis
    info: RunInfo
    layout: Layout
    record: RunRecord
    units: list[Unit]
    ledger: Ledger
    clock: FakeClock = field(default_factory=FakeClock)

    @property
    def gen(self) -> str:
        return self.ledger.gen()

    @property
    def queue(self) -> Queue:
        return hint_queue(self.client, self.record.model.queue_key)

    def key(self, part: str) -> str:
        return next(key for key in self.ledger.keys if key.endswith(f":{part}"))

    def build(self, gen: str = "1-0", done: bytes = b"") -> None:
        """Make the queue without a writer."""
        register(self.client, self.record)
        self.ledger.rebuild(gen=gen, total=len(self.units), done=done, counters={"fingerprint": ""})

    def writer(self, **options: object) -> RunWriter:
        """A writer; any that was there before counts as killed, its lock lapsed."""
        self.client.delete(f"embq:{{{self.info.run}}}:writer")
        return RunWriter(
            self.client,
            self.record,
            version="test",
            clock=self.clock,
            **options,  # type: ignore[arg-type]
        )

    def feeder(self, **options: object) -> Feeder:
        return Feeder(self.client, lease_s=0.0, only=self.info.run, **options)  # type: ignore[arg-type]

    def pop(self) -> Hint | None:
        """Take a hint from RQ's queue and forget it there, as a worker does."""
        found = Queue.dequeue_any([self.queue], None, self.client, job_class=HintJob, serializer=JSONSerializer)
        if found is None:
            return None
        with self.client.pipeline() as pipe:
            drop(pipe, self.queue, found[0].id)
            pipe.execute()
        return Hint.from_job(found[0])

    def claim(self, u: int, worker: str = "alive", *, started: bool = True) -> str:
        """Get the lease on a unit, for certain."""
        token = new_token(self.gen, worker)
        assert self.ledger.claim(u, token, lease_s=LEASE_S, fingerprint=FINGERPRINT).granted
        if started:
            assert self.ledger.start([(u, token)]) == set()
        return token

    def data(self, u: int, failed: Sequence[int] = (), samples: int | None = None) -> bytes:
        """The result of a unit in which the samples with the ordinals `failed` have no embedding."""
        return encode_batches(*self._batches(u, failed, samples))

    def _batches(
        self, u: int, failed: Sequence[int] = (), samples: int | None = None
    ) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Its rows and failures."""
        count = self.units[u].samples if samples is None else samples
        assert count is not None
        good = [sample(u, i) for i in range(count) if i not in failed]
        vectors = np.array([vector(u, s.ordinal) for s in good], dtype=self.record.rows.dtype).reshape(len(good), DIM)
        failures = [Failure(ordinal=i, key=f"{u}:{i}", code="decode", message="no image") for i in failed]
        schema = row_schema(("text",), {"text": DIM}, self.record.rows)
        rows = row_batch(good, {"embedding": vectors}, schema, self.record.rows.columns)
        return rows, failure_batch(failures)

    def fields(self, u: int, failed: Sequence[int] = (), **changes: str | bytes | int) -> dict[str, str | bytes | int]:
        """Fields of the entry that a worker publishes for a unit."""
        fields: dict[str, str | bytes | int] = {
            "v": VERSION,
            "unit_id": self.units[u].unit_id,
            "rows": (self.units[u].samples or 0) - len(failed),
            "failures": len(failed),
            "fingerprint": FINGERPRINT,
            "data": self.data(u, failed),
        }
        return {**fields, **changes}

    def publish(self, u: int, token: str, failed: Sequence[int] = (), **changes: str | bytes | int) -> PublishVerdict:
        return self.ledger.publish(u, token, self.fields(u, failed, **changes), size=100)

    def publish_part(self, u: int, token: str, failed: Sequence[int] = ()) -> PublishVerdict:
        """Publish a unit whose rows the worker has written as a part."""
        rows, failures = self._batches(u, failed)
        unit_id = self.units[u].unit_id
        table = pa.Table.from_batches([rows]).append_column("unit_id", pa.repeat(pa.scalar(unit_id), rows.num_rows))
        name = f"{unit_id}.{token.replace(':', '_')}{PART_SUFFIX}"
        raw = io.BytesIO()
        file = HashingFile(raw)
        write_unit(self.info.format, table, file, self.info.notes(fingerprint=FINGERPRINT, version="test"))
        write(self.layout.staged_parts / name, raw.getvalue())
        data = encode_batches(failures)
        return self.publish(u, token, failed, ref=name, sha256=file.hexdigest(), data=data)

    def work_one(self, u: int, failed: Sequence[int] = (), worker: str = "alive", **changes: str | bytes | int) -> None:
        """One unit from claim to publish."""
        assert self.publish(u, self.claim(u, worker), failed, **changes) is PublishVerdict.ACCEPTED

    def die(self, worker: str, ordinal: int | None = None) -> int:
        """A worker dies under its supervisor's eyes, with all it had begun in hand; gives the leases freed."""
        held = {**self.client.hgetall(self.key("owner")), **self.client.hgetall(self.key("spare"))}
        tokens = [token.decode() for token in held.values() if f":{worker}:" in token.decode()]
        return self.ledger.abandon(worker, "killed by signal 9", blame=dict.fromkeys(tokens, ordinal))

    def age(self) -> None:
        """Much time passes for leases, delays, hints and published results."""
        for part in ("hinted", "due"):
            for u, score in self.client.zrange(self.key(part), 0, -1, withscores=True):
                if score > 1:
                    self.client.zadd(self.key(part), {u: 1}, xx=True)

    def work_off_hints(self, worker: str = "alive") -> None:
        """Do every unit that RQ hints at and that can be had."""
        while (hint := self.pop()) is not None:
            token = new_token(hint.gen, worker)
            if not self.ledger.claim(hint.u, token, lease_s=LEASE_S, fingerprint=FINGERPRINT).granted:
                continue
            if not self.ledger.start([(hint.u, token)]) and self.publish(hint.u, token) is PublishVerdict.NO_ROOM:
                self.ledger.release(hint.u, token)

    def finish(self, writer: RunWriter, rounds: int = 40, *, feeder: Feeder | None = None) -> None:
        """Feed, work and write until the run is closed."""
        feeder = feeder or self.feeder()
        for _ in range(rounds):
            if writer.finished:
                return
            feeder.tick()
            self.work_off_hints()
            self.clock.advance(31)
            writer.step()
            self.age()
        raise AssertionError(f"not finished after {rounds} rounds: {self.ledger.meta()}")

    def rows(self) -> list[tuple[int, str, list[float]]]:
        """(id, key, embedding) of every committed row, in order of the files."""
        names = ["id", "key", "embedding"]
        tables = row_tables(self.layout.root, names)
        return [row for table in tables for row in zip(*(table[name].to_pylist() for name in names), strict=True)]

    def failures(self) -> list[tuple[str, str]]:
        """(key, code) of every committed failure."""
        tables = [
            pq.read_table(opened(self.layout.root / file.path))
            for commit in CommitLog(self.layout).read()
            for file in commit.files
            if file.kind == "failures"
        ]
        merged = pa.concat_tables(tables).to_pylist() if tables else []
        return [(row["key"], row["code"]) for row in merged]

    def committed_units(self) -> list[int]:
        """The units of the log's records, in order; the log itself refuses one that comes twice."""
        CommitLog(self.layout).replay(len(self.units))
        return [unit.u for commit in CommitLog(self.layout).read() for unit in commit.units]

    def assert_exact(
        self,
        units: Sequence[int] | None = None,
        *,
        failures: Sequence[tuple[str, str]] = (),
        whole: Sequence[int] = (),
    ) -> None:
        """Every sample of the units (all, unless named) is a row exactly once, with its own vector and dense ids.

        Args:
            failures: (key, code) of what is a failure instead; the key is "" for a unit that failed whole.
            whole: these units.
        """
        numbers = range(len(self.units)) if units is None else units
        rows = self.rows()
        wanted = {f"{u}:{i}": vector(u, i) for u in numbers for i in range(self.units[u].samples or 0)}
        for key in [f"{u}:{i}" for u in whole for i in range(self.units[u].samples or 0)]:
            del wanted[key]
        for key in (key for key, _ in failures if key):
            del wanted[key]
        assert sorted(self.failures()) == sorted(failures)
        assert len(rows) == len(wanted)
        assert {key: values for _, key, values in rows} == wanted
        assert [id_ for id_, _, _ in rows] == list(range(len(rows)))
        assert sorted(self.committed_units()) == sorted(numbers)
        named = {file.path for commit in CommitLog(self.layout).read() for file in commit.files}
        folders = (*row_folders(self.layout, self.info), self.layout.failures)
        there = {f"{folder.name}/{path.name}" for folder in folders for path in folder.iterdir()}
        assert there == named
        assert list(self.layout.temporary.iterdir()) == []


def next_file_is(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the worker write its next staging file to `target`, such as a device that is full."""
    real = publish.written

    @contextmanager
    def elsewhere(*_: object, **_names: str) -> Iterator[IO[bytes]]:
        monkeypatch.setattr(publish, "written", real)
        with open(target, "wb") as file:
            yield file

    monkeypatch.setattr(publish, "written", elsewhere)


def write(path: Place, data: bytes) -> None:
    """Write a file or an object, in place of what was there."""
    path.replace(data) if isinstance(path, ObjectPath) else path.write_bytes(data)


MakeRun = Callable[..., RunCase]
"""Makes a run: number of units, then `samples`, `rows`, `format`, `part_rows`."""


def write_run(
    root: Place,
    units: Sequence[Unit],
    *,
    rows: RowSpec = RowSpec(),  # noqa: B008 - it is frozen
    format: str = "parquet",
    part_rows: int = 10_000,
) -> RunInfo:
    """Write a run without planning it."""
    layout = Layout(root)
    layout.make(layout.parts)
    segments = first_segment_writer(layout)
    summary = segments.write(units)
    info = RunInfo(
        run="",
        inputs=("nowhere",),
        options=(),
        model=ModelConfig(spec=f"stub:{DIM}?seed={secrets.token_hex(4)}", modalities=("text",), precision="fp32"),
        rows=rows,
        format=format,
        part_rows=part_rows,
        units=summary.units,
        samples=summary.samples,
        manifest_digest=summary.digest,
        version="test",
        created="2026-01-01T00:00:00+00:00",
        segments=tuple(segments.names),
    )
    info = replace(info, run=run_id(info.identity(), root))
    info.publish(layout)
    return info


def make_case(client: redis.Redis, root: Place, units: int = 8, *, samples: int = 3, **options: object) -> RunCase:
    """A run of a number of equal units with a model, and so a queue, of its own."""
    listed = [unit_of(number, samples) for number in range(units)]
    info = write_run(root, listed, **options)  # type: ignore[arg-type]
    record = RunRecord(run=info.run, output=str(root), model=info.model, rows=info.rows, units=units)
    ledger = Ledger(client, info.run, scripts=load_scripts(client))
    return RunCase(client=client, info=info, layout=Layout(root), record=record, units=listed, ledger=ledger)
