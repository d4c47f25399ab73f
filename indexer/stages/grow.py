"""The rows of one new block, under the template that the index has."""

from __future__ import annotations

import numpy as np

from indexer.collection import Block, Collection
from indexer.faiss_module import set_threads
from indexer.faults import faults
from indexer.growth import Growth
from indexer.identity import write_identity
from indexer.stages.add import add_block
from indexer.stages.sample import NAMED
from indexer.task import Made, Task
from indexer.template import Template
from indexer.version import read_version


def grow(task: Task) -> Made:
    """A lists file, a rows file where the index has such, and an identity file: all of them stay."""
    growth = Growth.from_description(task.spec)
    set_threads(task.threads)
    base = read_version(task.index, growth.base)
    template = Template.read(base.trained.check(task.index), on_gpu=task.on_gpu)
    block, collection = growth.blocks[task.unit.number], growth.spec.collection
    kept = {"lists": task.temporary("lists"), "identity": task.temporary("arrow")}
    if base.rows:
        kept["rows"] = task.temporary("rows")
    stats = add_block(collection, block, template, lists=kept["lists"], rows=kept.get("rows"))
    write_identity(collection.read_identity(block.first_id, block.stop_id), kept["identity"])
    bad_ids = _bad_ids(collection, block) if stats["excluded"] else []
    return Made(kept=kept, stats={**stats, "lists": template.nlist, "bad_ids": bad_ids})


def _bad_ids(collection: Collection, block: Block) -> list[int]:
    found: list[int] = []
    for first_id, vectors in collection.read_vectors(block.first_id, block.stop_id):
        found += (first_id + np.flatnonzero(faults(vectors))).tolist()
        if len(found) >= NAMED:
            break
    return found[:NAMED]
