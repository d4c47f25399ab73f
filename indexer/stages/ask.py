"""The queries by which a grown index is measured: some of its new rows, and all query sets where it is tuned again."""

from __future__ import annotations

import numpy as np

from indexer.growth import Growth
from indexer.queries import QueryPlan, draw, of_rows, write_queries
from indexer.task import Made, Task

NEW, NEW_QUERIES = "new", 100


def ask(task: Task) -> Made:
    """All query sets in one file, that of the new rows first."""
    growth = Growth.from_description(task.spec)
    spec = growth.spec
    random = np.random.default_rng([spec.plan.seed, growth.first_id])
    ids = growth.first_id + np.sort(random.choice(growth.rows, min(growth.rows, NEW_QUERIES), replace=False))
    sets = [of_rows(spec.collection, ids.astype(np.int64), name=NEW, source="new rows", metric=spec.plan.metric)]
    if growth.retunes:
        sets += draw(spec.collection, QueryPlan.from_description(spec.queries), metric=spec.plan.metric)
    path = task.temporary("npz")
    write_queries(sets, path)
    return Made(work={"queries": path}, stats={one.name: len(one) for one in sets})
