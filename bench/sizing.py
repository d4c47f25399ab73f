"""Sizes to plan for: memory of the broker for runs, units, hints, leases, results and workers; bytes of a result's row.

    python -m bench.sizing

Each thing is put into a private server by embq's own code, many times over, and what its `used_memory` grew by, less
what it holds for connections, is divided by their number; of workers it counts, connections and all. Bytes of rows are
those of results as workers send them, in units of 1,000 rows, without captions, and with texts of 100 characters. The
rest of the table in docs/how-to/deploy/sizing.md comes from other benchmarks.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import redis

from bench.report import table, write
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.models import ModelConfig
from embq.core.queue.hints import Hint, hint_queue, push
from embq.core.queue.keys import VERSION
from embq.core.queue.ledger import Ledger, new_token
from embq.core.queue.result_stream import PublishVerdict
from embq.core.queue.runs import RunRecord, register
from embq.core.queue.scripts import load_scripts
from embq.core.rows.results import encode_result, row_schema
from embq.core.rows.spec import RowSpec
from embq.core.rows.vectors import stored
from embq.core.settings import child_environment
from embq.core.units import Sample, Unit

RUNS, UNITS, RESULTS, PROCESSES = 200, 1_000, 100, 4
UNITS_OF_A_RUN = 1_000_000
UNIT_ROWS = 1_000
TEXT = "a caption of a hundred characters, more or less, as people write them below pictures: a red bicycle."
DTYPES, DIMS = ("float32", "float16", "int8", "binary"), (384, 512, 768, 1024)
SETTLED_S = 8.0
"""A worker's processes are up, and each has said what it is."""

RESULT = {"v": VERSION, "unit_id": "f" * 32, "rows": UNIT_ROWS, "failures": 0, "fingerprint": "f" * 64}
"""Fields of a result, besides its rows."""

MODEL = ModelConfig(spec="stub:768", modalities=("text",), precision="fp32")


def main() -> None:
    """Measure, print and write."""
    row_bytes = [_row_bytes(dtype, dim) for dtype in DTYPES for dim in DIMS]
    table(list(row_bytes[0]), [list(row.values()) for row in row_bytes])
    with tempfile.TemporaryDirectory(prefix="embq-s") as folder, EmbeddedServer(Path(folder) / "s") as server:
        client = connect(server.url)
        broker = {"empty_bytes": _used(client), **_of_runs(client), **_of_one_run(client)}
    with tempfile.TemporaryDirectory(prefix="embq-s") as folder, EmbeddedServer(Path(folder) / "s") as server:
        broker |= _of_workers(server.url)
    table(["in the broker", "bytes"], [[name, value] for name, value in broker.items()])
    write("sizing", {"row_bytes": row_bytes, "unit_rows": UNIT_ROWS, "broker": broker})


def _of_runs(client: redis.Redis) -> dict[str, float]:
    """Runs of a million units each, half of which is done, and nothing in flight."""
    before = _used(client)
    scripts = load_scripts(client)
    done = bytes([0xFF]) * (UNITS_OF_A_RUN // 16)
    for number in range(RUNS // 10):
        run = f"{number:016x}"
        register(client, RunRecord(run=run, output=f"/data/out/{run}", model=MODEL, units=UNITS_OF_A_RUN))
        _opened(Ledger(client, run, scripts=scripts), UNITS_OF_A_RUN, done)
    large = (_used(client) - before) / (RUNS // 10)
    before = _used(client)
    for number in range(RUNS):
        run = f"{number + RUNS:016x}"
        register(client, RunRecord(run=run, output=f"/data/out/{run}", model=MODEL, units=100))
        _opened(Ledger(client, run, scripts=scripts), 100, b"")
    return {"run_bytes": round((_used(client) - before) / RUNS), "run_of_a_million_units_bytes": round(large)}


def _of_one_run(client: redis.Redis) -> dict[str, float]:
    """Bytes that a unit adds when it is hinted, leased, and published."""
    run, gen = "f" * 16, "1-0"
    register(client, RunRecord(run=run, output="/data/out/f", model=MODEL, units=10 * UNITS))
    ledger = Ledger(client, run)
    _opened(ledger, 10 * UNITS, b"")
    before = _used(client)
    units, _ = ledger.next_units(gen, UNITS, queue_empty=True, reap_at=0)[::-1]
    units = units[:UNITS]
    unit = Unit(
        kind="tar", source="s3://bucket/shards/000000.tar", stop=268_435_456, etag="1763798400000000000-268435456"
    )
    push(hint_queue(client, "size"), [Hint(run=run, gen=gen, u=u, unit=unit) for u in units], at_front=False)
    hinted = (_used(client) - before) / len(units)
    before = _used(client)
    tokens = {u: new_token(gen, "box.cuda0.1666bb") for u in units}
    for u, token in tokens.items():
        assert ledger.claim(u, token, lease_s=3600, fingerprint="f" * 64).granted
    leased = (_used(client) - before) / len(units)
    ledger.start((u, token) for u, token in tokens.items())
    data = _result("float16", 768, UNIT_ROWS, with_texts=True)
    before = _used(client)
    for u in units[:RESULTS]:
        assert ledger.publish(u, tokens[u], {**RESULT, "data": data}, size=len(data)) is PublishVerdict.ACCEPTED
    sent = (_used(client) - before) / RESULTS
    before = _used(client)
    for u in units[RESULTS : 2 * RESULTS]:
        staged = {"ref": f"{'f' * 32}.{tokens[u].replace(':', '_')}.arrow", "sha256": "f" * 64}
        assert ledger.publish(u, tokens[u], {**RESULT, **staged}, size=len(data)) is PublishVerdict.ACCEPTED
    named = (_used(client) - before) / RESULTS
    return {
        "hinted_unit_bytes": round(hinted),
        "leased_unit_bytes": round(leased),
        "result_bytes_more_than_its_payload": round(sent - len(data)),
        "result_payload_bytes": len(data),
        "result_in_a_staging_file_bytes": round(named),
    }


def _of_workers(url: str) -> dict[str, float]:
    """Memory for real processes, their connections included: a machine with one process, and each further one."""
    client = connect(url)
    _with_worker(client, url, 1)  # the scripts, which are there once
    alone = _with_worker(client, url, 1)
    more = _with_worker(client, url, 1 + PROCESSES)
    return {"machine_with_one_worker_bytes": alone, "further_worker_bytes": round((more - alone) / PROCESSES)}


def _with_worker(client: redis.Redis, url: str, processes: int) -> int:
    before = _used(client, with_clients=True)
    command = [sys.executable, "-m", "embq", "worker", "--devices", "cpu", "--workers", str(processes)]
    environment = child_environment(EMBQ_BROKER_URL=url)
    worker = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(SETTLED_S)
        connections = len(client.client_list())
        assert connections > processes, "the workers have not come"
        return _used(client, with_clients=True) - before
    finally:
        worker.terminate()
        worker.wait()


def _opened(ledger: Ledger, units: int, done: bytes) -> None:
    ledger.rebuild(gen="1-0", total=units, done=done, counters={"rows": 0, "failures": 0, "fingerprint": "f" * 64})


def _row_bytes(dtype: str, dim: int) -> dict[str, Any]:
    bare, told = (len(_result(dtype, dim, UNIT_ROWS, with_texts=texts)) / UNIT_ROWS for texts in (False, True))
    return {"dtype": dtype, "dim": dim, "bytes_per_row": round(bare), "with_texts_of_100": round(told)}


def _result(dtype: str, dim: int, count: int, *, with_texts: bool) -> bytes:
    spec = RowSpec(dtype=dtype, normalize=True)
    schema = row_schema(("text",), {"text": dim}, spec)
    texts = [TEXT if with_texts else None] * count
    samples = [Sample(ordinal=n, key=f"{n:09d}", text=text) for n, text in enumerate(texts)]
    vectors, _ = stored(np.random.default_rng(0).standard_normal((count, dim), dtype=np.float32), spec)
    return encode_result(samples, {"embedding": vectors}, [], schema)


def _used(client: redis.Redis, *, with_clients: bool = False) -> int:
    """Memory of what is kept, without the buffers of what is being sent just now."""
    said = client.info("memory")
    buffers = 0 if with_clients else int(said["mem_clients_normal"]) + int(said["mem_aof_buffer"])
    return int(said["used_memory"]) - buffers


if __name__ == "__main__":
    main()
