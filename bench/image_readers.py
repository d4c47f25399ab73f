"""Shards in, batches of pixels out: embq beside clip-retrieval's own reader, in turns on the same shards.

    python -m bench.image_readers [SAMPLES] [ROUNDS]

Both have as many decode threads or processes as the machine has cores, batches of 256, which is what clip-retrieval
takes by itself, and the pixels of ViT-B-32. Shards hold images and nothing else. What each does is described in
`bench.image_readers_theirs` and `bench.image_readers_ours`. clip-retrieval is timed twice, with and without starting
its processes; embq is held against the second, and its own time begins with the first byte of the first shard.

In `.venv-bench`, where clip-retrieval is installed beside what embq has: `make bench-images`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import pictures
from bench.report import table, write
from embq.core.process.limits import cores

SAMPLES, ROUNDS = 20_000, 3
SIZES = ((256, 256), (512, 384))
DIFFERENT, PER_SHARD = 2_000, 500
"""Images of a set that differ, and images of a shard; the same shards come again under other names."""
BATCH_SIZE = 256
BAR = 2.5


def main() -> None:
    """Measure, print and write."""
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else SAMPLES
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS
    load = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
        for size in SIZES:
            root = Path(folder) / f"{size[0]}x{size[1]}"
            images = pictures.jpegs(size, min(DIFFERENT, samples), seed=0)
            few = pictures.shards(root / "few", images, PER_SHARD)
            shards = pictures.linked(root / "shards", few, max(1, samples // PER_SHARD))
            made = [one_round(shards, round_) for round_ in range(rounds)]
            rows.append({"images": root.name, "bytes": sum(map(len, images)) // len(images), **compared(made)})
    table(list(rows[0]), [list(row.values()) for row in rows])
    print(f"median of {rounds} rounds, then the lowest and the highest; load average at the start {load:.2f}")
    missed = [row["images"] for row in rows if row["times"] < BAR]
    print(f"at least {BAR} times: " + (f"MISSED by {', '.join(missed)}" if missed else "held"))
    versions = {name: version(name) for name in ("clip-retrieval", "webdataset", "pillow", "torch")}
    figures = {"rows": rows, "samples": samples, "rounds": rounds, "bar": BAR, "cores": cores(), "versions": versions}
    print("wrote", write("image_readers", figures | {"batch_size": BATCH_SIZE, "load_average": round(load, 2)}))


def one_round(shards: Sequence[Path], number: int) -> dict[str, dict[str, float]]:
    """Both, once; who is first changes from round to round."""
    commands = {
        "embq": ["bench.image_readers_ours", str(BATCH_SIZE), str(shards[0].parent)],
        "clip-retrieval": ["bench.image_readers_theirs", str(cores()), str(BATCH_SIZE), *map(str, shards)],
    }
    return {who: _measured(commands[who]) for who in (sorted(commands) if number % 2 else sorted(commands)[::-1])}


def compared(made: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Samples per second of both, how many times the one is the other, and CPU microseconds of a sample.

    Args:
        made: of each round, what was measured of whom.
    """
    samples = {measured["samples"] for one in made for measured in one.values()}
    if len(samples) != 1:
        raise AssertionError(f"they read {sorted(samples)} samples of the same shards")
    ours = [one["embq"]["samples"] / one["embq"]["seconds"] for one in made]
    theirs = [one["clip-retrieval"]["samples"] / one["clip-retrieval"]["seconds"] for one in made]
    steady = [one["clip-retrieval"]["steady_samples"] / one["clip-retrieval"]["steady_seconds"] for one in made]
    times = [one / other for one, other in zip(ours, steady, strict=True)]
    cpu_us = {
        who: statistics.median(one[who]["cpu_s"] / one[who]["samples"] * 1e6 for one in made)
        for who in ("embq", "clip-retrieval")
    }
    return {
        "embq_per_s": round(statistics.median(ours)),
        "embq_spread": [round(min(ours)), round(max(ours))],
        "theirs_per_s": round(statistics.median(steady)),
        "theirs_spread": [round(min(steady)), round(max(steady))],
        "theirs_with_start_per_s": round(statistics.median(theirs)),
        "times": round(statistics.median(times), 2),
        "times_spread": [round(min(times), 2), round(max(times), 2)],
        "embq_cpu_us": round(cpu_us["embq"]),
        "theirs_cpu_us": round(cpu_us["clip-retrieval"]),
    }


def _measured(command: Sequence[str]) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, check=True, timeout=1800)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


if __name__ == "__main__":
    main()
