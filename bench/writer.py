"""The writer's speed beside a plain pyarrow write of the same rows, alternating in one process on one disk.

    python -m bench.writer

The writer does all that it does in a run: it reads published results from the broker, checks each against the manifest,
writes parts, hashes and syncs them, creates the commit record and acknowledges. The plain writes are
`pyarrow.parquet.write_table` of the same rows with the same columns, without fsync: once with its defaults (which try a
dictionary on the embeddings) and once with the writer's own encoding. The ratio is against the second, faster one.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.report import table, write
from core.broker import connect
from core.embedded import EmbeddedServer
from core.layout import Layout, RunInfo
from core.ledger import Ledger, load_scripts
from core.manifest import write_manifest
from core.models import ModelConfig
from core.protocol import VERSION
from core.reader import row_tables
from core.registry import RunRecord
from core.results import encode_result, row_schema
from core.rows import RowSpec
from core.units import Sample, Unit
from writer.service import RunWriter
from writer.stores.parquet import encoding

UNITS, UNIT_ROWS, DIM = 40, 5_000, 768
ROUNDS = 5
FINGERPRINT = "0" * 32


def main() -> None:
    """Measure, print and write."""
    rows, size = UNITS * UNIT_ROWS, UNITS * UNIT_ROWS * DIM * 2
    vectors = np.random.default_rng(0).standard_normal((UNIT_ROWS, DIM)).astype(np.float16)
    ours: dict[str, list[float]] = {"staging": [], "payload": []}
    plain: dict[str, list[float]] = {"defaults": [], "same encoding": []}
    for round_number in range(ROUNDS):
        for transport, seconds in ours.items():
            with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
                root = Path(folder) / "out"
                seconds.append(write_with_embq(root, vectors, transport, round_number))
                rows_table = pa.concat_tables(row_tables(root)).combine_chunks()
                assert rows_table.num_rows == rows
                shutil.rmtree(root / "parts")
                for name, options in (("defaults", {}), ("same encoding", encoding(rows_table.schema))):
                    began = time.perf_counter()
                    pq.write_table(rows_table, Path(folder) / "plain.parquet", **options)
                    plain[name].append(time.perf_counter() - began)
    bound = statistics.median(plain["same encoding"])
    everyone = {
        **{f"pyarrow, {name}": seconds for name, seconds in plain.items()},
        **{f"embq, {name}": seconds for name, seconds in ours.items()},
    }
    figures: list[dict[str, Any]] = [
        {
            "who": who,
            "seconds": round(statistics.median(seconds), 3),
            "rows_per_s": round(rows / statistics.median(seconds)),
            "mb_per_s": round(size / 1e6 / statistics.median(seconds)),
            "ratio": round(bound / statistics.median(seconds), 2),
        }
        for who, seconds in everyone.items()
    ]
    table(list(figures[0]), [list(row.values()) for row in figures])
    print(f"{rows:,} rows of {DIM} float16, median of {ROUNDS} rounds (pyarrow: of {2 * ROUNDS})")
    print("wrote", write("writer", {"rows": figures, "table_rows": rows, "dim": DIM, "rounds": ROUNDS}))


def write_with_embq(root: Path, vectors: np.ndarray, transport: str, seed: int) -> float:
    """Seconds from the first result that the writer reads to the acknowledged last commit."""
    layout = Layout(root)
    layout.make()
    units = [Unit(kind="lines", source=f"/{seed}/{i}", samples=UNIT_ROWS) for i in range(UNITS)]
    summary = write_manifest(layout, units)
    model = ModelConfig(spec=f"stub:{DIM}", modalities=("text",), precision="fp32")
    info = RunInfo(
        run=f"{seed:016x}",
        inputs=(),
        options=(),
        model=model,
        part_rows=1_000_000,
        units=summary.units,
        samples=summary.samples,
        manifest_digest=summary.digest,
        version="bench",
        created="",
    )
    info.publish(layout)
    record = RunRecord(run=info.run, output=str(root), model=model, units=UNITS)
    with EmbeddedServer(root / "_broker") as server:
        client = connect(server.url, patient=True)
        writer = RunWriter(client, record, version="bench")
        ledger = Ledger(client, info.run, scripts=load_scripts(client))
        for u, unit in enumerate(units):
            publish(ledger, layout, u, unit.unit_id, vectors, transport)
        began = time.perf_counter()
        while not writer.finished:
            writer.step()
        return time.perf_counter() - began


def publish(ledger: Ledger, layout: Layout, u: int, unit_id: str, vectors: np.ndarray, transport: str) -> None:
    """Publish one unit as a worker does."""
    import hashlib

    samples = [Sample(ordinal=i, key=f"{u:03d}-{i:06d}", text=f"caption {i} of unit {u}") for i in range(UNIT_ROWS)]
    data = encode_result(samples, {"embedding": vectors}, [], row_schema(("text",), {"text": DIM}, RowSpec()))
    token = f"{ledger.gen()}:bench:{u}"
    assert ledger.claim(u, token, lease_s=600, fingerprint=FINGERPRINT).granted
    fields: dict[str, str | bytes | int] = {
        "v": VERSION,
        "unit_id": unit_id,
        "rows": UNIT_ROWS,
        "failures": 0,
        "fingerprint": FINGERPRINT,
    }
    if transport == "payload":
        fields["data"] = data
    else:
        (layout.staging / f"{u}.arrow").write_bytes(data)
        fields |= {"ref": f"{u}.arrow", "sha256": hashlib.sha256(data).hexdigest()}
    assert ledger.publish(u, token, fields, size=len(data)) == 1


if __name__ == "__main__":
    main()
