"""Which index is built for so many vectors within the memory given, and what building it will take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from core.errors import InputError
from indexer.autofaiss_keys import IndexKey, parse_key
from indexer.codecs import (
    POINTS_PER_CENTROID,
    SMALL_ROWS,
    Codec,
    codec,
    ladder,
    lists_for,
    most_lists,
)
from indexer.costs import BASE_BYTES, Speeds, StageCost, add_bytes, measure_speeds, stage_costs, train_bytes
from indexer.wish import Wish, available_memory, bytes_text, parse_bytes, parse_recall

SCHEMA = 1
TRAIN_POINTS = 50
"""Rows of the training sample for each list; fewer where the collection or the memory has no more."""

KMEANS_ITERATIONS = 6
"""On real sentences the lists found after 4 iterations over 50 rows each hold as many true neighbours in as few probed
rows as those after 10 over 100 (0.952 and 0.949 in 12 % of the rows), for a quarter of the time."""
MOST_BLOCK_ROWS = 1 << 20
LEAST_BLOCK_ROWS = 1 << 16
LEAST_BLOCK_IN_NEED = 1 << 12
"""Blocks as small as this where the memory allows no larger ones."""

SLICE_BYTES = 128 << 20
"""Of one slice on average, so that the largest stays below 256 MB where lists differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is built, and how. Equal plans of equal collections give equal files.

    Attributes:
        key: faiss factory string of the trained template: "IVF4096,RaBitQ4".
        codec: the codec's name in it.
        nlist: number of lists.
        dim: dimensions of the vectors as they come.
        n: rows.
        metric: "cosine" (squared distances of unit-length vectors inside), "l2" or "ip".
        transform: what is done to vectors first: "" or "PCAR192".
        train_rows: rows of the random sample that is trained on.
        kmeans_iterations: over that sample.
        seed: of the sample and of k-means.
        block_rows: rows of one add unit.
        slices: ranges of lists, each merged by one unit.
        refine: "fp16": full rows on disk, for re-ranking; "none".
        fastscan_at_load: whether the lists are packed for SIMD scanning when they are loaded into RAM.
        indices: into how many indices the lists are divided.
        bytes_per_vector_ram: of the index when it is searched, everything counted.
        bytes_per_vector_disk: of the folder, without identities.
        stages: an estimate for each stage.
        notes: what the user may not expect, a sentence each.
    """

    key: str
    codec: str
    nlist: int
    dim: int
    n: int
    metric: str
    transform: str
    train_rows: int
    kmeans_iterations: int
    seed: int
    block_rows: int
    slices: int
    refine: str
    fastscan_at_load: bool
    indices: int
    bytes_per_vector_ram: float
    bytes_per_vector_disk: float
    stages: tuple[StageCost, ...]
    notes: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {"schema": SCHEMA, **asdict(self), "stages": [asdict(s) for s in self.stages], "notes": list(self.notes)}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Plan:
        """What `describe` gave."""
        fields = {name: value for name, value in description.items() if name != "schema"}
        fields["stages"] = tuple(StageCost(**stage) for stage in fields["stages"])
        fields["notes"] = tuple(fields["notes"])
        return cls(**fields)


def make_plan(n: int, dim: int, wish: Wish, *, unit_length: bool, speeds: Speeds) -> Plan:
    """The plan for `n` rows of `dim` dimensions within the wish.

    Args:
        unit_length: whether the vectors have length 1.

    Raises:
        InputError: there is nothing to index (`no_embeddings`), or nothing fits (`index_memory`, `build_memory`); the
            message has the numbers, the next step the nearest plans that fit.
        UsageError: an option has no meaning here.
    """
    wish.check()
    if n < 1:
        raise InputError(
            "there are no embeddings to index",
            next_step="Give a folder that holds at least one vector.",
            code="no_embeddings",
        )
    notes: list[str] = []
    asked = parse_key(wish.index_key, dim=dim, rows=n) if wish.index_key is not None else None
    metric = "l2" if wish.metric == "l2" else "cosine" if unit_length else "ip"
    rungs = list(ladder(dim, metric=metric, refine=wish.refine != "none"))
    chosen, nlist = _asked_for(asked, n, dim, wish, rungs, notes) if asked else _best_that_fits(n, dim, wish, rungs)
    block_rows = _block_rows(n, dim, chosen, nlist, wish)
    nlist, train_rows = _trainable(n, dim, chosen, nlist, wish, notes)
    entries = n * chosen.bytes_per_vector()
    slices = min(nlist, max(wish.nb_indices_to_keep, math.ceil(entries / SLICE_BYTES)))
    if slices < wish.nb_indices_to_keep:
        notes.append(f"{nlist} lists are divided into {slices} indices, not into {wish.nb_indices_to_keep}")
    refine = wish.refine if wish.refine != "auto" else "fp16" if chosen.refine else "none"
    index_bytes = chosen.index_bytes(n, nlist, dim)
    return Plan(
        key=chosen.factory(nlist, coarse=asked.coarse if asked else ""),
        codec=chosen.key,
        nlist=nlist,
        dim=dim,
        n=n,
        metric=metric,
        transform=chosen.transform,
        train_rows=train_rows,
        kmeans_iterations=KMEANS_ITERATIONS if nlist > 1 else 1,
        seed=wish.seed,
        block_rows=block_rows,
        slices=slices,
        refine=refine,
        fastscan_at_load=chosen.fastscan_at_load,
        indices=min(wish.nb_indices_to_keep, slices),
        bytes_per_vector_ram=round(index_bytes / n, 2),
        bytes_per_vector_disk=round((index_bytes + (2 * dim * n if refine == "fp16" else 0)) / n, 2),
        stages=stage_costs(
            n=n,
            dim=dim,
            codec=chosen,
            nlist=nlist,
            train_rows=train_rows,
            iterations=KMEANS_ITERATIONS,
            block_rows=block_rows,
            slices=slices,
            refine=refine,
            workers=wish.workers,
            memory=wish.current_memory_available,
            speeds=speeds,
        ),
        notes=tuple(notes),
    )


def _share(codec: Codec, n: int, nlist: int, dim: int, wish: Wish) -> int:
    """RAM of one of the indices that are kept."""
    return codec.index_bytes(math.ceil(n / wish.nb_indices_to_keep), nlist, dim)


def _best_that_fits(n: int, dim: int, wish: Wish, rungs: Sequence[Codec]) -> tuple[Codec, int]:
    """The most exact codec, and its lists, that fit into the memory of the index."""
    flat = codec("Flat", dim)
    if n < SMALL_ROWS and _share(flat, n, 1, dim, wish) <= wish.max_index_memory_usage:
        return flat, 1
    for rung in rungs:
        nlist = lists_for(n, packed=rung.fastscan_at_load)
        if _share(rung, n, nlist, dim, wish) <= wish.max_index_memory_usage:
            return rung, nlist
    raise _too_small(n, dim, nlist, wish, rungs[-1], rungs)


def _asked_for(
    asked: IndexKey, n: int, dim: int, wish: Wish, rungs: Sequence[Codec], notes: list[str]
) -> tuple[Codec, int]:
    """The codec and the lists of the user's key, where they fit."""
    nlist = asked.nlist or 1
    if asked.note:
        notes.append(asked.note)
    if nlist > n:
        lower = most_lists(n)
        notes.append(f"{nlist} lists for {n:,} vectors: lowered to {lower}, so that each has vectors to be trained on")
        nlist = lower
    if _share(asked.codec, n, nlist, dim, wish) > wish.max_index_memory_usage:
        raise _too_small(n, dim, nlist, wish, asked.codec, rungs)
    return asked.codec, nlist


def _too_small(n: int, dim: int, nlist: int, wish: Wish, rung: Codec, rungs: Sequence[Codec]) -> InputError:
    """The refusal of a memory limit, with what would work."""
    given = wish.max_index_memory_usage
    needed = _share(rung, n, nlist, dim, wish)
    ways = [f"--max-index-memory-usage {bytes_text(needed)} (for {rung.factory(nlist)})"]
    fits = [(r, lists_for(n, packed=r.fastscan_at_load)) for r in rungs]
    smaller = next(((r, k) for r, k in fits if _share(r, n, k, dim, wish) <= given), None)
    if smaller is not None:
        takes = bytes_text(_share(smaller[0], n, smaller[1], dim, wish))
        ways.insert(0, f"--index-key {smaller[0].factory(smaller[1])}, which takes {takes}")
    elif wish.index_key is None and len(fits) > 2:
        better, lists = fits[len(fits) // 2]
        takes = bytes_text(_share(better, n, lists, dim, wish))
        ways.append(f"--max-index-memory-usage {takes} (for {better.factory(lists)}, more exact)")
    fixed = rung.index_bytes(0, nlist, dim)
    if given > fixed + rung.bytes_per_vector():
        keep = math.ceil(n / ((given - fixed) // rung.bytes_per_vector()))
        if keep <= nlist:
            ways.append(f"--nb-indices-to-keep {keep}, searched one after another or on {keep} machines")
    return InputError(
        f"an index over {n:,} vectors of {dim} dimensions takes {bytes_text(needed)} ({needed:,} bytes) of memory with "
        f"{rung.factory(nlist)}, {'the smallest key' if wish.index_key is None else 'the key asked for'}; "
        f"--max-index-memory-usage allows {bytes_text(given)} ({given:,} bytes)",
        next_step="One of these works: " + "; ".join(ways) + ".",
        code="index_memory",
    )


def _trainable(n: int, dim: int, codec: Codec, nlist: int, wish: Wish, notes: list[str]) -> tuple[int, int]:
    """Lists and sample rows whose training fits into the memory of the build: first fewer rows, then fewer lists."""
    memory = wish.current_memory_available
    rows = min(n, max(TRAIN_POINTS * nlist, 16_384))
    wanted = nlist
    while train_bytes(rows, codec, nlist, dim) > memory:
        if rows > POINTS_PER_CENTROID * nlist:
            rows = max(POINTS_PER_CENTROID * nlist, rows // 2)
        elif nlist > 1 and wish.index_key is None:
            nlist //= 2
            rows = min(rows, POINTS_PER_CENTROID * nlist)
        else:
            needed = train_bytes(min(rows, n), codec, nlist, dim)
            raise InputError(
                f"training {codec.factory(nlist)} on {rows:,} of {n:,} vectors of {dim} dimensions takes "
                f"{bytes_text(needed)} ({needed:,} bytes) of memory; --current-memory-available allows "
                f"{bytes_text(memory)} ({memory:,} bytes)",
                next_step=f"Give --current-memory-available {bytes_text(needed)}"
                + ("." if wish.index_key is None else ", or a key with fewer lists."),
                code="build_memory",
            )
    if nlist < wanted:
        notes.append(f"{nlist} lists instead of {wanted}, whose training does not fit --current-memory-available")
    return nlist, rows


def _block_rows(n: int, dim: int, codec: Codec, nlist: int, wish: Wish) -> int:
    """Rows of one add unit: a sixteenth of all, in bounds; less where the memory of one process demands it."""
    rows: int = min(MOST_BLOCK_ROWS, max(LEAST_BLOCK_ROWS, 1 << (n // 16).bit_length()))
    memory = wish.current_memory_available // wish.workers
    while add_bytes(min(rows, n), codec, nlist, dim) > memory:
        if rows <= LEAST_BLOCK_IN_NEED:
            needed = add_bytes(min(rows, n), codec, nlist, dim)
            fewer = wish.current_memory_available // needed
            ways = [f"--current-memory-available {bytes_text(needed * wish.workers)}"]
            if fewer:
                ways.append(f"{fewer} worker{'s' if fewer > 1 else ''} on this machine")
            raise InputError(
                f"adding {rows:,} of {n:,} vectors of {dim} dimensions to {codec.factory(nlist)} takes "
                f"{bytes_text(needed)} ({needed:,} bytes) of memory in each of {wish.workers} processes; "
                f"--current-memory-available allows each {bytes_text(memory)} ({memory:,} bytes)",
                next_step="One of these works: " + "; ".join(ways) + ".",
                code="build_memory",
            )
        rows //= 2
    return rows


def describe_plan(plan: Plan) -> str:
    """The plan as it is printed before work starts."""
    total = plan.bytes_per_vector_ram * plan.n
    lines = [
        f"{plan.key} over {plan.n:,} vectors of {plan.dim} dimensions, metric {plan.metric}",
        f"in memory   {plan.bytes_per_vector_ram:,.1f} bytes per vector, {bytes_text(total)} in all"
        + (f", in {plan.indices} indices" if plan.indices > 1 else ""),
        f"on disk     {plan.bytes_per_vector_disk:,.1f} bytes per vector"
        + (", full rows for re-ranking among them" if plan.refine == "fp16" else ""),
        f"trained on  {plan.train_rows:,} rows, a random sample of all parts; blocks of {plan.block_rows:,} rows",
        "",
        f"{'stage':<8}{'units':>7}{'RAM':>9}{'disk':>9}{'time':>9}",
        *(
            _line(stage.stage, f"{stage.units}", stage.ram_bytes, stage.disk_bytes, stage.seconds)
            for stage in plan.stages
        ),
        _line(
            "all",
            "",
            max(stage.ram_bytes for stage in plan.stages),
            sum(stage.disk_bytes for stage in plan.stages),
            sum(stage.seconds for stage in plan.stages),
        ),
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def _line(stage: str, units: str, ram_bytes: float, disk_bytes: float, seconds: float) -> str:
    return f"{stage:<8}{units:>7}{bytes_text(ram_bytes):>9}{bytes_text(disk_bytes):>9}{_time_text(seconds):>9}"


def _time_text(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, math.ceil(seconds))} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


__all__ = [
    "BASE_BYTES",
    "Plan",
    "Speeds",
    "StageCost",
    "Wish",
    "available_memory",
    "bytes_text",
    "describe_plan",
    "make_plan",
    "measure_speeds",
    "parse_bytes",
    "parse_recall",
]
