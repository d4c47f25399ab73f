"""How fast a machine computes and writes, measured in a moment before a build is planned."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from core.process.limits import cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What a machine can do.

    Attributes:
        gflops: of one core in the matrix products of float32 that finding the nearest centroid consists of, 1e9/s.
        disk_bytes_s: bytes written per second, durably.
        cores: that the build may keep busy.
    """

    gflops: float
    disk_bytes_s: float
    cores: int = 1


def measure_speeds(folder: Path | None = None) -> Speeds:
    """Measures this machine for a third of a second; the disk is that of `folder`, or of the temporary folder."""
    import numpy as np

    from indexer.faiss_module import faiss

    module, dim = faiss(), 256
    rng = np.random.default_rng(0)
    rows, centroids = rng.random((4096, dim), dtype=np.float32), rng.random((1024, dim), dtype=np.float32)
    threads = module.omp_get_max_threads()
    module.omp_set_num_threads(1)
    try:
        took = min(_timed(lambda: module.knn(rows, centroids, 1)) for _ in range(4))
    finally:
        module.omp_set_num_threads(threads)
    return Speeds(
        gflops=2 * len(rows) * len(centroids) * dim / took / 1e9, disk_bytes_s=_disk_bytes_s(folder), cores=cores()
    )


def _disk_bytes_s(folder: Path | None) -> float:
    """From a durable write of 32 MB; a modest disk's speed where there is no room for it."""
    data = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder if folder is not None and folder.is_dir() else None) as file:

            def write() -> None:
                for _ in range(32):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())

            return 32 * len(data) / _timed(write)
    except OSError:
        return 200e6


def _timed(work: object) -> float:
    begun = time.perf_counter()
    work()  # type: ignore[operator]
    return max(time.perf_counter() - begun, 1e-6)
