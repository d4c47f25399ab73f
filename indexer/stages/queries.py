"""The query sets by which an index is tuned and reported, drawn once."""

from __future__ import annotations

from indexer.building import BuildSpec
from indexer.queries import QueryPlan, draw, write_queries
from indexer.task import Made, Task


def queries(task: Task) -> Made:
    """All query sets in one file."""
    spec = BuildSpec.from_description(task.spec)
    sets = draw(spec.collection, QueryPlan.from_description(spec.queries), metric=spec.plan.metric)
    path = task.temporary("npz")
    write_queries(sets, path)
    return Made(work={"queries": path}, stats={one.name: len(one) for one in sets})
