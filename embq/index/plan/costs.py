"""Memory, disk and time of each stage, from the sizes of the plan and the speed of the machine."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from embq.core.process.limits import cores
from embq.index.plan.build_options import BuildOptions
from embq.index.plan.codecs import Codec

BASE_BYTES = 200 << 20
"""A process with faiss, numpy and pyarrow loaded, before it holds any rows (measured: 150 MB, and room)."""

KMEANS_ITERATIONS = 6
"""On real sentences the lists found after 4 iterations over 50 rows each hold as many true neighbours in as few probed
rows as those after 10 over 100 (0.952 and 0.949 in 12 % of the rows), for a quarter of the time."""

BATCH_ROWS = 32_768
"""Rows that are held as float32 at once while a block is read, assigned and encoded."""

READ_ROWS = 65_536
"""Rows that are read at once if they are only looked at, as float16 and as float32."""

WORKING_BYTES = 96 << 20
"""Memory of merging and tuning besides lists: buffers, queries with their neighbours, pages of re-ranked rows."""

TRUTH_QUERIES = 1_600
"""Queries whose true neighbours are found by comparing every row, at most: rows, and vectors of another modality. They
bound the memory; the usual number takes the time."""

MOST, MOST_OF_LARGE = 1_000, 600
"""Queries in all that a build measures with. Each costs 2 * dim operations for a vector of the collection, as a list
does in assignment: beside the 4,096 lists of a million rows, 600 are 15 % of that, and some percent of a build."""
LARGE_ROWS = 300_000

TRUTH_DEPTH = 200
"""True neighbours kept for each query: recall@100 is reported, and ties of the 100th must be visible."""

TRUTH_BYTES = 12 * TRUTH_DEPTH
"""The neighbours of one query that a block gives, each with its score."""

READ_S_PER_NUMBER = 12e-9
"""One core's time to read a number of a row, widen it and look whether it is finite (measured on npy files)."""

WRITE_S_PER_ROW = 15e-6
"""One core's time for a row's id, key, caption and float16 vector on their way to files (measured)."""

PAGES_BYTES = 160 << 20
"""Rows that re-ranking has looked at stay mapped while memory is free, and count as the process's."""

TOGETHER = 0.8
"""Pace of a core while all others compute too: they share caches and memory (measured with two of two)."""

PCA_WORK = 18.0
"""Time to learn a PCA, in that of as many operations in matrix products: its eigenvectors are found in float64."""

TUNE_S, SWEEP_S, SWEPT_ROWS, LOAD_BYTES_S = 1.5, 8.0, 2e6, 110e6
"""Tuning, on one thread: the timing of searches; the sweep, which ends itself after `SWEEP_S` and takes less below
`SWEPT_ROWS`; and reading lists and rows from a disk. 2.9, 4.9 and 18.8 s with 0.06, 0.3 and 10 million rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Quantities that the cost of a stage depends on.

    Attributes:
        n, dim: rows and dimensions of the collection.
        codec, nlist: of the index.
        train_rows: of k-means.
        block_rows: rows of one add unit.
        slices: ranges of lists, each merged by one unit.
        refine: "fp16": full rows on disk, for re-ranking; "none".
        options: of the build.
        speeds: of the machine.
    """

    n: int
    dim: int
    codec: Codec
    nlist: int
    train_rows: int
    block_rows: int
    slices: int
    refine: str
    options: BuildOptions
    speeds: Speeds

    @property
    def at_once(self) -> float:
        """Processes that compute side by side, as a number of processes that compute alone."""
        count = min(self.options.workers, self.speeds.cores)
        return count * TOGETHER if count > 1 else 1.0

    @property
    def flops_s(self) -> float:
        """Floating-point operations of one core per second."""
        return self.speeds.gflops * 1e9

    @property
    def pace(self) -> float:
        """One core's speed, as a part of that of the core on which the constants were measured."""
        return self.speeds.gflops / 50

    @property
    def blocks(self) -> int:
        """Add units."""
        return -(-self.n // self.block_rows)

    @property
    def entries_bytes(self) -> int:
        """Bytes of all list entries."""
        return self.n * self.codec.bytes_per_vector()

    @property
    def rows_bytes(self) -> int:
        """Bytes of the full rows that are kept."""
        return self.n * 2 * self.dim if self.refine == "fp16" else 0

    @property
    def centroids_bytes(self) -> int:
        """Bytes of the centroids of the lists."""
        return 4 * self.codec.list_dim * self.nlist

    @property
    def read_s(self) -> float:
        """One core's time to read every row once."""
        return self.n * self.dim * READ_S_PER_NUMBER / self.pace + self.n * 2 * self.dim / self.speeds.disk_bytes_s / 4


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


def stage_costs(work: Work) -> tuple[StageCost, ...]:
    """Cost of each stage, in their order."""
    return _sample(work), _train(work), _truth(work), _add(work), _merge(work), _tune(work)


def _sample(work: Work) -> StageCost:
    sampled = work.train_rows * 4 * work.dim
    return StageCost(
        stage="sample",
        ram_bytes=BASE_BYTES + READ_ROWS * 6 * work.dim,
        disk_bytes=sampled,
        seconds=(work.read_s + sampled / work.speeds.disk_bytes_s) / work.at_once,
        units=work.blocks,
    )


def _train(work: Work) -> StageCost:
    """K-means, the codec's own codes, and the transform's matrix: one after the other, k-means on all cores."""
    codec, dim = work.codec, work.dim
    passes = KMEANS_ITERATIONS + 1  # the last one to look back
    distances = 2.0 * work.train_rows * work.nlist * codec.list_dim * passes
    codes_s = codec.code_bytes * (0.02 if codec.key.endswith("x4") else 0.5) if codec.key.startswith("PQ") else 0.0
    learned = 50.0 if codec.transform.startswith("OPQ") else 0.0
    if codec.list_dim < codec.coded_dim or "PCA" in codec.transform:
        learned += PCA_WORK
    rotate_s = learned * 4.0 * min(work.train_rows, 65_536) * dim * dim / work.flops_s
    cores = work.speeds.cores * TOGETHER if work.speeds.cores > 1 else 1.0
    return StageCost(
        stage="train",
        ram_bytes=train_bytes(work.train_rows, codec, work.nlist, dim),
        disk_bytes=work.centroids_bytes,
        seconds=distances / work.flops_s / cores + codes_s / work.pace + rotate_s,
        units=1,
    )


def _truth(work: Work) -> StageCost:
    queries = MOST if work.n <= LARGE_ROWS else MOST_OF_LARGE
    return StageCost(
        stage="truth",
        ram_bytes=BASE_BYTES + READ_ROWS * 6 * work.dim + TRUTH_QUERIES * TRUTH_BYTES,
        disk_bytes=TRUTH_QUERIES * TRUTH_BYTES * work.blocks,
        seconds=(2.0 * work.n * queries * work.dim / work.flops_s + work.read_s) / work.at_once,
        units=work.blocks,
    )


def _add(work: Work) -> StageCost:
    """Every row is read, transformed, assigned to the nearest list, encoded, and written with its identity."""
    codec, written = work.codec, work.entries_bytes + work.rows_bytes
    products = work.nlist * codec.list_dim + (work.dim * codec.coded_dim if codec.transform else 0)
    if codec.list_dim < codec.coded_dim:
        products += codec.coded_dim * codec.list_dim
    return StageCost(
        stage="add",
        ram_bytes=add_bytes(min(work.block_rows, work.n), codec, work.nlist, work.dim),
        disk_bytes=written,
        seconds=(
            2.0 * work.n * products / work.flops_s
            + work.n / (codec.encode_rows_s * work.pace)
            + work.n * WRITE_S_PER_ROW / work.pace
            + work.read_s
            + written / work.speeds.disk_bytes_s
        )
        / work.at_once,
        units=work.blocks,
    )


def _merge(work: Work) -> StageCost:
    return StageCost(
        stage="merge",
        ram_bytes=BASE_BYTES + WORKING_BYTES + 3 * -(-work.entries_bytes // work.slices),
        disk_bytes=work.entries_bytes,
        seconds=2 * work.entries_bytes / work.speeds.disk_bytes_s / work.at_once,
        units=work.slices,
    )


def _tune(work: Work) -> StageCost:
    """Searches in the index: in memory if it has room there, else mapped but for the centroids."""
    working = BASE_BYTES + WORKING_BYTES
    index = work.codec.index_bytes(work.n, work.nlist, work.dim)
    held = index if index + working <= work.options.current_memory_available else work.centroids_bytes
    return StageCost(
        stage="tune",
        ram_bytes=working + min(work.rows_bytes, PAGES_BYTES) + held,
        disk_bytes=0,
        seconds=TUNE_S + SWEEP_S * min(1.0, (work.n / SWEPT_ROWS) ** 0.5) + work.entries_bytes / LOAD_BYTES_S,
        units=1,
    )


def train_bytes(rows: int, codec: Codec, nlist: int, dim: int) -> int:
    """RAM of training: the sample as float32, as it is put together, as codes and centroids see it; the centroids, and
    their sums; the matrices of the transforms."""
    listed = codec.list_dim if codec.list_dim < codec.coded_dim else 0
    transformed_dims = (codec.coded_dim if codec.transform else 0) + listed
    matrices = 32 * dim * dim if transformed_dims else 0
    return BASE_BYTES + 4 * rows * (dim + max(dim, transformed_dims)) + 12 * codec.list_dim * nlist + matrices


def add_bytes(rows: int, codec: Codec, nlist: int, dim: int) -> int:
    """RAM of adding a block: centroids, a batch of rows as read, transformed and compared, and growing lists."""
    batch = BATCH_ROWS * 4 * (2 * dim + codec.coded_dim + codec.list_dim)
    return BASE_BYTES + 4 * codec.list_dim * nlist + batch + 2 * rows * codec.bytes_per_vector()


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Measured speed of a machine.

    Attributes:
        gflops: of one core in the matrix products of float32 that finding the nearest centroid consists of, 1e9/s.
        disk_bytes_s: bytes written per second, durably.
        cores: that the build may keep busy.
    """

    gflops: float
    disk_bytes_s: float
    cores: int = 1


def measure_speeds() -> Speeds:
    """Measures this machine for a third of a second; the disk is that of the temporary folder."""
    import numpy as np

    from embq.index.faiss_module import faiss

    module, dim = faiss(), 256
    rng = np.random.default_rng(0)
    rows, centroids = rng.random((4096, dim), dtype=np.float32), rng.random((1024, dim), dtype=np.float32)
    threads = module.omp_get_max_threads()
    module.omp_set_num_threads(1)
    try:
        took = min(_timed(lambda: module.knn(rows, centroids, 1)) for _ in range(4))
    finally:
        module.omp_set_num_threads(threads)
    gflops = 2 * len(rows) * len(centroids) * dim / took / 1e9
    return Speeds(gflops=gflops, disk_bytes_s=_disk_bytes_s(), cores=cores())


def _disk_bytes_s() -> float:
    """Speed of a durable write of 32 MB; a modest disk's speed if there is no room for it."""
    data = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile() as file:

            def write() -> None:
                for _ in range(32):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())

            return 32 * len(data) / _timed(write)
    except OSError:
        return 200e6


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return max(time.perf_counter() - begun, 1e-6)
