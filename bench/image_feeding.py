"""Photographs from shards to committed rows on a device that hardly takes time, beside decode threads and nothing else.

    python -m bench.image_feeding [SECONDS] [ROUNDS]

`embq run` with its broker, producer, writer and supervisor embeds tar shards with a stub whose device takes 2 ms for a
batch of 64, and whose images are prepared as those of a real model: so only the CPU limits. Its rate is that from the
first unit to the last commit, as the run itself says. In turns with it, in a process of their own, as many decode
threads as the worker has do nothing but prepare the same samples, which are in memory (`bench.image_decoding`). What
the run reaches of their rate is what reading, handing over, storing and all of the queue leave of the machine; it is to
be at least 85 %.

Where the rest goes is told by the CPU time of each process from the first unit on, in microseconds of a sample.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import pictures
from bench.image_cpu import Watch, spent
from bench.report import table, write
from embq.core.process.limits import cores

SECONDS, ROUNDS = 15.0, 3
"""Seconds of decoding in one measurement, about; rounds."""
MODEL = "stub:512?ms_per_batch=2&batch_size=64&pixels=224"
SIZES = {(256, 256): 2_000, (512, 384): 2_000, (1024, 768): 600}
"""Size of the images -> how many of them differ; the same shards come again under other names."""
PER_SHARD = 200
BAR = 0.85
THREADS = cores()
PARTS = ("decode", "worker", "writer", "producer", "supervisor", "run", "broker")


def main() -> None:
    """Measure, print and write."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS
    load = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
        for size, different in SIZES.items():
            rows.append(measure(Path(folder) / f"{size[0]}x{size[1]}", size, different, seconds, rounds))
    table(
        ["images", "decoding/s", "run/s", "share", "lowest", "highest"],
        [
            [row[name] for name in ("images", "decoding_per_s", "run_per_s", "share", "lowest", "highest")]
            for row in rows
        ],
    )
    print("CPU microseconds of a sample:")
    table(
        ["images", "decode alone", *PARTS],
        [[row["images"], row["decoding_cpu_us"], *(row["cpu_us"][part] for part in PARTS)] for row in rows],
    )
    print(f"median of {rounds} rounds; {THREADS} decode threads; load average at the start {load:.2f}")
    missed = [row["images"] for row in rows if row["share"] < BAR]
    print(
        f"at least {BAR:.0%} of the decode threads' own rate: "
        + (f"MISSED by {', '.join(missed)}" if missed else "held")
    )
    figures = {"rows": rows, "rounds": rounds, "bar": BAR, "model": MODEL, "decode_threads": THREADS}
    print("wrote", write("image_feeding", figures | {"per_shard": PER_SHARD, "load_average": round(load, 2)}))


def measure(root: Path, size: tuple[int, int], different: int, seconds: float, rounds: int) -> dict[str, Any]:
    """The two in turns on images of one size."""
    few = pictures.shards(root / "few", pictures.jpegs(size, different, seed=0), PER_SHARD)
    short = decoding(few, different)
    samples = PER_SHARD * math.ceil(seconds * short["samples"] / short["seconds"] / PER_SHARD)
    shards = pictures.linked(root / "shards", few, samples // PER_SHARD)
    made = []
    for number in range(rounds):
        if number % 2:
            whole = running(shards, samples, root / "out")
            made.append((decoding(few, samples), whole))
        else:
            alone = decoding(few, samples)
            made.append((alone, running(shards, samples, root / "out")))
    return {"images": root.name, "samples": samples, **compared(made)}


def compared(made: Sequence[tuple[Mapping[str, float], Mapping[str, Any]]]) -> dict[str, Any]:
    """Rates, what the one is of the other, and CPU microseconds of a sample.

    Args:
        made: of each round, what decode threads alone did and what the run did.
    """
    alone = [decoded["samples"] / decoded["seconds"] for decoded, _ in made]
    whole = [run["samples"] / run["seconds"] for _, run in made]
    shares = [run / decoded for run, decoded in zip(whole, alone, strict=True)]
    return {
        "decoding_per_s": round(statistics.median(alone)),
        "run_per_s": round(statistics.median(whole)),
        "share": round(statistics.median(shares), 3),
        "lowest": round(min(shares), 3),
        "highest": round(max(shares), 3),
        "decoding_cpu_us": round(statistics.median(one["cpu_s"] / one["samples"] * 1e6 for one, _ in made)),
        "cpu_us": {
            part: round(statistics.median(run["cpu"].get(part, 0.0) / run["samples"] * 1e6 for _, run in made))
            for part in PARTS
        },
    }


def decoding(shards: Sequence[Path], samples: int) -> dict[str, float]:
    """Speed of decode threads by themselves."""
    command = ["-m", "bench.image_decoding", MODEL, str(THREADS), str(samples), *map(str, shards)]
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, check=True, timeout=1800)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def running(shards: Sequence[Path], samples: int, output: Path) -> dict[str, Any]:
    """One `embq run`: its samples, seconds from the first unit to the last commit, CPU seconds of its parts since."""
    command = ["-m", "embq", "run", *map(str, shards), "--output", str(output), "--model", MODEL]
    command += ["--modality", "image", "--devices", "cpu", "--json"]
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        watch = Watch(run.pid)
        watch.start()
        said, errors = run.communicate(timeout=1800)
        watch.join()
    if run.returncode:
        raise RuntimeError(f"embq run ended with {run.returncode}: {errors.decode()[-2000:]}")
    status = json.loads(said)
    assert status["rows"] == samples, status
    ended = max(part.stat().st_mtime for part in (output / "parts").iterdir())
    subprocess.run(["rm", "-r", str(output)], check=True)
    seconds = status["timing"]["embed_s"]
    cpu = spent(watch.looks, began=ended - seconds, ended=ended, decoders=THREADS)
    return {"samples": samples, "seconds": seconds, "cpu": cpu}


if __name__ == "__main__":
    main()
