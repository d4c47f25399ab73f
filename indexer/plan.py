"""A plan: which index is built, how, and what building it will take; as JSON, and as it is printed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from indexer.costs import StageCost
from indexer.wish import bytes_text

SCHEMA = 1


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
