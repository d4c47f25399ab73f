"""`embq.open(OUT).torch()`: bytes of float16 vectors per second from the page cache, by format of the run.

    python -m bench.output_reading [ROWS]

Runs of ROWS (300,000) texts through the stub with 384 dimensions. Each is read whole twice, of which the second time
counts; the bound is `readinto` of as many bytes into one buffer, as large as a batch.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import embq
from bench.report import table, write
from embq.core.rows.spec import FORMATS
from tests.support.outputs.build import build, write_jsonl

ROWS, DIM, BATCH = 300_000, 384, 16_384
BAR = 3.0
"""GB/s of the best format."""


def main() -> int:
    """Measure, print a table and write the figures."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    size = rows * DIM * 2
    rates = {}
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as name:
        folder = Path(name)
        source = write_jsonl(folder / "t.jsonl", [{"id": str(n), "text": f"text {n}"} for n in range(rows)])
        for format_ in FORMATS:
            output = embq.open(
                build(folder / format_, [source], model=f"stub:{DIM}", format=format_, unit_samples=5_000)
            )
            for _ in range(2):
                began, count = time.perf_counter(), 0
                for batch in output.torch(batch_size=BATCH):
                    count += batch["embedding"].nbytes
                assert count == size
                rates[format_] = size / (time.perf_counter() - began) / 1e9
        rates["bound"] = bound(folder / "plain", size)
    best = max(rates[one] for one in FORMATS)
    lines = [(who, f"{rate:.2f}", f">= {BAR}" if rate == best else "") for who, rate in rates.items()]
    table(("format", "GB/s", "bar"), lines)
    write("output_reading", {"rows": rows, "dim": DIM, "batch": BATCH, "gb_per_s": rates})
    return 0


def bound(path: Path, size: int) -> float:
    """GB/s of reading a file into a buffer."""
    path.write_bytes(bytes(size))
    buffer = bytearray(BATCH * DIM * 2)
    for _ in range(2):
        began = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                continue
        seconds = time.perf_counter() - began
    return size / seconds / 1e9


if __name__ == "__main__":
    sys.exit(main())
