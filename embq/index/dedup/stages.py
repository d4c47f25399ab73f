"""Stages of deduplication: vectors (where the index keeps none), dedup (which rows are near each other), groups."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embq.core.formats.duplicate_groups import GROUP_SCHEMA, NOTE
from embq.core.storage.durable import drop
from embq.index.change.deletes import deleted_bits
from embq.index.collection.collection import faults
from embq.index.collection.opening import Block
from embq.index.index_files.identity import Identity
from embq.index.index_files.lists import is_set
from embq.index.index_files.rows import RowsFiles
from embq.index.index_files.version import Version, read_version
from embq.index.searcher import Searcher
from embq.index.stages.spec import row_files
from embq.index.stages.task import StageResult, Task

NEIGHBOURS, MOST_NEIGHBOURS, STEP = 8, 512, 4
"""Nearest rows that are looked at, the row itself among them. Where all of them are near, four times as many are, up to
the second number: a row has few near duplicates as a rule, and a placeholder has thousands."""
LEAST_FACTOR = 4
"""Least number of candidates for each neighbour: the codes rank them, and exact cosines decide."""
CANDIDATES = 1 << 18
"""Candidates that are held at a time, which bounds the rows that are searched together."""
SLACK = 0.03
"""Vectors of length 1 are off by up to 1 % if they are stored as int8, and their products by twice that. What is
below the threshold by less is compared by its cosine."""
BATCH_ROWS = 8_192
"""Vectors in memory at a time."""
PIECE = 65_536
"""Labels, or pairs, in memory at a time."""
BINS = 200
"""Bars of the histogram of cosines, from -1 to 1 in equal steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupSpec:
    """A deduplication; the content of its build.json.

    Attributes:
        base: name of the version.
        threshold: least cosine of two near rows.
        nprobe: lists that are searched for each row.
        k_factor: candidates for each neighbour.
        unit_rows: ids of one unit.
    """

    base: str
    threshold: float
    nprobe: int
    k_factor: int
    unit_rows: int

    def blocks(self, version: Version) -> list[Block]:
        """Ranges of ids, one for each unit of the stages `vectors` and `dedup`."""
        return version.collection.blocks(self.unit_rows)


def vectors(task: Task) -> StageResult:
    """The rows of a block as float16 (rows, dim), as an index with `--refine fp16` keeps them."""
    spec = task.spec_as(DedupSpec)
    collection = read_version(task.index, spec.base).collection
    block = spec.blocks(read_version(task.index, spec.base))[task.unit.number]
    path = task.temporary("rows")
    with open(path, "wb") as file:
        for _, rows in collection.read_vectors(block.first_id, block.stop_id, batch_rows=BATCH_ROWS):
            file.write(np.ascontiguousarray(rows.astype(np.float16)).data)
    return StageResult(work={"rows": path})


def dedup(task: Task) -> StageResult:
    """The rows of a block and those near them, int64 (m, 2): each row with the lowest that it is connected to here.

    Statistics: rows that were searched, and those that have more than `MOST_NEIGHBOURS` near ones ("saturated").
    """
    spec, version = task.spec_as(DedupSpec), _version(task)
    block = spec.blocks(version)[task.unit.number]
    searcher = _searcher(task, version)
    bits = deleted_bits(version)
    collected, rows, saturated = [np.empty((0, 2), np.int64)], 0, 0
    for first_id in range(block.first_id, block.stop_id, BATCH_ROWS):
        ids = np.arange(first_id, min(first_id + BATCH_ROWS, block.stop_id))
        ids = ids[~is_set(bits, ids)]
        pairs, full = near_pairs(searcher, ids, spec)
        # What is connected already is put together now and then, so that large groups do not take memory.
        collected.append(pairs)
        if sum(map(len, collected)) > CANDIDATES:
            collected = [spanning(np.concatenate(collected))]
        rows, saturated = rows + len(ids), saturated + full
    path = task.temporary("npy")
    with open(path, "wb") as file:
        np.save(file, spanning(np.concatenate(collected)))
    return StageResult(work={"pairs": path}, stats={"rows": rows, "saturated": saturated})


_opened: dict[tuple[str, str], Searcher] = {}
"""The searcher of the last unit: units of a deduplication have the same, and faiss 1.15 leaks the lists of each."""


def _searcher(task: Task, version: Version) -> Searcher:
    key = task.unit.index, task.unit.build
    if key not in _opened:
        _opened.clear()
        _opened[key] = Searcher(version, memory=memory_of(version, task.memory_bytes), threads=task.threads)
    return _opened[key]


def memory_of(version: Version, memory_bytes: int) -> str:
    """Where the lists of a searcher are that may take so much memory."""
    lists = sum(file.bytes for group in version.groups for file in group)
    return "ram" if lists <= memory_bytes // 2 else "mmap"


def near_pairs(searcher: Searcher, ids: np.ndarray, spec: DedupSpec) -> tuple[np.ndarray, int]:
    """(id, id of a near row) of some rows, int64 (m, 2), and the number of those that have more near rows than found.

    Args:
        ids: int64 (n,), none of them deleted.
    """
    rows = searcher.vectors(ids)
    good = ~faults(rows)
    remaining, rows = ids[good], rows[good]
    # Equal rows are searched for once: of placeholders there may be any number.
    same = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1] * rows.itemsize))).ravel()
    _, first, number = np.unique(same, return_index=True, return_inverse=True)
    pairs, count = [np.stack([remaining, remaining[first[number]]], axis=1)], NEIGHBOURS
    remaining, rows = remaining[first], rows[first]
    while len(remaining):
        full = np.zeros(len(remaining), bool)
        for start in range(0, len(remaining), step := max(1, CANDIDATES // (count * spec.k_factor))):
            here = slice(start, start + step)
            hits = searcher.search(rows[here], count, nprobe=spec.nprobe, k_factor=spec.k_factor)
            likely = (hits.ids >= 0) & (as_cosines(searcher, hits.scores) >= spec.threshold - SLACK)
            full[here] = likely.all(axis=1)
            at, place = np.nonzero(likely if count >= MOST_NEIGHBOURS else likely & ~full[here, None])
            both = np.stack([remaining[here][at], hits.ids[at, place]], axis=1)
            both = both[both[:, 0] != both[:, 1]]
            pairs.append(both[cosines(searcher.vectors, both[:, 0], both[:, 1]) >= spec.threshold])
        if count >= MOST_NEIGHBOURS:
            return np.concatenate(pairs), int(full.sum())
        remaining, rows, count = remaining[full], rows[full], count * STEP
    return np.concatenate(pairs), 0


def as_cosines(searcher: Searcher, scores: np.ndarray) -> np.ndarray:
    """The scores of a search for vectors of length 1 as cosines."""
    return 1.0 - scores / 2.0 if searcher.version.plan.metric == "l2" else scores


def cosines(read: Callable[[np.ndarray], np.ndarray], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """float32 (n,): the cosine of each row of `first` with that of `second`, of the vectors that `read` returns."""
    values = np.empty(len(first), np.float32)
    for start in range(0, len(first), BATCH_ROWS):
        here = slice(start, start + BATCH_ROWS)
        a, b = read(first[here]), read(second[here])
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        values[here] = np.einsum("ij,ij->i", a, b) / np.maximum(lengths, np.finfo(np.float32).tiny)
    return values


# --- connected components ---


def spanning(pairs: np.ndarray) -> np.ndarray:
    """int64 (m, 2): each row of some pairs with the lowest that these connect it to, but for the lowest ones."""
    ids, numbers = np.unique(pairs, return_inverse=True)
    labels = np.arange(len(ids))
    connect(labels, lambda: [numbers.reshape(-1, 2)])
    own = labels != np.arange(len(ids))
    return np.stack([ids[own], ids[labels[own]]], axis=1)


def connect(labels: np.ndarray, pairs: Callable[[], Iterable[np.ndarray]]) -> None:
    """Let all rows that pairs connect have the lowest number among them as their label.

    Args:
        labels: int64 (n,), each its own number at first; an array, or a file that is mapped.
        pairs: gives the pairs some at a time, int64 (m, 2); it is called until nothing changes.

    The labels are a forest in which no parent has a higher number than its child: a pair hangs the higher of its two
    roots below the lower one.
    """
    changed = True
    while changed:
        changed = False
        for batch in pairs():
            roots = labels[batch]
            while not np.array_equal(above := labels[roots], roots):
                roots = above
            low, high = roots.min(axis=1), roots.max(axis=1)
            if (apart := low != high).any():
                np.minimum.at(labels, high[apart], low[apart])
                changed = True
        for start in range(0, len(labels), PIECE):
            here = labels[start : start + PIECE]
            while not np.array_equal(above := labels[here], here):
                here[:] = above


def groups(task: Task) -> StageResult:
    """The parquet file of all rows that are near another one, in the order of their ids.

    Memory beside mapped files, which take 12 bytes for each id: `PIECE` rows and their vectors.
    """
    spec, version = task.spec_as(DedupSpec), _version(task)
    paths = [task.file("dedup", number, "pairs") for number in range(len(task.inputs["dedup"]))]
    temporary = task.temporary("labels"), task.temporary("sizes")
    try:
        # Written before they are mapped: a full disk is an error here, and SIGBUS in a sparse file that is mapped.
        with temporary[0].open("wb") as of_labels, temporary[1].open("wb") as of_sizes:
            for start in range(0, version.next_id, PIECE):
                ids = np.arange(start, min(start + PIECE, version.next_id), dtype=np.int64)
                of_labels.write(ids.data)
                of_sizes.write(np.zeros(len(ids), np.int32).data)
        labels = np.memmap(temporary[0], np.int64, "r+")
        sizes = np.memmap(temporary[1], np.int32, "r+")
        connect(labels, lambda: _pieces(paths))
        for start in range(0, len(labels), PIECE):
            np.add.at(sizes, labels[start : start + PIECE], 1)
        path = task.temporary("parquet")
        note = {"build": version.build, "run": run_of(version), "threshold": spec.threshold}
        bars = np.zeros(BINS, np.int64)
        rows = duplicates = 0
        with pq.ParquetWriter(path, GROUP_SCHEMA.with_metadata({NOTE: json.dumps(note).encode()})) as writer:
            for table in _tables(version, labels, sizes):
                writer.write_table(table.cast(writer.schema))
                duplicate_cosines = table.filter(pc.invert(table["kept"]))["cosine"].to_numpy()
                bars += np.histogram(duplicate_cosines, BINS, (-1.0, 1.0 + 1e-6))[0]
                rows, duplicates = rows + table.num_rows, duplicates + len(duplicate_cosines)
        return StageResult(
            work={"groups": path},
            stats={
                "rows": rows,
                "duplicates": duplicates,
                "groups": rows - duplicates,
                "sizes": _count_sizes(sizes),
                "cosines": bars.tolist(),
            },
        )
    finally:
        for scratch in temporary:
            drop(scratch)


def _tables(version: Version, labels: np.ndarray, sizes: np.ndarray) -> Iterator[pa.Table]:
    read = RowsFiles(version, version.plan.dim).read
    identity = Identity.open([(file.check(version.index), file.first_id, file.rows) for file in version.identity])
    for start in range(0, len(labels), PIECE):
        near = np.asarray(labels[start : start + PIECE])
        here = np.flatnonzero(sizes[near] > 1)
        if len(here):
            ids, group = start + here, near[here]
            is_kept = ids == group
            cosine = np.ones(len(ids), np.float32)
            cosine[~is_kept] = cosines(read, ids[~is_kept], group[~is_kept])
            keys = identity.rows(ids, ["key"])["key"].cast(pa.string())
            columns = [pa.array(ids), keys, *map(pa.array, (group, is_kept, cosine))]
            yield pa.Table.from_arrays(columns, schema=GROUP_SCHEMA)


def _count_sizes(sizes: np.ndarray) -> dict[str, int]:
    """Size of a group -> number of groups; a row alone is none."""
    histogram: dict[int, int] = {}
    for start in range(0, len(sizes), PIECE):
        values, counts = np.unique(sizes[start : start + PIECE], return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            histogram[value] = histogram.get(value, 0) + count
    return {str(size): histogram[size] for size in sorted(histogram) if size > 1}


def _pieces(paths: Iterable[Path]) -> Iterator[np.ndarray]:
    for path in paths:
        pairs = np.load(path, mmap_mode="r", allow_pickle=False)
        for start in range(0, len(pairs), PIECE):
            yield np.asarray(pairs[start : start + PIECE])


def run_of(version: Version) -> str | None:
    """The run whose rows have these ids; None for plain folders, and for several runs."""
    return None if version.collection.folders else version.collection.run


def _version(task: Task) -> Version:
    """The version, with the vectors of its rows if it has none itself."""
    spec = task.spec_as(DedupSpec)
    version = read_version(task.index, spec.base)
    if version.rows:
        return version
    return replace(version, rows=row_files(task.inputs["vectors"], spec.blocks(version), "rows"))
