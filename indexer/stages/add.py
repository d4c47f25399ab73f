"""The rows of one block: into lists, into a file for exact re-ranking, and into an identity file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from indexer.building import BuildSpec
from indexer.collection import Block, Collection
from indexer.costs import BATCH_ROWS
from indexer.faiss_module import set_threads
from indexer.faults import faults
from indexer.identity import write_identity
from indexer.lists import empty_lists, write_lists
from indexer.task import Made, Task
from indexer.template import Template

AGREEMENT_ROWS = 2_000
"""Rows of a block of which it is looked at whether an approximate quantizer finds the nearest list."""


def add(task: Task) -> Made:
    """A lists file, a rows file where the plan has one, and an identity file."""
    spec = BuildSpec.from_description(task.spec)
    set_threads(task.threads)
    template = Template.read(task.file("train", 0, "trained"), on_gpu=task.on_gpu)
    lists, rows, stats = task.temporary("lists"), task.temporary("rows"), {}
    block = spec.blocks[task.unit.number]
    refined = spec.plan.refine != "none"
    stats = add_block(spec.collection, block, template, lists=lists, rows=rows if refined else None)
    identity = task.temporary("arrow")
    write_identity(spec.collection.read_identity(block.first_id, block.first_id + block.rows), identity)
    return Made(kept={"identity": identity, **({"rows": rows} if refined else {})}, work={"lists": lists}, stats=stats)


def add_block(
    collection: Collection, block: Block, template: Template, *, lists: Path, rows: Path | None
) -> dict[str, float | int]:
    """Write the lists of a block, and its vectors as float16 (rows, dim) one after the other.

    Args:
        lists, rows: where to; `rows` None for none.

    Gives the numbers of rows that are in the lists and that are in none, and their mean squared distance to their
    centroids.
    """
    held = empty_lists(template.nlist, template.code_size)
    template.hold(held, 0)
    added = excluded = 0
    residual = 0.0
    with open(rows or "/dev/null", "wb") as file:
        batches = collection.read_vectors(block.first_id, block.first_id + block.rows, batch_rows=BATCH_ROWS)
        for first_id, vectors in batches:
            if rows is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    file.write(np.ascontiguousarray(vectors.astype(np.float16)).data)
            good = ~faults(vectors)
            ids = first_id + np.flatnonzero(good)
            kept = vectors if good.all() else vectors[good]
            if not len(kept):
                excluded += len(vectors)
                continue
            numbers = template.add(np.ascontiguousarray(kept, np.float32), ids)
            residual += _residuals(template, kept, numbers)
            added += len(ids)
            excluded += len(vectors) - len(ids)
    write_lists(held, lists)
    return {"added": added, "excluded": excluded, "residual": residual / max(1, added)}


def _residuals(template: Template, vectors: np.ndarray, numbers: np.ndarray) -> float:
    """Sum of squared distances to their centroids, of a few rows, scaled to all of them."""
    step = max(1, len(vectors) // AGREEMENT_ROWS)
    seen = template.transformed(np.ascontiguousarray(vectors[::step], np.float32))
    centroids = np.stack([template.ivf.quantizer.reconstruct(int(number)) for number in numbers[::step]])
    return float(np.square(seen - centroids, dtype=np.float64).sum() * len(vectors) / len(seen))
