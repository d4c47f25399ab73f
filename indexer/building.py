"""What a build is: the frozen content of build.json, from which every unit of it follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from indexer.collection import Block, Collection
from indexer.faiss_module import faiss
from indexer.plan import Plan


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """A build.

    Attributes:
        asked: what the user asked for, by which a build that was interrupted is found again.
        queries: how the query sets are made, see `indexer.queries`.
        held_out: ids of the rows that are queries, and are not trained on.
        drop_invalid: leave rows out that have no direction, instead of refusing them.
        memory_bytes: that all processes of one machine may take together.
    """

    collection: Collection
    plan: Plan
    asked: Mapping[str, Any]
    queries: Mapping[str, Any]
    held_out: tuple[int, ...]
    drop_invalid: bool
    memory_bytes: int

    @cached_property
    def blocks(self) -> list[Block]:
        """What each unit of the stages that read the collection does."""
        return self.collection.blocks(self.plan.block_rows)

    @property
    def faiss_metric(self) -> int:
        """By which metric lists are made and codes are compared.

        For vectors of length 1 the squared distance ranks as the cosine does, and quantised inner products lose
        recall (faiss #2971).
        """
        module = faiss()
        return int(module.METRIC_INNER_PRODUCT if self.plan.metric == "ip" else module.METRIC_L2)

    def units(self, stage: str) -> int:
        """How many units a stage has."""
        if stage in ("sample", "truth", "add"):
            return len(self.blocks)
        return self.plan.slices if stage == "merge" else 1

    def describe(self) -> dict[str, Any]:
        """The build as JSON-ready values; `from_description` is its inverse."""
        return {
            "collection": self.collection.describe(),
            "plan": self.plan.describe(),
            "asked": dict(self.asked),
            "queries": dict(self.queries),
            "held_out": list(self.held_out),
            "drop_invalid": self.drop_invalid,
            "memory_bytes": self.memory_bytes,
        }

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> BuildSpec:
        """The build that `describe` gave."""
        return cls(
            collection=Collection.from_description(described["collection"]),
            plan=Plan.from_description(described["plan"]),
            asked=described["asked"],
            queries=described["queries"],
            held_out=tuple(described["held_out"]),
            drop_invalid=described["drop_invalid"],
            memory_bytes=described["memory_bytes"],
        )
