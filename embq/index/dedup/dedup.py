"""Deduplication of an index: its plan, its stages, and the folder with the groups and the report."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embq.core.errors import InputError
from embq.core.formats.duplicate_groups import GROUPS
from embq.core.storage import beneath
from embq.core.storage.durable import fsync_file, fsync_folder
from embq.core.units import content_hash
from embq.index.change.deletes import deleted_bits
from embq.index.change.version_swap import tidy
from embq.index.dedup.stages import (
    BATCH_ROWS,
    BINS,
    CANDIDATES,
    LEAST_FACTOR,
    NEIGHBOURS,
    DedupSpec,
    as_cosines,
    memory_of,
    run_of,
)
from embq.index.faiss_module import faiss, set_threads
from embq.index.index_files.files import disk_error, index_lock, to_json
from embq.index.index_files.lists import is_set
from embq.index.index_files.rows import RowsFiles
from embq.index.index_files.version import Version, read_current
from embq.index.plan.costs import BASE_BYTES
from embq.index.searcher import Searcher
from embq.index.stages.build import StageProgress, StageSequence
from embq.index.stages.build_dir import BuildDir
from embq.index.stages.report_picture import COLOURS, DPI
from embq.index.stages.runners import Runner
from embq.index.stages.units import Sidecar

REPORT, PICTURE = "report.json", "report.png"
UNIT_ROWS = 65_536
"""Rows of a unit: some ten seconds of searching, beside which opening the index is little."""
SAMPLE = 1_000
"""Rows that are searched for the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupPlan:
    """An estimate, from a search for a sample of rows.

    Attributes:
        rows: that are compared.
        pairs: near rows, of groups of up to `NEIGHBOURS` rows; larger groups have more.
        nprobe: lists that are searched for each row.
        nlist: lists of the index.
        ram_bytes: of one process.
        disk_bytes: of temporary files.
        seconds: of the stage `dedup`, by this process with all its threads.
    """

    rows: int
    pairs: int
    nprobe: int
    nlist: int
    ram_bytes: int
    disk_bytes: int
    seconds: float


def make_spec(base: Version, threshold: float, nprobe: int | None) -> DedupSpec:
    """The deduplication of a version; InputError `no_cosine` if its vectors do not have length 1."""
    if not base.collection.unit_length:
        raise InputError(
            f"the vectors of {base.collection.root} do not have length 1, and the index does not rank them by cosine",
            next_step="scale them to length 1, and build the index again",
            code="no_cosine",
        )
    return DedupSpec(
        base=base.name,
        threshold=threshold,
        nprobe=min(base.plan.nlist, nprobe or int(base.search.get("nprobe", 1))),
        k_factor=max(LEAST_FACTOR, int(base.search.get("k_factor", 1))),
        unit_rows=UNIT_ROWS,
    )


def plan_dedup(base: Version, spec: DedupSpec, *, threads: int, memory_bytes: int) -> DedupPlan:
    """Estimate pairs, memory and time by searching for some of the rows."""
    memory = memory_of(base, memory_bytes)
    searcher = Searcher(base, memory=memory, threads=threads)
    ids = np.random.default_rng(0).choice(base.next_id, min(SAMPLE, base.next_id), replace=False)
    ids = np.sort(ids[~is_set(deleted_bits(base), ids)]).astype(np.int64)
    rows = searcher.vectors(ids) if base.rows else base.collection.read_rows_at(ids)
    searcher.search(rows[:50], NEIGHBOURS, nprobe=spec.nprobe, k_factor=spec.k_factor)  # memory and threads are made
    began = time.monotonic()
    hits = searcher.search(rows, NEIGHBOURS, nprobe=spec.nprobe, k_factor=spec.k_factor)
    took = time.monotonic() - began + (0.0 if base.rows else _rerank_s(base, rows, spec.k_factor))
    near = (hits.ids >= 0) & (hits.ids != ids[:, None]) & (as_cosines(searcher, hits.scores) >= spec.threshold)
    share = base.n / max(1, len(ids))
    lists = sum(file.bytes for group in base.groups for file in group) if memory == "ram" else 0
    scratch = 0 if base.rows else 2 * base.plan.dim * base.next_id
    return DedupPlan(
        rows=base.n,
        pairs=round(near.sum() / 2 * share),
        nprobe=spec.nprobe,
        nlist=base.plan.nlist,
        ram_bytes=BASE_BYTES + base.trained.bytes + lists + 4 * BATCH_ROWS * 4 * base.plan.dim + 48 * CANDIDATES,
        disk_bytes=scratch + 12 * base.next_id + round(32 * near.any(axis=1).sum() * share),
        seconds=took * share,
    )


def _rerank_s(base: Version, rows: np.ndarray, k_factor: int) -> float:
    """Seconds of re-ranking for some rows, by vectors that an index without them gets in the stage `vectors`."""
    files = RowsFiles(base, base.plan.dim, rows.astype(np.float16))
    candidates = np.random.default_rng(0).integers(0, len(rows), (len(rows), NEIGHBOURS * k_factor))
    set_threads(1)  # as in a search
    began = time.monotonic()
    for query, ids in zip(rows, candidates, strict=True):
        files.nearest(query, ids, NEIGHBOURS)
    return time.monotonic() - began


def dedup(
    index: Path, base: Version, spec: DedupSpec, runner: Runner, progress: StageProgress
) -> tuple[Path, dict[str, Any]]:
    """Group the rows of the current version that are near each other; returns the folder of the result, and its report.

    The folder has the groups (see `embq.core.formats.duplicate_groups`), the report, and where matplotlib is
    installed a picture. Interrupted, the same call goes on.

    Raises TryLaterError if another process is at work on the index, or has changed it since `base` was read, and
    what the runner raises.
    """
    with index_lock(index):
        if read_current(index).name != base.name:
            raise InputError(f"{index} was changed meanwhile", next_step="run the command again", code="index_changed")
        files = sorted(file.sha256 for file in base.files())
        digest = content_hash([to_json(spec), files, str(faiss().__version__)])
        build_dir = BuildDir(index, f"dedup-{digest[:16]}")
        spec, _ = build_dir.begin(DedupSpec, lambda: spec)
        stages = StageSequence(build_dir, runner, progress)
        blocks = len(spec.blocks(base))
        needs = () if base.rows else ("vectors",)
        if needs:
            stages.run("vectors", blocks)
        stages.run("dedup", blocks, needs)
        (grouped,) = stages.run("groups", 1, (*needs, "dedup"))
        report = _report(base, spec, stages.sidecars)
        folder = index / f"dedup-{spec.threshold:g}-{base.name}"
        drafts = {name: build_dir.temporary(name) for name in (PICTURE, REPORT)}
        try:
            _draw(report, drafts[PICTURE])
            drafts[REPORT].write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            # Through a descriptor: the folder may be shared with others, who could put a link in its place.
            with beneath.folder(index, folder.name, make=True) as descriptor:
                for name, path in {GROUPS: grouped.files["groups"].check(index), **drafts}.items():
                    if path.exists():
                        fsync_file(path)
                        os.rename(path, name, dst_dir_fd=descriptor)
                os.fsync(descriptor)
            fsync_folder(index)
        except OSError as error:
            raise disk_error(error, folder) from error
        tidy(index)
        return folder, report


def _report(base: Version, spec: DedupSpec, stages: Mapping[str, Sequence[Sidecar]]) -> dict[str, Any]:
    searched, grouped = stages["dedup"], stages["groups"][0]
    every = [sidecar for units in stages.values() for sidecar in units]
    sizes = {int(size): count for size, count in grouped.stats["sizes"].items()}
    return {
        "schema": 1,
        "version": base.name,
        "run": run_of(base),
        "threshold": spec.threshold,
        "nprobe": spec.nprobe,
        "k_factor": spec.k_factor,
        "rows": sum(sidecar.stats["rows"] for sidecar in searched),
        "near": grouped.stats["rows"],
        "duplicates": grouped.stats["duplicates"],
        "groups": grouped.stats["groups"],
        "largest_group": max(sizes, default=0),
        "saturated": sum(sidecar.stats["saturated"] for sidecar in searched),
        "group_sizes": grouped.stats["sizes"],
        "cosines": {"from": -1.0, "to": 1.0, "counts": grouped.stats["cosines"]},
        "groups_sha256": grouped.files["groups"].sha256,
        "seconds": {stage: round(sum(unit.seconds for unit in units), 3) for stage, units in stages.items()},
        "cpu_seconds": {stage: round(sum(unit.cpu_seconds for unit in units), 3) for stage, units in stages.items()},
        "peak_rss_bytes": max(sidecar.peak_rss_bytes for sidecar in every),
    }


def _draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw sizes of groups and cosines, as PNG; nothing where matplotlib is missing, or there is no group."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    if not report["groups"]:
        return
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = {int(size): count for size, count in report["group_sizes"].items()}
    left.loglog(list(sizes), list(sizes.values()), "o", color=COLOURS[0], markersize=4)
    left.set(xlabel="rows of a group", ylabel="groups")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter("")
    edges = np.linspace(-1.0, 1.0, BINS + 1)
    counts = np.array(report["cosines"]["counts"])
    shown = slice(int(np.flatnonzero(counts)[0]), BINS)
    right.bar(edges[:-1][shown], counts[shown], 2.0 / BINS, align="edge", color=COLOURS[1])
    right.axvline(report["threshold"], color="black", linestyle="--", linewidth=1.0)
    right.set(xlabel="cosine of a duplicate to the row that is kept", ylabel="duplicates")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{report['duplicates']:,} of {report['rows']:,} rows are near duplicates (cosine >= {report['threshold']:g})"
    )
    figure.savefig(path, dpi=DPI)
