"""Speed of making shards of pictures: embq shards convert beside webdataset's ShardWriter and beside plain copies.

Pictures are JPEGs of about 110 kB, as ImageNet's are: pieces of the photographs in scikit-image, each file different,
in the page cache. Everything is written to one disk, durably unless said otherwise; all take turns.

python -m bench.shards [SAMPLES] [FOLDER]
"""

from __future__ import annotations

import io
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import webdataset
from PIL import Image

from bench.report import table, write
from embq.core.process.limits import cores
from embq.core.storage.durable import fsync_file
from embq.training.shards.conversion import convert
from embq.training.shards.conversion_plan import ConversionPlan, Layout, Pattern
from embq.training.shards.listing import class_folders

SAMPLES, CLASSES, PER_SHARD = 4000, 100, 1000
SAMPLE_BYTES = 110_000
DIFFERENT = 40
"""Pictures that are encoded; the others are these with another last byte behind their end."""
ROUNDS = 3
BAR = 4000
"""Samples per second, where the disk takes as many."""


def pictures(folder: Path, samples: int) -> None:
    """A tree of `CLASSES` folders with so many photographs of about `SAMPLE_BYTES`."""
    spec = find_spec("skimage")
    assert spec is not None
    assert spec.origin is not None
    drawn = random.Random(0)
    made: list[bytes] = []
    with Image.open(Path(spec.origin).parent / "data" / "coffee.png") as whole:
        for _ in range(DIFFERENT):
            left, top = drawn.randrange(100), drawn.randrange(50)
            image = whole.convert("RGB").crop((left, top, left + 500, top + 350)).resize((640, 448))
            made.append(min((_jpeg(image, quality) for quality in range(88, 99, 2)), key=_off))
    for number in range(samples):
        place = folder / f"class{number % CLASSES:03d}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:06d}.jpg").write_bytes(made[number % DIFFERENT] + number.to_bytes(4, "big"))


def _jpeg(image: Image.Image, quality: int) -> bytes:
    data = io.BytesIO()
    image.save(data, "JPEG", quality=quality)
    return data.getvalue()


def _off(data: bytes) -> int:
    return abs(len(data) - SAMPLE_BYTES)


def ours(source: Path, out: Path, processes: int) -> None:
    """Convert as `embq shards convert` does: list, plan, write, make durable; each with a json that names its file."""
    listing = class_folders(str(source), vocab=None, allow_empty=False)
    pattern = Pattern.parse(f"{out}/train-%06d.tar")
    plan = ConversionPlan.make(listing, Layout(pattern=pattern, samples_per_shard=PER_SHARD, seed=0, metadata=True))
    convert(plan, str(source), processes=processes)


def theirs(source: Path, out: Path) -> None:
    """A loop around webdataset's own writer, in one process and not durable."""
    out.mkdir()
    files = sorted(source.rglob("*.jpg"))
    random.Random(0).shuffle(files)
    index = {name: number for number, name in enumerate(sorted({path.parent.name for path in files}))}
    pattern = str(out / "train-%06d.tar")
    with webdataset.ShardWriter(pattern, maxcount=PER_SHARD, encoder=False, verbose=0) as shard:
        for number, path in enumerate(files):
            label = str(index[path.parent.name]).encode()
            shard.write({"__key__": f"{number:08d}", "jpg": path.read_bytes(), "cls": label})


def copied(source: Path, out: Path) -> None:
    """The files one behind the other into files as large as shards, and each made durable: no archive, one process."""
    out.mkdir()
    files = sorted(source.rglob("*.jpg"))
    for first in range(0, len(files), PER_SHARD):
        path = out / f"{first}.bin"
        with open(path, "wb", buffering=4 << 20) as file:
            for one in files[first : first + PER_SHARD]:
                file.write(one.read_bytes())
        fsync_file(path)


def written(size: int, out: Path) -> None:
    """Write as many bytes as the pictures have from memory, in files as large as shards: the speed of the disk."""
    out.mkdir()
    block = os.urandom(4 << 20)
    for number in range(max(1, round(size / (PER_SHARD * SAMPLE_BYTES)))):
        path = out / f"{number}.bin"
        with open(path, "wb", buffering=0) as file:
            for _ in range(round(PER_SHARD * SAMPLE_BYTES / len(block))):
                file.write(block)
        fsync_file(path)


def main() -> None:
    """Measure, print and write."""
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else SAMPLES
    with tempfile.TemporaryDirectory(prefix="embq-bench-", dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        source, out = Path(folder) / "pictures", Path(folder) / "out"
        pictures(source, samples)
        size = sum(path.stat().st_size for path in source.rglob("*.jpg"))
        several = max(2, min(8, cores()))
        ways: dict[str, Callable[[], None]] = {
            "writing as many bytes, durably": lambda: written(size, out),
            "copying the files, durably": lambda: copied(source, out),
            "webdataset's ShardWriter": lambda: theirs(source, out),
            "embq shards convert --workers 1": lambda: ours(source, out, 1),
            f"embq shards convert --workers {several}": lambda: ours(source, out, several),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                os.sync()  # what the one before left to be written is no matter of the next
                began = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - began)
                shutil.rmtree(out)
    rows = [
        {
            "way": name,
            "samples_per_s": round(samples / min(taken)),
            "mb_per_s": round(size / min(taken) / 1e6),
            "seconds": [round(one, 3) for one in taken],
        }
        for name, taken in seconds.items()
    ]
    table(["way", "samples/s", "MB/s"], [[row["way"], row["samples_per_s"], row["mb_per_s"]] for row in rows])
    best = max(rows[-2:], key=lambda row: float(str(row["samples_per_s"])))
    figures = {
        "ways": rows,
        "samples": samples,
        "sample_bytes": round(size / samples),
        "samples_per_shard": PER_SHARD,
        "rounds": ROUNDS,
        "bar_samples_per_s": BAR,
        "met": float(str(best["samples_per_s"])) >= BAR,
        "disk_samples_per_s": rows[0]["samples_per_s"],
    }
    print(f"the bar is {BAR:,} samples/s: {'met' if figures['met'] else 'not met'}", end="; ")
    print(f"the disk takes the bytes of {figures['disk_samples_per_s']:,} samples/s")
    print("wrote", write("shards", figures))


if __name__ == "__main__":
    main()
