"""Speed of one core that reads shards: embq's strict reader beside webdataset's own iterator, in the same run.

Small samples (2 kB image, caption, metadata) are counted; of large members the bytes, from the page cache.

python -m bench.tar_reader [SAMPLES]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import webdataset

from bench.report import table, write
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import ReadOptions

ROUNDS = 5
LARGE_MEMBERS = 64
LARGE_BYTES = 8_000_000
"""Bytes of one member: half a gigabyte in all, as shards of large images or raw data have it."""


def write_small(path: str, samples: int) -> None:
    """A shard of `samples` with a 2 kB image, a caption and metadata each, as webdataset writes it."""
    with webdataset.TarWriter(path) as shard:
        for number in range(samples):
            key = f"{number:09d}"
            fields = {"url": f"https://example.com/{key}.jpg", "width": 256, "height": 256, "similarity": 0.31}
            shard.write({"__key__": key, "jpg": b"\xff\xd8" * 1000, "txt": f"a photo of {key}", "json": fields})


def write_large(path: str) -> None:
    """A shard of images of `LARGE_BYTES` each."""
    content = os.urandom(LARGE_BYTES)
    with webdataset.TarWriter(path) as shard:
        for number in range(LARGE_MEMBERS):
            shard.write({"__key__": f"{number:09d}", "jpg": content})


def embq(path: str) -> Callable[[], int]:
    """Reads a shard as a worker does; gives its samples."""
    tar = SOURCES["tar"]
    (unit,) = tar.split(path, ReadOptions())
    return lambda: sum(1 for _ in tar.read(unit))


def theirs(path: str) -> Callable[[], int]:
    """Reads a shard with webdataset; gives its samples."""
    stream = webdataset.WebDataset(path, shardshuffle=False, empty_check=False)
    return lambda: sum(1 for _ in stream)


def fastest(readers: Sequence[Callable[[], int]], samples: int) -> list[float]:
    """Seconds of the fastest round of each, which the machine's other users disturbed least; they take turns."""
    best = [float("inf")] * len(readers)
    for _ in range(ROUNDS):
        for at, read in enumerate(readers):
            began = time.perf_counter()
            assert read() == samples
            best[at] = min(best[at], time.perf_counter() - began)
    return best


def main() -> None:
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    with tempfile.TemporaryDirectory() as folder:
        small, large = os.path.join(folder, "small.tar"), os.path.join(folder, "large.tar")
        write_small(small, samples)
        write_large(large)
        ours_s, theirs_s = fastest([embq(small), theirs(small)], samples)
        ours_large_s, theirs_large_s = fastest([embq(large), theirs(large)], LARGE_MEMBERS)
        small_bytes, large_bytes = os.path.getsize(small), os.path.getsize(large)
    figures = {
        "samples_per_s": {"embq": round(samples / ours_s), "webdataset": round(samples / theirs_s)},
        "times_webdataset": round(theirs_s / ours_s, 2),
        "large_gb_per_s": {
            "embq": round(large_bytes / ours_large_s / 1e9, 2),
            "webdataset": round(large_bytes / theirs_large_s / 1e9, 2),
        },
        "samples": samples,
        "members_per_sample": 3,
        "small_shard_bytes": small_bytes,
        "large_shard_bytes": large_bytes,
    }
    rates, large_rates = figures["samples_per_s"], figures["large_gb_per_s"]
    assert isinstance(rates, dict)
    assert isinstance(large_rates, dict)
    table(
        ["who", "small: samples/s", "large: GB/s"],
        [[who, f"{rates[who]:,}", f"{large_rates[who]:.2f}"] for who in rates],
    )
    print(f"small samples: {figures['times_webdataset']} times webdataset {webdataset.__version__}")
    print("wrote", write("tar_reader", figures))


if __name__ == "__main__":
    main()
