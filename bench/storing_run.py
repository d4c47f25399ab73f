"""Runs for the benchmark of storing, whose units are published as workers do, with nothing being embedded."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.formats.part import write_unit
from embq.core.models import ModelConfig
from embq.core.queue.keys import VERSION
from embq.core.queue.ledger import Ledger
from embq.core.queue.result_stream import PART_SUFFIX, RESULT_SUFFIX, PublishVerdict
from embq.core.queue.runs import RunRecord
from embq.core.queue.scripts import load_scripts
from embq.core.rows.results import encode_batches, failure_batch, row_batch, row_schema
from embq.core.rows.spec import RowSpec
from embq.core.run.layout import Layout
from embq.core.run.manifest import first_segment_writer
from embq.core.run.run_info import RunInfo
from embq.core.storage.hashing import HashingFile
from embq.core.units import Sample, Unit
from embq.writer.run_writer import RunWriter

UNIT_ROWS, DIM = 5_000, 768
MODEL = ModelConfig(spec=f"stub:{DIM}", modalities=("text",), precision="fp32")
FINGERPRINT = "0" * 32


class StoredRun:
    """A run of `units` units in a folder of its own, and the results of its units.

    Args:
        format: of its parts.
        seed: makes its units other ones than those of another run.
        unit_rows: rows of each unit.
    """

    def __init__(self, root: Path, *, units: int, format: str, seed: int = 0, unit_rows: int = UNIT_ROWS) -> None:
        self.unit_rows = unit_rows
        self.layout = Layout(root)
        self.layout.make()
        self.units = [Unit(kind="lines", source=f"/{seed}/{i}", samples=unit_rows) for i in range(units)]
        summary = first_segment_writer(self.layout).write(self.units)
        self.info = RunInfo(
            run=f"{seed:016x}",
            inputs=(),
            options=(),
            model=MODEL,
            rows=RowSpec(),
            format=format,
            part_rows=1_000_000,
            units=summary.units,
            samples=summary.samples,
            manifest_digest=summary.digest,
            version="bench",
            created="",
        )
        self.info.publish(self.layout)
        self._vectors = np.random.default_rng(seed).standard_normal((unit_rows, DIM)).astype(np.float16)

    @property
    def rows(self) -> int:
        """Rows of all units."""
        return len(self.units) * self.unit_rows

    @property
    def record(self) -> RunRecord:
        """The run as a broker knows it."""
        return RunRecord(run=self.info.run, output=str(self.layout.root), model=MODEL, units=len(self.units))

    def writer(self, server: EmbeddedServer) -> RunWriter:
        """A writer that has opened the run, and so built its queue."""
        return RunWriter(connect(server.url, patient=True), self.record, version="bench")

    def ledger(self, server: EmbeddedServer) -> Ledger:
        """The run's ledger, as a worker uses it."""
        client = connect(server.url, patient=True)
        return Ledger(client, self.info.run, scripts=load_scripts(client))

    def result(self, u: int) -> bytes:
        """The result of one unit: its captions are its own, its vectors those of every other unit."""
        return encode_batches(self._rows(u), failure_batch([]))

    def _rows(self, u: int) -> pa.RecordBatch:
        samples = [
            Sample(ordinal=i, key=f"{u:03d}-{i:06d}", text=f"caption {i} of unit {u}") for i in range(self.unit_rows)
        ]
        schema = row_schema(("text",), {"text": DIM}, RowSpec())
        return row_batch(samples, {"embedding": self._vectors}, schema)

    def publish(self, ledger: Ledger, u: int, data: bytes, transport: str, *, sha256: str = "") -> None:
        """Publish one unit, as soon as there is room in the stream.

        Args:
            transport: "staging", "payload" or "part".
            sha256: of a file `same` among the staging files, which is handed over under another name.
        """
        token = f"{ledger.gen()}:bench:{u}"
        assert ledger.claim(u, token, lease_s=600, fingerprint=FINGERPRINT).granted
        fields: dict[str, str | bytes | int] = {
            "v": VERSION,
            "unit_id": self.units[u].unit_id,
            "rows": self.unit_rows,
            "failures": 0,
            "fingerprint": FINGERPRINT,
        }
        name = f"{self.units[u].unit_id}.{u}{PART_SUFFIX if transport == 'part' else RESULT_SUFFIX}"
        if transport != "staging":
            fields["data"] = data
        if transport == "payload":
            pass
        elif sha256:
            os.link(self.layout.staging / "same", self.layout.staging / name)
            fields |= {"ref": name, "sha256": sha256}
        else:
            (self.layout.staging / name).write_bytes(data)
            fields |= {"ref": name, "sha256": hashlib.sha256(data).hexdigest()}
        while (answer := ledger.publish(u, token, fields, size=len(data))) is PublishVerdict.NO_ROOM:
            time.sleep(0.01)
        assert answer is PublishVerdict.ACCEPTED

    def publish_all(self, ledger: Ledger, transport: str = "staging") -> None:
        """Publish every unit with the rows of the first one, at next to no cost: all staging files are one file.

        Args:
            transport: "staging" or "part".
        """
        data = self.result(0)
        with open(self.layout.staging / "same", "wb") as raw:
            file = HashingFile(raw)
            if transport == "part":
                rows = self._rows(0)
                unit_ids = pa.repeat(pa.scalar(self.units[0].unit_id), rows.num_rows)
                write_unit(self.info.format, pa.Table.from_batches([rows]).append_column("unit_id", unit_ids), file, {})
                data = encode_batches(failure_batch([]))
            else:
                file.write(data)
        for u in range(len(self.units)):
            self.publish(ledger, u, data, transport, sha256=file.hexdigest())
