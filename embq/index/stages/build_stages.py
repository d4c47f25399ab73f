"""Stages of a build but training: sample, queries, truth, add, merge, tune."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from embq.index.collection.collection import faults
from embq.index.collection.opening import Block, Collection
from embq.index.faiss_module import set_threads
from embq.index.index_files.files import to_json
from embq.index.index_files.identity import write_identity
from embq.index.index_files.lists import append, empty_lists, read_lists, write_lists
from embq.index.index_files.template import Template
from embq.index.plan.build_options import parse_recall
from embq.index.plan.costs import BATCH_ROWS
from embq.index.plan.index_plan import IndexPlan
from embq.index.searcher import Searcher
from embq.index.stages.spec import BuildSpec, draft
from embq.index.stages.task import StageResult, Task
from embq.index.stages.units import NAMED
from embq.index.tune.points import Goal
from embq.index.tune.queries import QuerySet, draw, read_queries, write_queries
from embq.index.tune.truth import block_truth, read_truth
from embq.index.tune.tuning import tune_search

AGREEMENT_ROWS = 2_000
"""Rows of a block of which it is looked at whether an approximate quantizer finds the nearest list."""


def sample(task: Task) -> StageResult:
    """One block's share of the training rows, float32 (m, dim), and how many of its rows are fit for an index."""
    spec = task.spec_as(BuildSpec)
    block = spec.blocks[task.unit.number]
    chosen = chosen_ids(spec, block.first_id, block.rows)
    pieces, bad_ids, bad = [], [], 0
    for first_id, vectors in spec.collection.read_vectors(block.first_id, block.first_id + block.rows):
        wrong = faults(vectors, spec.plan.metric, spec.plan.largest)
        bad += int(wrong.sum())
        bad_ids += (first_id + np.flatnonzero(wrong)[:NAMED]).tolist()
        start, stop = np.searchsorted(chosen, [first_id, first_id + len(vectors)])
        rows = chosen[start:stop] - first_id
        pieces.append(vectors[rows[~wrong[rows]]])
    points = np.concatenate(pieces) if pieces else np.zeros((0, spec.plan.dim), np.float32)
    path = task.temporary("npy")
    np.save(path, points.astype(np.float32))
    return StageResult(work={"points": path}, stats={"rows": block.rows, "bad": bad, "bad_ids": bad_ids[:NAMED]})


def chosen_ids(spec: BuildSpec, first_id: int, rows: int) -> np.ndarray:
    """The ids of one block's rows that are trained on, ascending: the same for every caller.

    Every block gives its share, so the whole sample is spread evenly over the collection.
    """
    n, sample_rows = spec.collection.n, spec.plan.train_rows
    quota = sample_rows * (first_id + rows) // n - sample_rows * first_id // n
    chosen = np.random.default_rng([spec.plan.seed, first_id]).permutation(rows)[:quota]
    ids: np.ndarray = np.sort(chosen).astype(np.int64) + first_id
    # Queries that are rows themselves are held out.
    return ids[~np.isin(ids, np.asarray(spec.held_out, dtype=np.int64))]


def queries(task: Task) -> StageResult:
    """All query sets in one file."""
    spec = task.spec_as(BuildSpec)
    return queries_result(task, draw(spec.collection, spec.queries, metric=spec.plan.metric))


def queries_result(task: Task, sets: Sequence[QuerySet]) -> StageResult:
    """Query sets in one file."""
    path = task.temporary("npz")
    write_queries(sets, path)
    return StageResult(work={"queries": path}, stats={query_set.name: len(query_set) for query_set in sets})


def truth(task: Task) -> StageResult:
    """The best rows of one block for every query."""
    spec = task.spec_as(BuildSpec)
    set_threads(task.threads)
    block = spec.blocks[task.unit.number]
    sets = read_queries(task.file("queries", 0, "queries"))
    path = task.temporary("npz")
    block_truth(spec.collection, block, sets, metric=spec.plan.metric, largest=spec.plan.largest, path=path)
    return StageResult(work={"truth": path}, stats={"rows": block.rows})


def add(task: Task) -> StageResult:
    """Files of one block: its lists, its rows where the plan has such, and their identity."""
    spec = task.spec_as(BuildSpec)
    template = Template.read(task.file("train", 0, "trained"), on_gpu=task.on_gpu)
    block = spec.blocks[task.unit.number]
    rows = spec.plan.refine != "none"
    files, stats = add_block(task, spec.collection, block, template, rows=rows, plan=spec.plan)
    lists = files.pop("lists")
    return StageResult(index_files=files, work={"lists": lists}, stats=stats)


def add_block(
    task: Task, collection: Collection, block: Block, template: Template, *, rows: bool, plan: IndexPlan
) -> tuple[dict[str, Path], dict[str, Any]]:
    """Encode the rows of a block; returns the temporary files by their roles, and statistics.

    The files are "lists", "identity", and if `rows` is set "rows": the vectors as float16 (rows, dim). The
    statistics are the numbers of rows that are in the lists ("added") and in none ("excluded"), the first ids of
    the latter, and the mean squared distance of the former to their centroids ("residual").
    """
    set_threads(task.threads)
    files = {"lists": task.temporary("lists"), "identity": task.temporary("arrow")}
    if rows:
        files["rows"] = task.temporary("rows")
    held = empty_lists(template.nlist, template.code_size)
    template.hold(held, 0)
    added = excluded = 0
    residual = 0.0
    bad_ids: list[int] = []
    with open(files.get("rows", "/dev/null"), "wb") as file:
        for first_id, vectors in collection.read_vectors(block.first_id, block.stop_id, batch_rows=BATCH_ROWS):
            if rows:
                with np.errstate(over="ignore", invalid="ignore"):
                    file.write(np.ascontiguousarray(vectors.astype(np.float16)).data)
            good = ~faults(vectors, plan.metric, plan.largest)
            ids = first_id + np.flatnonzero(good)
            bad_ids = [*bad_ids, *(first_id + np.flatnonzero(~good)).tolist()][:NAMED]
            valid = vectors if good.all() else vectors[good]
            if not len(valid):
                excluded += len(vectors)
                continue
            numbers = template.add(np.ascontiguousarray(valid, np.float32), ids)
            residual += _residuals(template, valid, numbers)
            added += len(ids)
            excluded += len(vectors) - len(ids)
    write_lists(held, files["lists"])
    write_identity(collection.read_identity(block.first_id, block.stop_id), files["identity"])
    residual /= max(1, added)
    return files, {"added": added, "excluded": excluded, "bad_ids": bad_ids, "residual": residual}


def _residuals(template: Template, vectors: np.ndarray, numbers: np.ndarray) -> float:
    """Sum of squared distances to their centroids, of a few rows, scaled to all of them."""
    step = max(1, len(vectors) // AGREEMENT_ROWS)
    transformed = template.transformed(np.ascontiguousarray(vectors[::step], np.float32))
    centroids = np.stack([template.ivf.quantizer.reconstruct(int(number)) for number in numbers[::step]])
    return float(np.square(transformed - centroids, dtype=np.float64).sum() * len(vectors) / len(transformed))


def merge(task: Task) -> StageResult:
    """One range of the lists; rows stand in the order of their blocks."""
    spec = task.spec_as(BuildSpec)
    nlist = Template.read(task.file("train", 0, "trained")).nlist
    first, last = list_range(nlist, spec.plan.slices, task.unit.number)
    span = range(first, last)
    return merge_lists(task, span, (task.lists("add", number, nlist, span) for number in range(len(spec.blocks))))


def merge_lists(
    task: Task,
    span: range,
    sources: Iterable[AbstractContextManager[tuple[Path, range]]],
    deleted: np.ndarray | None = None,
) -> StageResult:
    """A file of some lists of an index, put together from several files.

    Args:
        span: numbers of the lists.
        sources: files, each with the numbers of the lists in it, opened one after the other. At least one holds some
            of the wanted ones.
        deleted: a bit for each id, see `embq.index.index_files.lists.is_set`; those rows are left out.
    """
    merged: Any = None
    rows = 0
    for opened in sources:
        with opened as (path, held):
            both = range(max(span.start, held.start), min(span.stop, held.stop))
            if both:
                source = read_lists(path, mapped=True)
                merged = merged or empty_lists(len(span), source.code_size)
                first, offset = both.start - held.start, both.start - span.start
                rows += append(merged, source, first=first, count=len(both), offset=offset, deleted=deleted)
    path = task.temporary("lists")
    write_lists(merged, path)
    squares = sum(merged.list_size(at) ** 2 for at in range(len(span)))
    stats = {"first_list": span.start, "last_list": span.stop, "rows": rows, "squares": squares}
    return StageResult(index_files={"lists": path}, stats=stats)


def list_range(nlist: int, slices: int, number: int) -> tuple[int, int]:
    """The lists of one unit: from the first to before the last."""
    return nlist * number // slices, nlist * (number + 1) // slices


def tune(task: Task) -> StageResult:
    """The search parameters, and what they are worth, on one thread."""
    spec = task.spec_as(BuildSpec)
    version = draft(spec, task.index, task.unit.build, task.inputs)
    task.fetch(version.files())
    searcher = Searcher(version, memory="ram", threads=1)
    sets = read_queries(task.file("queries", 0, "queries"))
    truth = read_truth([task.file("truth", number, "truth") for number in range(len(spec.blocks))], sets)
    tuning = tune_search(searcher, sets, truth, goal_of(spec))
    path = task.temporary("json")
    path.write_text(json.dumps(to_json(tuning)), encoding="utf-8")
    return StageResult(work={"tuning": path}, stats={"search": to_json(tuning.setting), "met": tuning.met})


def goal_of(spec: BuildSpec) -> Goal:
    """Target of tuning, from the options of the user."""
    options = spec.asked
    recall, k = parse_recall(options["recall"])
    within_ms = options["max_index_query_time_ms"]
    return Goal(
        recall=recall if within_ms is None else None,
        k=k,
        milliseconds=within_ms,
        least_found=options["min_nearest_neighbors_to_retrieve"],
    )
