"""Peak memory of the worker process on photographs of 3000x2000: is it flat, and within the bound that is stated?

    python -m bench.image_memory [--photographs 100,1000] [--different 48] [--model clip]

Runs of `embq run` as a user starts it, on tar shards of 50 photographs: mosaics of several photographs each, never
enlarged, `--different` of them under as many keys as are needed. The worker reads and decodes each sample anew, so
which bytes a shard holds, and not whether another had them too, is all that its memory can depend on.

Each number of photographs is given to two devices: one that waits for the decoders, and one for which they wait, so
that what is read ahead of it is as much as it ever becomes. Looked at 50 times a second is the anonymous part of the
resident set: what the process asked for, and not the pages of libraries, of which an exit touches another 100 MB.
Reported is its peak, what it is more than for two batches of pictures of 64x64, and the bound that
docs/how-to/models/images.md states.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.memory import descendants, service
from bench.pictures import jpegs, shards
from bench.report import table, write
from bench.runs import anonymous_bytes
from embq.worker.stages.pipeline import BYTES_AHEAD
from embq.worker.stages.read import CHUNK_IMAGE_BYTES, CHUNKS_OF_A_THREAD

SIZE = (3000, 2000)
PER_SHARD = 50
THREADS = 2
LOOK_S = 0.02

BATCH = 64
PIXELS = 224
RATES = {"waits for the decoders": 0, "is waited for": 25}
"""Kind of device -> its milliseconds for an image."""

CLIP = "open_clip:ViT-B-32?init=random"


class Peak(NamedTuple):
    """Figures of one run: bytes of the worker process, rows, and seconds with the start."""

    peak_bytes: int
    rows: int
    seconds: float


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=lambda text: [int(part) for part in text.split(",")], default=[100, 1000])
    parser.add_argument("--different", type=int, default=48, help="photographs that are made")
    parser.add_argument(
        "--model", choices=["stub", "clip", "both"], default="stub", help="clip is a ViT-B-32 on the CPU"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as name:
        rows = measure(Path(name), options.photographs, options.different, options.model)
    table(list(rows[0]), [list(row.values()) for row in rows])
    print("wrote", write("image_memory", {"rows": rows, "different": options.different, "threads": THREADS}))


def measure(folder: Path, counts: Sequence[int], different: int, model: str) -> list[dict[str, Any]]:
    """One row of figures for each model, device and number of photographs."""
    made = jpegs(SIZE, different, seed=7)
    small = shards(folder / "small", jpegs((64, 64), 2 * BATCH, seed=7), 2 * BATCH)
    inputs = {
        count: shards(folder / str(count), [made[n % different] for n in range(count)], PER_SHARD) for count in counts
    }
    shard_bytes = max(path.stat().st_size for paths in inputs.values() for path in paths)
    bound = bound_bytes(shard_bytes, max(map(len, made)))
    models = {device: f"stub:512?pixels={PIXELS}&batch_size={BATCH}&ms_per_sample={ms}" for device, ms in RATES.items()}
    if model != "stub":
        models = {**(models if model == "both" else {}), "ViT-B-32 on the CPU": f"{CLIP}&batch_size={BATCH}"}
    rows = []
    for device, spec in models.items():
        before = run(folder / "out", small, spec)
        for count, paths in inputs.items():
            peak = run(folder / "out", paths, spec)
            assert peak.rows == count, peak
            rows.append(
                {
                    "device": device,
                    "photographs": count,
                    "encoded_mb": round(sum(path.stat().st_size for path in paths) / 1e6),
                    "with_small_pictures_mb": round(before.peak_bytes / 1e6),
                    "peak_mb": round(peak.peak_bytes / 1e6),
                    "more_mb": round((peak.peak_bytes - before.peak_bytes) / 1e6),
                    "bound_mb": round(bound / 1e6),
                    "seconds": round(peak.seconds),
                }
            )
            print(rows[-1], flush=True)
    return rows


def bound_bytes(shard_bytes: int, longest: int) -> int:
    """The bound in docs/how-to/models/images.md for local shards of images of up to 16 MP, beside the loaded model."""
    encoded = (THREADS * CHUNKS_OF_A_THREAD + 2) * (CHUNK_IMAGE_BYTES + longest)
    return shard_bytes + encoded + BYTES_AHEAD + 3 * BATCH * PIXELS * PIXELS * 3


def run(output: Path, paths: Sequence[Path], model: str) -> Peak:
    """One `embq run` into a fresh folder."""
    began = time.monotonic()
    started = subprocess.Popen(
        [
            *(sys.executable, "-m", "embq", "run", *map(str, paths), "--output", str(output), "--json"),
            *("--model", model, "--modality", "image", "--devices", "cpu", "--threads", str(THREADS)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    peak, workers = 0, list[int]()
    while started.poll() is None:
        if not workers or not anonymous_bytes(workers[0]):
            workers = [pid for pid in descendants(started.pid) if service(pid)[0] == "worker process"]
        peak = max([peak, *map(anonymous_bytes, workers)])
        time.sleep(LOOK_S)
    assert started.stdout is not None
    rows = json.loads(started.stdout.read())["rows"]
    shutil.rmtree(output)
    return Peak(peak, rows, time.monotonic() - began)


if __name__ == "__main__":
    main()
