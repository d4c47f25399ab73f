"""From what the user asked for to a plan: which index, trained on how many rows, built in how large steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from core.errors import InputError
from indexer.autofaiss_keys import parse_key
from indexer.build_memory import rows_of_block, trainable
from indexer.costs import Work, stage_costs
from indexer.index_memory import asked_for, best_that_fits
from indexer.ladder import ladder
from indexer.plan import Plan
from indexer.speeds import Speeds
from indexer.wish import Wish

KMEANS_ITERATIONS = 6
"""On real sentences the lists found after 4 iterations over 50 rows each hold as many true neighbours in as few probed
rows as those after 10 over 100 (0.952 and 0.949 in 12 % of the rows), for a quarter of the time."""

SLICE_BYTES = 128 << 20
"""Of one slice on average, so that the largest stays below 256 MB where lists differ."""


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
    chosen, nlist = asked_for(asked, n, dim, wish, rungs, notes) if asked else best_that_fits(n, dim, wish, rungs)
    block_rows = rows_of_block(n, dim, chosen, nlist, wish)
    nlist, train_rows = trainable(n, dim, chosen, nlist, wish, notes)
    work = Work(
        n=n,
        dim=dim,
        codec=chosen,
        nlist=nlist,
        train_rows=train_rows,
        iterations=KMEANS_ITERATIONS,
        block_rows=block_rows,
        slices=_slices(n * chosen.bytes_per_vector(), nlist, wish, notes),
        refine=wish.refine if wish.refine != "auto" else "fp16" if chosen.refine else "none",
        workers=wish.workers,
        memory=wish.current_memory_available,
        speeds=speeds,
    )
    return _plan_of(work, wish, metric=metric, coarse=asked.coarse if asked else "", notes=notes)


def _slices(entries_bytes: int, nlist: int, wish: Wish, notes: list[str]) -> int:
    """Ranges of lists to merge by: at least one for each index that is kept, where there are so many lists."""
    slices = min(nlist, max(wish.nb_indices_to_keep, math.ceil(entries_bytes / SLICE_BYTES)))
    if slices < wish.nb_indices_to_keep:
        notes.append(f"{nlist} lists are divided into {slices} indices, not into {wish.nb_indices_to_keep}")
    return slices


def _plan_of(work: Work, wish: Wish, *, metric: str, coarse: str, notes: Sequence[str]) -> Plan:
    n, chosen, nlist = work.n, work.codec, work.nlist
    index_bytes = chosen.index_bytes(n, nlist, work.dim)
    return Plan(
        key=chosen.factory(nlist, coarse=coarse),
        codec=chosen.key,
        nlist=nlist,
        dim=work.dim,
        n=n,
        metric=metric,
        transform=chosen.transform,
        train_rows=work.train_rows,
        kmeans_iterations=work.iterations if nlist > 1 else 1,
        seed=wish.seed,
        block_rows=work.block_rows,
        slices=work.slices,
        refine=work.refine,
        fastscan_at_load=chosen.fastscan_at_load,
        indices=min(wish.nb_indices_to_keep, work.slices),
        bytes_per_vector_ram=round(index_bytes / n, 2),
        bytes_per_vector_disk=round((index_bytes + work.rows_bytes) / n, 2),
        stages=stage_costs(work),
        notes=tuple(notes),
    )
