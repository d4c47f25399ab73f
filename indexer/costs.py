"""What each stage of a build takes: memory, disk and time, from the sizes of the plan and the speed of the machine."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from core.cores import cores
from indexer.codecs import ID_BYTES, Codec

BASE_BYTES = 200 << 20
"""A process with faiss, numpy and pyarrow loaded, before it holds any rows (measured: 150 MB, and room)."""

BATCH_ROWS = 32_768
"""Rows that are held as float32 at once while a block is read, assigned and encoded."""

READ_ROWS = 65_536
"""Rows that are read at once where they are only looked at, as float16 and as float32."""

WORKING_BYTES = 96 << 20
"""What merging and tuning hold besides lists: buffers, queries with their true neighbours, pages of rows re-ranked."""

TRUTH_QUERIES = 1_600
"""Queries whose true neighbours are found by comparing every row."""

READ_S_PER_NUMBER = 12e-9
"""One core's time to read a number of a row, widen it and look whether it is finite (measured on npy files)."""

WRITE_S_PER_ROW = 15e-6
"""One core's time for a row's id, key, caption and float16 vector on their way to files (measured)."""

PAGES_BYTES = 160 << 20
"""Rows that re-ranking has looked at stay mapped while memory is free, and count as the process's."""

TUNE_S = 40.0
"""Sweeping probes and refinement on the queries, single-threaded: bounded by the tuning itself."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """An estimate for one stage.

    Attributes:
        stage: "sample", "train", "truth", "add", "merge", "tune".
        ram_bytes: of one process.
        disk_bytes: that it adds, whether or not the finished index keeps them.
        seconds: with the plan's processes side by side.
        units: into how many steps it is cut.
    """

    stage: str
    ram_bytes: int
    disk_bytes: int
    seconds: float
    units: int


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


def train_bytes(rows: int, codec: Codec, nlist: int, dim: int) -> int:
    """RAM of training: the sample as float32, as it is put together, as codes and centroids see it; the centroids, and
    their sums; the matrices of the transforms."""
    listed = codec.list_dim if codec.list_dim < codec.coded_dim else 0
    seen = (codec.coded_dim if codec.transform else 0) + listed
    matrices = 32 * dim * dim if seen else 0
    return BASE_BYTES + 4 * rows * (dim + max(dim, seen)) + 12 * codec.list_dim * nlist + matrices


def add_bytes(rows: int, codec: Codec, nlist: int, dim: int) -> int:
    """RAM of adding a block: centroids, a batch of rows as read, transformed and compared, and growing lists."""
    batch = BATCH_ROWS * 4 * (2 * dim + codec.coded_dim + codec.list_dim)
    return BASE_BYTES + 4 * codec.list_dim * nlist + batch + 2 * rows * codec.bytes_per_vector()


def stage_costs(
    *,
    n: int,
    dim: int,
    codec: Codec,
    nlist: int,
    train_rows: int,
    iterations: int,
    block_rows: int,
    slices: int,
    refine: str,
    workers: int,
    memory: int,
    speeds: Speeds,
) -> tuple[StageCost, ...]:
    """What every stage takes.

    Args:
        memory: bytes that all processes together may take.
    """
    at_once = min(workers, speeds.cores)
    flops_s, disk_s = speeds.gflops * 1e9, speeds.disk_bytes_s
    pace = speeds.gflops / 50
    row_bytes = 2 * dim
    entries = n * codec.bytes_per_vector()
    index = codec.index_bytes(n, nlist, dim)
    blocks = -(-n // block_rows)
    kmeans_s = 2.0 * train_rows * nlist * codec.list_dim * iterations / flops_s / speeds.cores
    pq_s = codec.code_bytes * (0.02 if codec.key.endswith("x4") else 0.5) if codec.key.startswith("PQ") else 0.0
    rotate_s = 4.0 * min(train_rows, 65_536) * dim * dim / flops_s if codec.transform else 0.0
    if codec.transform.startswith("OPQ"):
        rotate_s *= 50
    products = nlist * codec.list_dim + (dim * codec.coded_dim if codec.transform else 0)
    if codec.list_dim < codec.coded_dim:
        products += codec.coded_dim * codec.list_dim
    assign_s = 2.0 * n * products / flops_s
    rows_file = n * row_bytes if refine == "fp16" else 0
    read_s = n * dim * READ_S_PER_NUMBER / pace + n * row_bytes / disk_s / 4
    return (
        StageCost(
            stage="sample",
            ram_bytes=BASE_BYTES + READ_ROWS * 6 * dim,
            disk_bytes=train_rows * 4 * dim,
            seconds=(read_s + train_rows * 4 * dim / disk_s) / at_once,
            units=blocks,
        ),
        StageCost(
            stage="train",
            ram_bytes=train_bytes(train_rows, codec, nlist, dim),
            disk_bytes=4 * codec.list_dim * nlist,
            seconds=kmeans_s + pq_s / pace + rotate_s,
            units=1,
        ),
        StageCost(
            stage="truth",
            ram_bytes=BASE_BYTES + READ_ROWS * 6 * dim + TRUTH_QUERIES * 128 * 12,
            disk_bytes=TRUTH_QUERIES * 128 * 12 * blocks,
            seconds=(2.0 * n * TRUTH_QUERIES * dim / flops_s + read_s) / at_once,
            units=blocks,
        ),
        StageCost(
            stage="add",
            ram_bytes=add_bytes(min(block_rows, n), codec, nlist, dim),
            disk_bytes=entries + rows_file,
            seconds=(
                assign_s
                + n / (codec.encode_rows_s * pace)
                + n * WRITE_S_PER_ROW / pace
                + read_s
                + (entries + rows_file) / disk_s
            )
            / at_once,
            units=blocks,
        ),
        StageCost(
            stage="merge",
            ram_bytes=BASE_BYTES + WORKING_BYTES + 3 * -(-entries // slices),
            disk_bytes=entries,
            seconds=2 * entries / disk_s / at_once,
            units=slices,
        ),
        StageCost(
            stage="tune",
            ram_bytes=BASE_BYTES
            + WORKING_BYTES
            + min(rows_file, PAGES_BYTES)
            + (index if index + BASE_BYTES + WORKING_BYTES <= memory else 4 * codec.list_dim * nlist),
            disk_bytes=0,
            seconds=TUNE_S * min(1.0, n / 1e6),
            units=1,
        ),
    )


__all__ = [
    "BASE_BYTES",
    "BATCH_ROWS",
    "ID_BYTES",
    "Speeds",
    "StageCost",
    "add_bytes",
    "measure_speeds",
    "stage_costs",
    "train_bytes",
]
