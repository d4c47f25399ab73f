"""Plan of an index: its key, training, blocks, files and cost, chosen from the options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from embq.core.errors import InputError
from embq.core.service.progress_line import duration, size_text
from embq.index.plan.build_options import BuildOptions
from embq.index.plan.codec_choices import codec_choices
from embq.index.plan.costs import KMEANS_ITERATIONS, Speeds, StageCost, Work, stage_costs
from embq.index.plan.index_key import parse_key
from embq.index.plan.memory import best_codec_that_fits, codec_of_key, rows_of_block, trainable

SCHEMA = 1

RANGE_BYTES = 128 << 20
"""Average size of one range of lists, so that the largest stays below 256 MB where lists differ."""


FLOAT16_LARGEST = 65_504.0
"""Largest number of float16, of which SQfp16 and the rows for re-ranking are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPlan:
    """Plan of an index. Equal plans of equal collections give equal files.

    Attributes:
        schema: version of its form as JSON.
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

    schema: int = SCHEMA
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

    @property
    def largest(self) -> float:
        """The largest absolute value of a number that the index can keep."""
        return FLOAT16_LARGEST if self.codec == "SQfp16" or self.refine == "fp16" else math.inf


def make_plan(
    n: int, dim: int, options: BuildOptions, *, unit_length: bool, speeds: Speeds, largest: float = 1.0
) -> IndexPlan:
    """The plan for `n` rows of `dim` dimensions within the options.

    Args:
        unit_length: whether the vectors have length 1.
        largest: absolute value of a number in some of them.

    Raises:
        InputError: there is nothing to index (`no_embeddings`), or nothing fits (`index_memory`, `build_memory`); the
            message has the numbers, the next step the nearest plans that fit.
        UsageError: an option has no meaning here.
    """
    options.check()
    if n < 1:
        raise InputError(
            "there are no embeddings to index",
            next_step="Give a folder that holds at least one vector.",
            code="no_embeddings",
        )
    notes: list[str] = []
    if largest > FLOAT16_LARGEST and options.refine == "auto":
        held = f"these have numbers up to {largest:,.6g}, float16 holds {FLOAT16_LARGEST:,.0f}"
        notes.append(f"no rows are kept for re-ranking: {held}")
        options = replace(options, refine="none")
    key = parse_key(options.index_key, dim=dim, rows=n) if options.index_key is not None else None
    metric = "l2" if options.metric == "l2" else "cosine" if unit_length else "ip"
    choices = list(codec_choices(dim, metric=metric, refine=options.refine != "none"))
    chosen, nlist = (
        codec_of_key(key, n, dim, options, choices, notes) if key else best_codec_that_fits(n, dim, options, choices)
    )
    block_rows = rows_of_block(n, dim, chosen, nlist, options)
    nlist, train_rows = trainable(n, dim, chosen, nlist, options, notes)
    work = Work(
        n=n,
        dim=dim,
        codec=chosen,
        nlist=nlist,
        train_rows=train_rows,
        block_rows=block_rows,
        slices=_slices(n * chosen.bytes_per_vector(), nlist, options, notes),
        refine=options.refine if options.refine != "auto" else "fp16" if chosen.refine else "none",
        options=options,
        speeds=speeds,
    )
    return _plan_of(work, metric=metric, coarse=key.coarse if key else "", notes=notes)


def _slices(entries_bytes: int, nlist: int, options: BuildOptions, notes: list[str]) -> int:
    """Ranges of lists to merge by: at least one for each index that is kept, if there are enough lists."""
    slices = min(nlist, max(options.nb_indices_to_keep, math.ceil(entries_bytes / RANGE_BYTES)))
    if slices < options.nb_indices_to_keep:
        notes.append(f"{nlist} lists are divided into {slices} indices, not into {options.nb_indices_to_keep}")
    return slices


def _plan_of(work: Work, *, metric: str, coarse: str, notes: Sequence[str]) -> IndexPlan:
    n, chosen, nlist = work.n, work.codec, work.nlist
    index_bytes = chosen.index_bytes(n, nlist, work.dim)
    return IndexPlan(
        key=chosen.factory(nlist, coarse=coarse),
        codec=chosen.key,
        nlist=nlist,
        dim=work.dim,
        n=n,
        metric=metric,
        transform=chosen.transform,
        train_rows=work.train_rows,
        kmeans_iterations=KMEANS_ITERATIONS if nlist > 1 else 1,
        seed=work.options.seed,
        block_rows=work.block_rows,
        slices=work.slices,
        refine=work.refine,
        fastscan_at_load=chosen.fastscan_at_load,
        indices=min(work.options.nb_indices_to_keep, work.slices),
        bytes_per_vector_ram=round(index_bytes / n, 2),
        bytes_per_vector_disk=round((index_bytes + work.rows_bytes) / n, 2),
        stages=stage_costs(work),
        notes=tuple(notes),
    )


def describe_plan(plan: IndexPlan) -> str:
    """The plan as it is printed before work starts."""
    total = plan.bytes_per_vector_ram * plan.n
    lines = [
        f"{plan.key} over {plan.n:,} vectors of {plan.dim} dimensions, metric {plan.metric}",
        f"in memory   {plan.bytes_per_vector_ram:,.1f} bytes per vector, {size_text(total)} in all"
        + (f", in {plan.indices} indices" if plan.indices > 1 else ""),
        f"on disk     {plan.bytes_per_vector_disk:,.1f} bytes per vector"
        + (", full rows for re-ranking among them" if plan.refine == "fp16" else ""),
        f"trained on  {plan.train_rows:,} rows, a random sample of all parts; blocks of {plan.block_rows:,} rows",
        "",
        f"{'stage':<8}{'units':>7}{'RAM':>9}{'disk':>9}{'time':>13}",
        *(_line(stage.stage, stage.units, stage.ram_bytes, stage.disk_bytes, stage.seconds) for stage in plan.stages),
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


def _line(stage: str, units: int | str, ram_bytes: float, disk_bytes: float, seconds: float) -> str:
    return f"{stage:<8}{units:>7}{size_text(ram_bytes):>9}{size_text(disk_bytes):>9}{duration(max(1, seconds)):>13}"
