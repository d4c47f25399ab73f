"""The publish stage: encodes complete units and sends them to the writer."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np
import pyarrow as pa

from embq.core.broker.bounded import RESULT_BYTES
from embq.core.errors import ConfigError, EmbqError, OutputError
from embq.core.formats.part import UNIT_FORMATS, write_unit
from embq.core.queue.keys import VERSION
from embq.core.queue.result_stream import PART_SUFFIX, RESULT_SUFFIX, PublishVerdict
from embq.core.rows.results import embedding_columns, encode_batches, failure_batch, row_batch, row_schema
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo, load_run
from embq.core.service.log import Events
from embq.core.settings import spool_folder
from embq.core.storage.beneath import read_bytes, written
from embq.core.storage.durable import drop_in, writing
from embq.core.storage.hashing import HashingFile
from embq.core.storage.objects import ObjectPath
from embq.core.storage.paths import Place, place
from embq.core.units import Sample
from embq.worker.claim.lease import ASIDE, LeasedUnit, UnitPart
from embq.worker.meter.meter import Meter
from embq.worker.stages.read import Refuse, give_up

INLINE_BYTES = 256 * 1024
"""Results up to this size travel in the stream: a staging file would cost more than the broker's memory is worth."""

PIECE_BYTES = 8 * 1024 * 1024
"""Written at once, so that slow storage is not taken for storage that hangs."""

SYNC_BYTES = 32 * 1024 * 1024
"""Of a part, synced at once: for the same reason."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0

PART_BYTES = 16 * 1024 * 1024
"""Rows of that size are written as a part of the output by the worker, if it may; the writer only names the file."""

AWAY_S = 300.0
"""A store that refused a part, or did not answer, gets none for so long: its client takes a minute to give up."""

ASIDE_BYTES = 256 * 1024 * 1024
"""Results without room that are kept, of all runs. Beyond that the oldest unit is given back, for any worker to do it
again."""


_MORE_MEMORY = "raise maxmemory of the broker, share the output folder with the workers, or make smaller units"


@dataclass(slots=True)
class _Result:
    """The result of a unit, on its way to the writer.

    Attributes:
        data: its rows and failures, encoded; of one with a part its failures.
        part: its rows, until they are written as a part.
        staged: its file, once it is written.
    """

    lease: LeasedUnit
    data: bytes
    fields: dict[str, str | bytes | int]
    part: pa.RecordBatch | None = None
    staged: Place | None = None

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return len(self.data) + (0 if self.part is None else int(self.part.nbytes))


@dataclass(slots=True)
class _Full:
    """A run whose stream or disk is full, with the results that wait for room, oldest first."""

    waiting: deque[_Result] = field(default_factory=deque)
    wait_s: float = FIRST_WAIT_S
    again_at: float = 0.0


class Publisher:
    """The last stage."""

    def run(self, lease: LeasedUnit) -> None:
        """Publish one complete unit and end its lease, or keep both until there is room."""
        raise NotImplementedError

    def full_runs(self) -> frozenset[str]:
        """The runs that have no room for results now."""
        return frozenset()

    def again(self) -> None:
        """Publish what was kept, as far as there is room now."""


class PublishStage(Publisher):
    """Encodes results and hands them to the writer.

    Args:
        transport: "payload" (through the broker), "staging" (a file in the output folder) or "auto": a file where the
            result is large and this machine sees the writer's folder.
        dims: output of the model -> vector length.
        version: of embq, for what is written as a part.
        finished: called for each unit whose result was taken.
        refuse: gives back a unit whose result cannot be left in the output's storage from this machine.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        fingerprint: str,
        dims: Mapping[str, int],
        transport: str,
        version: str = "",
        finished: Callable[[], None] = lambda: None,
        refuse: Refuse = give_up,
    ) -> None:
        self.meter = meter
        self.fingerprint = fingerprint
        self.dims = dims
        self.transport = transport
        self.version = version
        self.finished = finished
        self.refuse = refuse
        self.log = Events("worker")
        self._shared_from: dict[tuple[str, str, Place], float] = {}
        self._infos: dict[str, RunInfo] = {}
        self._full: dict[str, _Full] = {}

    def full_runs(self) -> frozenset[str]:
        """The runs that have no room for results now: what is claimed of them could not be published."""
        return frozenset(self._full)

    def run(self, lease: LeasedUnit) -> None:
        """Publish one complete unit, or set its result aside where its run has no room for it."""
        with self.meter.times.at("publish", "busy"):
            with self.meter.stage("publish", [UnitPart(lease)]):
                rows, failures = self._rows(lease), failure_batch(lease.failures)
                data = b"" if rows.nbytes >= PART_BYTES else encode_batches(rows, failures)
            part = None
            if not data:
                # Without naming the unit: storage that hangs is not its fault. A store's client gives up by itself.
                in_store = isinstance(place(lease.record.output), ObjectPath)
                with nullcontext() if in_store else self.meter.stage("publish"):
                    part = rows if self._may_write_part(lease) else None
                with self.meter.stage("publish", [UnitPart(lease)]):
                    data = encode_batches(rows, failures) if part is None else encode_batches(failures)
            fields: dict[str, str | bytes | int] = {
                "v": VERSION,
                "unit_id": lease.unit_id,
                "rows": len(lease.samples),
                "failures": len(lease.failures),
                "truncated": lease.truncated,
                "tokens": lease.tokens,
                "fingerprint": self.fingerprint,
                **({"unread": lease.unread} if lease.unread else {}),
            }
            lease.forget_rows()
            result = _Result(lease, data, fields, part)
            if lease.run not in self._full and self._offer(result):
                return
            full = self._full.setdefault(lease.run, _Full(again_at=time.monotonic() + FIRST_WAIT_S))
            full.waiting.append(result)
            lease.stage = ASIDE
            self._make_room()

    def again(self) -> None:
        """Offer what was set aside, as far as it is time to; a run that is full holds up no other."""
        for run, full in list(self._full.items()):
            while full.waiting and full.again_at <= time.monotonic():
                with self.meter.times.at("publish", "busy"):
                    if not self._offer(full.waiting[0]):
                        full.wait_s = min(LONGEST_WAIT_S, full.wait_s * 2)
                        full.again_at = time.monotonic() + full.wait_s
                        break
                    full.waiting.popleft()
                    full.wait_s = FIRST_WAIT_S
            if not full.waiting:
                del self._full[run]

    def _make_room(self) -> None:
        """Give back the oldest units while more is set aside than there is memory for, but for the last one."""
        while len(waiting := [unit for full in self._full.values() for unit in full.waiting]) > 1:
            if sum(unit.bytes for unit in waiting) <= ASIDE_BYTES:
                return
            run, full = next(iter(self._full.items()))
            given_up = full.waiting.popleft()
            self.log.warning("result_given_up", run=run, u=given_up.lease.u, why="its run has no room for it")
            if given_up.staged is not None:
                drop_in(given_up.staged.parent, given_up.staged.name)
            given_up.lease.release()
            if not full.waiting:
                del self._full[run]

    def _offer(self, result: _Result) -> bool:
        """Hand a result to the writer, whatever the answer is; False if there is no room for it now."""
        lease = result.lease
        if lease.lost:
            verdict = PublishVerdict.LOST
        else:
            if result.part is not None and isinstance(place(lease.record.output), ObjectPath):
                self._put(result)
            if result.staged is None and (result.part is not None or self._use_file(lease, len(result.data))):
                try:
                    result.staged = self._staged(result)
                except ConfigError as error:
                    self.refuse(lease, error)
                    return True
                if result.staged is None:
                    return False
            size = len(result.data)
            # A large result is not sent only to find that there is no room for it.
            if size > INLINE_BYTES and not lease.ledger.results.has_room():
                return False
            has_data = result.staged is None or result.staged.suffix == PART_SUFFIX
            if has_data and size > RESULT_BYTES:
                code, how = "result_too_large", "let workers share the output folder, or make smaller units"
                message = f"its rows have {size:,} bytes, and {RESULT_BYTES:,} travel through the broker: {how}"
                lease.release(failed=(code, message))
                return True
            fields = {**result.fields, "data": result.data} if has_data else result.fields
            verdict = lease.publish(fields, size=size)
            if verdict is PublishVerdict.NO_MEMORY and lease.run not in self._full:
                self.log.warning("broker_full", run=lease.run, u=lease.u, bytes=size, next=_MORE_MEMORY)
            if verdict.is_full:
                return False
        if verdict is PublishVerdict.ACCEPTED:
            self.meter.unit_done(len(lease.failures))
            self.finished()
        else:
            # Another attempt's result stands, or the lease is gone: only our own file goes.
            if result.staged is not None:
                drop_in(result.staged.parent, result.staged.name)
            self.log.info("result_not_taken", run=lease.run, u=lease.u, answer=verdict.value)
        lease.end()
        return True

    def _rows(self, lease: LeasedUnit) -> pa.RecordBatch:
        model, rows = lease.record.model, lease.record.rows
        outputs = model.output_names
        compared = model.compared if rows.similarity else {}
        schema = row_schema(outputs, self.dims, rows, compared=tuple(compared), chunked=model.chunking is not None)
        order = sorted(range(len(lease.samples)), key=lambda i: _place(lease.samples[i]))
        in_order = order == list(range(len(order)))
        samples = lease.samples if in_order else [lease.samples[i] for i in order]
        columns = {**dict(zip(embedding_columns(outputs), outputs, strict=True)), **{name: name for name in compared}}
        vectors = {}
        for column, name in columns.items() if samples else ():
            joined = np.concatenate(lease.vectors[name])
            vectors[column] = joined if in_order else joined[order]
        return row_batch(samples, vectors, schema, lease.record.rows.columns)

    def _use_file(self, lease: LeasedUnit, size: int) -> bool:
        if self.transport == "payload":
            return False
        if self.transport == "staging":
            return True
        return size > INLINE_BYTES and self._shares_storage(lease, Layout(place(lease.record.output)).staging)

    def _may_write_part(self, lease: LeasedUnit) -> bool:
        """Whether the worker may write rows as a part of the output."""
        layout = Layout(place(lease.record.output))
        if (
            self.transport == "payload"
            or not layout.takes_parts
            or not self._shares_storage(lease, layout.staged_parts)
        ):
            return False
        if lease.run not in self._infos:
            try:
                self._infos[lease.run] = load_run(layout.root)
            except (EmbqError, OSError):
                if isinstance(layout.staged_parts, ObjectPath):
                    self._shared_from[lease.run, lease.gen, layout.staged_parts] = time.monotonic() + AWAY_S
                return False
        return self._infos[lease.run].format in UNIT_FORMATS

    def _shares_storage(self, lease: LeasedUnit, folder: Place) -> bool:
        """Whether files can be left for the writer; looked at once per generation of a run, and after `AWAY_S`."""
        key = (lease.run, lease.gen, folder)
        if key not in self._shared_from:
            shared = shares_storage(folder, lease.ledger.meta().get("nonce", ""))
            self._shared_from[key] = -inf if shared else inf
        return self._shared_from[key] <= time.monotonic()

    def _put(self, result: _Result) -> None:
        """Put a part into the object store. Where that is not possible, its rows go the way of smaller ones."""
        lease, rows = result.lease, result.part
        assert rows is not None
        try:
            result.staged = self._stage(result)
        except OutputError as error:
            folder = Layout(place(lease.record.output)).staged_parts
            self._shared_from[lease.run, lease.gen, folder] = time.monotonic() + AWAY_S
            self.log.warning("part_not_put", run=lease.run, u=lease.u, why=error.message)
            result.data, result.part = encode_batches(rows, failure_batch(lease.failures)), None

    def _staged(self, result: _Result) -> Place | None:
        """The staging file of a result, which its fields name then; None if the disk is full.

        A full disk is full for every worker of the output, so none could do better with the unit: the result is kept
        and the lease with it. Any other error is this machine's own, and ends the process, which gives its units back.
        """
        try:
            # Without naming the unit: storage that hangs is not its fault.
            with self.meter.stage("publish"):
                return self._stage(result)
        except OutputError as error:
            if error.code != "no_space":
                raise
            result.lease.ledger.disk_full()
            if result.lease.run not in self._full:
                self.log.warning("staging_full", run=result.lease.run, why=error.message, bytes=result.bytes)
            return None

    def _stage(self, result: _Result) -> Place:
        lease, layout = result.lease, Layout(place(result.lease.record.output))
        folder, suffix = (layout.staging, RESULT_SUFFIX) if result.part is None else (layout.staged_parts, PART_SUFFIX)
        path = folder / f"{lease.unit_id}.{lease.token.replace(':', '_')}{suffix}"
        with writing(path):
            if isinstance(path, ObjectPath):
                with TemporaryFile(dir=spool_folder()) as spool:
                    digest = self._write(result, spool)
                    spool.seek(0)  # which some systems share with any opener of the descriptor
                    path.upload(Path(f"/dev/fd/{spool.fileno()}"))
            else:
                name = f"{folder.name}/{path.name}"
                with written(path.parents[1], name, temporary=f".{path.name}") as raw:
                    digest = self._write(result, raw, synced=result.part is not None)
        result.fields |= {"ref": path.name, "sha256": digest}
        result.part = None
        return path

    def _write(self, result: _Result, raw: IO[bytes], *, synced: bool = False) -> str:
        """Write the file of a result; returns its SHA-256.

        Only parts are synced: a result that a power loss destroys fails its hash and is only computed again.
        """
        end = 0

        def on_progress() -> None:
            nonlocal end
            if synced and raw.tell() - end >= SYNC_BYTES:
                end = raw.tell()
                _sync(raw)
            self.meter.board.advance()

        file = HashingFile(raw, on_progress)
        if result.part is None:
            for start in range(0, len(result.data), PIECE_BYTES):
                file.write(memoryview(result.data)[start : start + PIECE_BYTES])
        else:
            unit_ids = pa.repeat(pa.scalar(result.lease.unit_id), result.part.num_rows)
            table = pa.Table.from_batches([result.part]).append_column("unit_id", unit_ids)
            info = self._infos[result.lease.run]
            write_unit(info.format, table, file, info.notes(fingerprint=self.fingerprint, version=self.version))
        raw.flush()
        if synced:
            _sync(raw)
        return file.hexdigest()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def shares_storage(folder: Place, nonce: str) -> bool:
    """Whether this machine sees the staging folder, or that in an object store, that the writer sees, and may leave
    files in it; whether a store takes them shows only when one is put there.

    Args:
        nonce: what the writer has left there, as the broker knows it; "" if there is no writer.
    """
    try:
        stored = read_bytes(folder.parent, f"{folder.name}/.shared", most_bytes=1_000).decode()
    except (OSError, EmbqError, UnicodeDecodeError):
        return False
    return bool(nonce) and stored == nonce and (isinstance(folder, ObjectPath) or os.access(folder, os.W_OK))


def _place(sample: Sample) -> tuple[int, int]:
    """Sort key of a row among those of its unit."""
    return sample.ordinal, 0 if sample.passage is None else sample.passage.number
