"""The publish stage: encodes complete units and sends them to the writer."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from embq.core.errors import EmbqError, OutputError
from embq.core.queue.keys import VERSION
from embq.core.rows.results import embedding_columns, encode_result, row_schema
from embq.core.run.layout import Layout
from embq.core.service.log import Events
from embq.core.storage.beneath import read_bytes
from embq.core.storage.durable import drop, output_error
from embq.core.storage.paths import place
from embq.core.units import Sample
from embq.worker.claim.lease import LeasedUnit, Part
from embq.worker.meter.meter import Meter

INLINE_BYTES = 256 * 1024
"""Results up to this size travel in the stream: a staging file would cost more than the broker's memory is worth."""

PIECE_BYTES = 8 * 1024 * 1024
"""Written at once, so that slow storage is not taken for storage that hangs."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0


class PublishStage:
    """Encodes results and hands them to the writer.

    Args:
        transport: "payload" (through the broker), "staging" (a file in the output folder) or "auto": a file where the
            result is large and this machine sees the writer's folder.
        dims: output of the model -> vector length.
        finished: called for each unit whose result was taken.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        fingerprint: str,
        dims: Mapping[str, int],
        transport: str,
        finished: Callable[[], None] = lambda: None,
    ) -> None:
        self.meter = meter
        self.fingerprint = fingerprint
        self.dims = dims
        self.transport = transport
        self.finished = finished
        self.log = Events("worker")
        self._shared: dict[tuple[str, str], bool] = {}
        self._staging_is_full = False

    def run(self, lease: LeasedUnit) -> None:
        """Publish one complete unit; the lease ends here, whatever the answer is."""
        with self.meter.times.at("publish", "busy"):
            with self.meter.stage("publish", [Part(lease)]):
                data = self._encode(lease)
            fields: dict[str, str | bytes | int] = {
                "v": VERSION,
                "unit_id": lease.unit_id,
                "rows": len(lease.samples),
                "failures": len(lease.failures),
                "truncated": lease.truncated,
                "tokens": lease.tokens,
                "fingerprint": self.fingerprint,
            }
            staged = self._stage_when_it_fits(lease, data) if self._use_file(lease, len(data)) else None
            if staged is None:
                fields["data"] = data
            else:
                fields |= {"ref": staged.name, "sha256": hashlib.sha256(data).hexdigest()}
            accepted = self._hand_over(lease, fields, len(data))
            if accepted == 1:
                self.meter.unit_done(len(lease.failures))
                self.finished()
            else:
                # Another attempt's result stands, or the lease is gone: only our own file goes.
                if staged is not None:
                    drop(staged)
                self.log.info("result_not_taken", run=lease.run, u=lease.u, answer=accepted)
            lease.end()

    def _hand_over(self, lease: LeasedUnit, fields: Mapping[str, str | bytes | int], size: int) -> int:
        wait_s = FIRST_WAIT_S
        while True:
            if lease.lost:
                return 0
            # A large result is not sent only to find that there is no room for it.
            if size <= INLINE_BYTES or lease.ledger.results.has_room():
                answer = lease.publish(fields, size=size)
                if answer >= 0:
                    return answer
            with self.meter.times.at("publish", "blocked"):
                time.sleep(wait_s)
            wait_s = min(LONGEST_WAIT_S, wait_s * 2)

    def _encode(self, lease: LeasedUnit) -> bytes:
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
        return encode_result(samples, vectors, lease.failures, schema, lease.record.rows.columns)

    def _use_file(self, lease: LeasedUnit, size: int) -> bool:
        if self.transport == "payload":
            return False
        return self.transport == "staging" or (size > INLINE_BYTES and self._shares_storage(lease))

    def _shares_storage(self, lease: LeasedUnit) -> bool:
        """Whether files can be left for the writer; looked at once per generation of a run."""
        key = (lease.run, lease.gen)
        if key not in self._shared:
            self._shared[key] = shares_storage(lease.record.output, lease.ledger.meta().get("nonce", ""))
        return self._shared[key]

    def _stage_when_it_fits(self, lease: LeasedUnit, data: bytes) -> Path | None:
        """The staging file of a result; None where the lease was lost while the disk was full.

        A full disk is full for every worker of the output, so none could do better with the unit: the result is kept
        and the lease with it. Any other error is this machine's own, and ends the process, which gives its units back.
        """
        wait_s = FIRST_WAIT_S
        while not lease.lost:
            try:
                # Without naming the unit: storage that hangs is not its fault.
                with self.meter.stage("publish"):
                    staged = self._stage(lease, data)
                self._staging_is_full = False
                return staged
            except OutputError as error:
                if error.code != "no_space":
                    raise
                if not self._staging_is_full:
                    self._staging_is_full = True
                    self.log.warning("staging_full", run=lease.run, why=error.message, bytes=len(data))
            with self.meter.times.at("publish", "blocked"):
                time.sleep(wait_s)
            wait_s = min(LONGEST_WAIT_S, wait_s * 2)
        return None

    def _stage(self, lease: LeasedUnit, data: bytes) -> Path:
        # Not synced: a staging file that a power loss destroys fails its hash and the unit is only computed again.
        name = f"{lease.unit_id}.{lease.token.replace(':', '_')}.arrow"
        folder = Layout(place(lease.record.output)).staging
        temporary = folder / f".{name}"
        try:
            with open(temporary, "wb") as file:
                for start in range(0, len(data), PIECE_BYTES):
                    file.write(data[start : start + PIECE_BYTES])
                    self.meter.board.advance()
            os.rename(temporary, folder / name)
        except OSError as error:
            drop(temporary)
            raise output_error(error, temporary) from error
        return folder / name


def shares_storage(output: str, nonce: str) -> bool:
    """Whether this machine sees the output folder that the writer sees, and may leave files in it.

    Args:
        nonce: what the writer has left there, as the broker knows it; "" where there is no writer.
    """
    folder = Layout(place(output)).staging
    try:
        there = read_bytes(folder.parent, f"{folder.name}/.shared", most_bytes=1_000).decode()
    except (OSError, EmbqError, UnicodeDecodeError):
        return False
    return bool(nonce) and there == nonce and os.access(folder, os.W_OK)


def _place(sample: Sample) -> tuple[int, int]:
    """Sort key of a row among those of its unit."""
    return sample.ordinal, 0 if sample.passage is None else sample.passage.number
