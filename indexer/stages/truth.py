"""The true nearest rows of each query, by exact search, one block at a time."""

from __future__ import annotations

from indexer.building import BuildSpec
from indexer.faiss_module import set_threads
from indexer.queries import read_queries
from indexer.task import Made, Task
from indexer.truth import block_truth


def truth(task: Task) -> Made:
    """The best rows of one block for every query."""
    spec = BuildSpec.from_description(task.spec)
    set_threads(task.threads)
    block = spec.blocks[task.unit.number]
    sets = read_queries(task.file("queries", 0, "queries"))
    path = task.temporary("npz")
    block_truth(spec.collection, block, sets, metric=spec.plan.metric, path=path)
    return Made(work={"truth": path}, stats={"rows": block.rows})
