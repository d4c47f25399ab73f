"""Stages of a build but training: sample, queries, truth, add, merge, tune."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from indexer.build.spec import BuildSpec, draft
from indexer.build.task import Made, Task
from indexer.collection.collection import faults
from indexer.collection.opening import Block, Collection
from indexer.faiss_module import set_threads
from indexer.index_files.files import to_json
from indexer.index_files.identity import write_identity
from indexer.index_files.lists import append, empty_lists, read_lists, write_lists
from indexer.index_files.template import Template
from indexer.plan.build_options import parse_recall
from indexer.plan.costs import BATCH_ROWS
from indexer.searcher import Searcher
from indexer.tune.points import Goal
from indexer.tune.queries import draw, read_queries, write_queries
from indexer.tune.truth import block_truth, read_truth
from indexer.tune.tuning import tune_search

NAMED = 10
"""Ids of rows without a direction that are named to the user."""

AGREEMENT_ROWS = 2_000
"""Rows of a block of which it is looked at whether an approximate quantizer finds the nearest list."""


def sample(task: Task) -> Made:
    """One block's share of the training rows, float32 (m, dim), and how many of its rows are fit for an index."""
    spec = task.spec_as(BuildSpec)
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
    """The ids of one block's rows that are trained on, ascending: the same for every caller.

    Every block gives its share, so the whole sample is spread evenly over the collection.
    """
    n, wanted = spec.collection.n, spec.plan.train_rows
    quota = wanted * (first_id + rows) // n - wanted * first_id // n
    chosen = np.random.default_rng([spec.plan.seed, first_id]).permutation(rows)[:quota]
    ids: np.ndarray = np.sort(chosen).astype(np.int64) + first_id
    # Queries that are rows themselves are held out.
    return ids[~np.isin(ids, np.asarray(spec.held_out, dtype=np.int64))]


def queries(task: Task) -> Made:
    """All query sets in one file."""
    spec = task.spec_as(BuildSpec)
    sets = draw(spec.collection, spec.queries, metric=spec.plan.metric)
    path = task.temporary("npz")
    write_queries(sets, path)
    return Made(work={"queries": path}, stats={one.name: len(one) for one in sets})


def truth(task: Task) -> Made:
    """The best rows of one block for every query."""
    spec = task.spec_as(BuildSpec)
    set_threads(task.threads)
    block = spec.blocks[task.unit.number]
    sets = read_queries(task.file("queries", 0, "queries"))
    path = task.temporary("npz")
    block_truth(spec.collection, block, sets, metric=spec.plan.metric, path=path)
    return Made(work={"truth": path}, stats={"rows": block.rows})


def add(task: Task) -> Made:
    """A lists file, a rows file where the plan has one, and an identity file."""
    spec = task.spec_as(BuildSpec)
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


def merge(task: Task) -> Made:
    """One range of the lists; rows stand in the order of their blocks."""
    spec = task.spec_as(BuildSpec)
    template = Template.read(task.file("train", 0, "trained"))
    first, last = list_range(template.nlist, spec.plan.slices, task.unit.number)
    merged = empty_lists(last - first, template.code_size)
    rows = 0
    for number in range(len(spec.blocks)):
        source = read_lists(task.file("add", number, "lists"), mapped=True)
        rows += append(merged, source, first=first, last=last)
    path = task.temporary("lists")
    write_lists(merged, path)
    return Made(kept={"lists": path}, stats={"first_list": first, "last_list": last, "rows": rows})


def list_range(nlist: int, slices: int, number: int) -> tuple[int, int]:
    """The lists of one unit: from the first to before the last."""
    return nlist * number // slices, nlist * (number + 1) // slices


def tune(task: Task) -> Made:
    """The search parameters, and what they are worth, on one thread."""
    spec = task.spec_as(BuildSpec)
    searcher = Searcher(draft(spec, task.index, task.unit.build, task.before), memory="ram", threads=1)
    sets = read_queries(task.file("queries", 0, "queries"))
    truth = read_truth([task.file("truth", number, "truth") for number in range(len(spec.blocks))], sets)
    tuning = tune_search(
        searcher,
        sets,
        truth,
        goal_of(spec),
        nlist=searcher.nlist,
        refines=searcher.refines,
        rows=searcher.n,
    )
    path = task.temporary("json")
    path.write_text(json.dumps(tuning.describe()), encoding="utf-8")
    return Made(work={"tuning": path}, stats={"search": to_json(tuning.setting), "met": tuning.met})


def goal_of(spec: BuildSpec) -> Goal:
    """Target of tuning, from the options of the user."""
    asked = spec.asked
    recall, k = parse_recall(asked["recall"])
    within_ms = asked["max_index_query_time_ms"]
    return Goal(
        recall=recall if within_ms is None else None,
        k=k,
        milliseconds=within_ms,
        least_found=asked["min_nearest_neighbors_to_retrieve"],
    )
