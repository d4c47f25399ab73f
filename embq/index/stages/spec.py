"""Specification of a build: the content of build.json, and the version that its stages make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from embq.index.collection.opening import Block, Collection
from embq.index.faiss_module import faiss
from embq.index.index_files.files import to_json
from embq.index.index_files.version import ListsFile, RowRangeFile, Version
from embq.index.plan.index_plan import IndexPlan
from embq.index.stages.units import Sidecar
from embq.index.tune.queries import QueryPlan


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """A build.

    Attributes:
        asked: what the user asked for, by which a build that was interrupted is found again.
        queries: how the query sets are drawn.
        held_out: ids of the rows that are queries, and are not trained on.
        drop_invalid: leave rows out that have no direction, instead of refusing them.
        memory_bytes: that all processes of one machine may take together.
    """

    collection: Collection
    plan: IndexPlan
    asked: Mapping[str, Any]
    queries: QueryPlan
    held_out: tuple[int, ...]
    drop_invalid: bool
    memory_bytes: int

    @cached_property
    def blocks(self) -> list[Block]:
        """Blocks of the collection, one for each unit of the stages that read it."""
        return self.collection.blocks(self.plan.block_rows)

    @property
    def faiss_metric(self) -> int:
        """The metric of faiss by which lists are made and codes are compared.

        For vectors of length 1 the squared distance ranks as the cosine does, and quantised inner products lose
        recall (faiss #2971).
        """
        module = faiss()
        return int(module.METRIC_INNER_PRODUCT if self.plan.metric == "ip" else module.METRIC_L2)

    def units(self, stage: str) -> int:
        """Number of units of a stage."""
        if stage in ("sample", "truth", "add"):
            return len(self.blocks)
        return self.plan.slices if stage == "merge" else 1


def draft(spec: BuildSpec, index: Path, build_id: str, stages: Mapping[str, Sequence[Sidecar]]) -> Version:
    """The version that the stages up to `merge` make; its search parameters are those of `tune`, if that is done."""
    added = stages["add"]
    tuned = stages.get("tune")
    return Version(
        index=index,
        name="",
        plan=spec.plan,
        collection=spec.collection,
        trained=stages["train"][0].files["trained"],
        groups=(
            tuple(
                ListsFile.of(sidecar.files["lists"], first=sidecar.stats["first_list"], last=sidecar.stats["last_list"])
                for sidecar in stages["merge"]
            ),
        ),
        rows=row_files(added, spec.blocks, "rows") if spec.plan.refine != "none" else (),
        identity=row_files(added, spec.blocks, "identity"),
        next_id=spec.collection.n,
        excluded=sum(sidecar.stats["excluded"] for sidecar in added),
        deleted=0,
        deleted_file=None,
        search=tuned[0].stats["search"] if tuned else {"nprobe": 1, "k_factor": 1},
        build=build_id,
        created="",
        notes={
            "asked": dict(spec.asked),
            "queries": to_json(spec.queries),
            "residual": mean_residual(added) or stages["train"][0].stats["residual"],
        },
    )


def row_files(added: Sequence[Sidecar], blocks: Sequence[Block], role: str) -> tuple[RowRangeFile, ...]:
    """Files of one role that the units of a stage have made of their blocks."""
    return tuple(
        RowRangeFile.of(sidecar.files[role], first_id=block.first_id, rows=block.rows)
        for sidecar, block in zip(added, blocks, strict=True)
    )


def mean_residual(added: Sequence[Sidecar]) -> float:
    """Mean squared distance of rows to the centroid of their list, from the sidecars of the stage `add`."""
    rows = sum(sidecar.stats["added"] for sidecar in added)
    return float(sum(sidecar.stats["residual"] * sidecar.stats["added"] for sidecar in added) / max(1, rows))
