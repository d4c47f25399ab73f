"""Rows for training, drawn at random from all of the collection; and what is wrong with any row of it."""

from __future__ import annotations

import numpy as np

from indexer.building import BuildSpec
from indexer.faults import faults
from indexer.task import Made, Task

NAMED = 10
"""Ids of rows without a direction that are named to the user."""


def sample(task: Task) -> Made:
    """One block's share of the training rows, float32 (m, dim), and how many of its rows are fit for an index."""
    spec = BuildSpec.from_description(task.spec)
    block = spec.blocks[task.unit.number]
    chosen = chosen_ids(spec, block.first_id, block.rows)
    pieces, bad_ids, bad = [], [], 0
    for first_id, vectors in spec.collection.read_vectors(block.first_id, block.first_id + block.rows):
        wrong = faults(vectors)
        bad += int(wrong.sum())
        bad_ids += (first_id + np.flatnonzero(wrong)[:NAMED]).tolist()
        start, stop = np.searchsorted(chosen, [first_id, first_id + len(vectors)])
        rows = chosen[start:stop] - first_id
        pieces.append(vectors[rows[~wrong[rows]]])
    points = np.concatenate(pieces) if pieces else np.zeros((0, spec.plan.dim), np.float32)
    path = task.temporary("npy")
    np.save(path, points.astype(np.float32))
    return Made(work={"points": path}, stats={"rows": block.rows, "bad": bad, "bad_ids": bad_ids[:NAMED]})


def chosen_ids(spec: BuildSpec, first_id: int, rows: int) -> np.ndarray:
    """The ids of one block's rows that are trained on, ascending: the same whoever asks.

    Every block gives its share, so the whole sample is spread evenly over the collection.
    """
    n, wanted = spec.collection.n, spec.plan.train_rows
    quota = wanted * (first_id + rows) // n - wanted * first_id // n
    chosen = np.random.default_rng([spec.plan.seed, first_id]).permutation(rows)[:quota]
    ids: np.ndarray = np.sort(chosen).astype(np.int64) + first_id
    # Queries that are rows themselves are held out.
    return ids[~np.isin(ids, np.asarray(spec.held_out, dtype=np.int64))]
