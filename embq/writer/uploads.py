"""Receives uploads: runs, and inputs sent by value, from machines that cannot reach the output folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import redis

from embq.core.broker.embedded import kept_off
from embq.core.errors import InputError, OutputError
from embq.core.queue import uploads
from embq.core.queue.ledger import Ledger
from embq.core.queue.runs import is_over, register
from embq.core.queue.uploads import AddedUnits, Upload, UploadOutcome
from embq.core.run.control import PRIORITY, Control, load_control, save_control
from embq.core.run.layout import Layout, refuse_foreign_files
from embq.core.run.run_info import load_run
from embq.core.service.log import Events
from embq.core.storage.durable import output_error, try_lock
from embq.core.storage.paths import ANYWHERE, Outputs
from embq.writer.upload_assembly import UploadAssembly

RETRY_S = 10.0
"""An upload whose folder cannot be written is tried again after this long."""

BUSY_S = 1.0
"""An upload that waits for another plan to be made is tried again after this long."""

Add = Callable[[Path, Path, Callable[[], None], Callable[[], None]], AddedUnits]
"""Function that adds to the run in the first folder the units of the second that it lacks; it calls the third before,
and the fourth on progress. Only the producer compares plans, so the command that starts a writer passes it in."""


class Receiver:
    """Makes uploads durable, piece by piece, and announces complete runs.

    Args:
        add: adds to a run that is there.
        on_step: called on progress.
        outputs: where uploads may go.
    """

    def __init__(self, client: redis.Redis, add: Add, on_step: Callable[[], None], outputs: Outputs = ANYWHERE) -> None:
        self.client = client
        self._outputs = outputs
        self._add = add
        self._on_step = on_step
        self.log = Events("writer")
        self._arrivals: dict[str, UploadAssembly | None] = {}
        self._retry_at: dict[str, float] = {}

    def step(self) -> int:
        """Take the pieces that have arrived; returns the number of pieces and of uploads that ended."""
        names = uploads.names(self.client)
        self._arrivals = {name: arrival for name, arrival in self._arrivals.items() if name in names}
        count = 0
        for name in names:
            if self._retry_at.get(name, 0.0) > time.monotonic():
                continue
            try:
                if name not in self._arrivals:
                    self._arrivals[name] = self._arrival(name, uploads.announced(self.client, name))
                arrival = self._arrivals[name]
                count += 0 if arrival is None else self._attend(name, arrival)
            except (OutputError, OSError) as error:
                self._wait(name, error)
            except InputError as error:
                self._refuse(name, error.code, error.message)
            except redis.RedisError:
                raise
            except Exception as error:  # noqa: BLE001 - boundary of one upload: the others go on
                self.log.bug("bug", upload=name)
                self._refuse(name, "bug", f"the writer cannot take it: {type(error).__name__}; see its log")
        return count

    def _arrival(self, name: str, upload: Upload | None) -> UploadAssembly | None:
        """The upload that was announced under a name; None for one of another version."""
        if upload is None:
            return None
        self._outputs.check(upload.output)
        return UploadAssembly.of(name, upload)

    def _attend(self, name: str, arrival: UploadAssembly) -> int:
        layout = arrival.layout
        if arrival.grows:
            existing = load_run(layout.root)
            if existing.run == arrival.upload.run:
                return self._accept(name, arrival, AddedUnits(units=existing.units, samples=0, added=0))
            record = arrival.record
            if (record.model, record.rows.identity()) != (existing.model, existing.rows.identity()):
                raise InputError(f"{layout.root} holds another run, {existing.run}, of another model", code="other_run")
        taken = min(uploads.state(self.client, name).taken, arrival.pieces.count)
        if arrival.taken != taken or not uploads.has_writer(self.client, name):
            if not arrival.grows:
                refuse_foreign_files(layout)
            layout.make()
            arrival.scan(taken, self._on_step)
            uploads.confirm_pieces(self.client, name, arrival.taken)
        already_taken = arrival.taken
        count = arrival.write_pieces(lambda number: uploads.piece(self.client, name, number))
        if arrival.taken != already_taken:
            uploads.confirm_pieces(self.client, name, arrival.taken)
        if arrival.taken == arrival.pieces.count:
            return count + self._finish(name, arrival)
        return count

    def _finish(self, name: str, arrival: UploadAssembly) -> int:
        """Make the run, or add to the existing one, once all pieces are here."""
        with arrival.layout.open_plan_lock() as lock:
            if not try_lock(lock):
                self._retry_at[name] = time.monotonic() + BUSY_S
                uploads.set_reason(self.client, name, "another plan is being made for this output")
                return 0
            arrival.compare(self._on_step)
            arrival.check(self._on_step)
            grown = self._grow(arrival) if arrival.grows else self._make(name, arrival)
        return self._accept(name, arrival, grown)

    def _make(self, name: str, arrival: UploadAssembly) -> AddedUnits:
        """Give each file its name; run.json, which commits the run, comes last."""
        arrival.linked_plan()
        save_control(arrival.layout, Control(priority=self._priority(name) or PRIORITY))
        arrival.place(range(len(arrival.upload.files)), self._on_step)
        info = load_run(arrival.layout.root)
        return AddedUnits(units=info.units, samples=info.samples, added=None)

    def _grow(self, arrival: UploadAssembly) -> AddedUnits:
        """Add the units that the run lacks, once their inputs have their names; other inputs stay as they are."""
        plan = arrival.linked_plan()
        return self._add(arrival.root, plan, lambda: arrival.place(arrival.inputs, self._on_step), self._on_step)

    def _priority(self, name: str) -> int | None:
        """Priority as last requested: it may change while the upload is under way."""
        upload = uploads.announced(self.client, name)
        return None if upload is None else upload.priority

    def _accept(self, name: str, arrival: UploadAssembly, grown: AddedUnits) -> int:
        upload, layout = arrival.upload, arrival.layout
        info = load_run(layout.root)
        priority = self._priority(name)
        with kept_off(layout.broker) as exclusive:
            # An `embq run` that is at work on it takes the new units up itself.
            if exclusive:
                if priority is not None and grown.added is not None:
                    self._request(info.run, layout, {"priority": str(priority)})
                register(self.client, replace(arrival.record, run=info.run, rows=info.rows, units=info.units))
        end = UploadOutcome(end="accepted", run=info.run, added=grown.added, units=info.units, samples=grown.samples)
        uploads.finish(self.client, name, upload.run, end)
        arrival.drop()
        self.log.info("upload_accepted", run=info.run, output=upload.output, files=len(upload.files), units=info.units)
        return 1

    def _request(self, run: str, layout: Layout, requests: dict[str, str]) -> None:
        """Request changes of an existing run; those of a finished run, which has no writer, are written here."""
        if is_over(self.client, run):
            save_control(layout, load_control(layout).with_changes(requests))
        else:
            Ledger(self.client, run).request(requests)

    def _wait(self, name: str, error: OutputError | OSError) -> None:
        """The folder cannot be written now; what has arrived stays."""
        if isinstance(error, OSError):
            error = output_error(error, Path(error.filename or "the output folder"))
        self._retry_at[name] = time.monotonic() + RETRY_S
        uploads.set_reason(self.client, name, error.message)
        self.log.error("upload_waits", upload=name, why=error.message, next=error.next_step, retry_s=RETRY_S)

    def _refuse(self, name: str, code: str, why: str) -> None:
        arrival = self._arrivals.get(name)
        run = arrival.upload.run if arrival is not None else self._announced_run(name)
        uploads.finish(self.client, name, run, UploadOutcome(end="refused", code=code, why=why))
        if arrival is not None:
            arrival.drop()
        self.log.error("upload_refused", upload=name, code=code, why=why)

    def _announced_run(self, name: str) -> str:
        """The run of an upload, whose id its sender may have left with; the upload's name if it is no upload."""
        try:
            upload = uploads.announced(self.client, name)
        except InputError:
            upload = None
        return name if upload is None else upload.run
