"""Stages of changes: grow, ask, retune (recall of searches for new rows), compact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np

from embq.index.change.deletes import deleted_bits
from embq.index.change.growth import GrowthSpec
from embq.index.faiss_module import set_threads
from embq.index.index_files.lists import is_set
from embq.index.index_files.template import Template
from embq.index.index_files.version import read_version
from embq.index.plan.costs import TRUTH_DEPTH
from embq.index.searcher import Searcher
from embq.index.stages.build_stages import add_block, goal_of, merge_lists, queries_result
from embq.index.stages.report import recall_and_latency
from embq.index.stages.task import StageResult, Task
from embq.index.tune.points import Goal, Setting, Tuning
from embq.index.tune.queries import QuerySet, draw, of_rows, read_queries
from embq.index.tune.recall import Truth, recall
from embq.index.tune.truth import merged, read_truth
from embq.index.tune.tuning import tune_search
from embq.index.tune.tuning_split import Half

NEW, NEW_QUERIES = "new", 100

FARTHER, DEEPER = 16, 4
"""Factors on lists and candidates of the search that replaces exact search where that would take too long."""


def grow(task: Task) -> StageResult:
    """A lists file, a rows file where the index has such, and an identity file: all of them stay."""
    spec = task.spec_as(GrowthSpec)
    base = read_version(task.index, spec.growth.base)
    template = Template.read(base.trained.check(task.index), on_gpu=task.on_gpu)
    block = spec.new_blocks[task.unit.number]
    files, stats = add_block(task, spec.collection, block, template, rows=bool(base.rows), plan=base.plan)
    return StageResult(index_files=files, stats={**stats, "lists": template.nlist})


def new_queries(task: Task) -> StageResult:
    """All query sets in one file, that of the new rows first."""
    spec = task.spec_as(GrowthSpec)
    random = np.random.default_rng([spec.plan.seed, spec.growth.first_id])
    ids = spec.growth.first_id + np.sort(random.choice(spec.new_rows, min(spec.new_rows, NEW_QUERIES), replace=False))
    sets = [of_rows(spec.collection, ids.astype(np.int64), name=NEW, source="new rows", metric=spec.plan.metric)]
    if spec.growth.retunes:
        sets += draw(spec.collection, spec.queries, metric=spec.plan.metric)
    return queries_result(task, sets)


def retune(task: Task) -> StageResult:
    """The search parameters of the grown index, and the recall of searches for its new rows."""
    spec = task.spec_as(GrowthSpec)
    set_threads(1)
    base = read_version(task.index, spec.growth.base)
    searcher = Searcher(spec.draft(base, task.inputs["grow"]), memory="ram", threads=1)
    setting = Setting(nprobe=base.search["nprobe"], k_factor=base.search.get("k_factor", 1))
    goal = goal_of(spec)
    sets = read_queries(task.file("queries", 0, "queries"))
    truth, source = _truth(task, spec, searcher, sets, setting)
    new = next((query_set for query_set in sets if query_set.name == NEW), None)
    recall_before, error = _worth(searcher, new, truth, goal, setting)
    worth = recall_before
    tuning: Tuning | None = None
    if spec.growth.retunes or _misses(worth, error, goal):
        tuning = tune_search(searcher, sets, truth, goal)
        setting = tuning.setting if spec.growth.retunes else _higher(tuning.setting, setting)
        worth, error = _worth(searcher, new, truth, goal, setting)
    return StageResult(
        stats={
            "search": asdict(setting),
            "tuned": tuning is not None,
            "k": goal.k,
            "recall": worth,
            "recall_before": recall_before,
            "queries": 0 if new is None else len(new),
            "truth": source,
            "met": None if worth is None or goal.recall is None else not _misses(worth, error, goal),
            "infos": _infos(tuning, setting, for_all=spec.growth.retunes),
        }
    )


def _truth(
    task: Task, spec: GrowthSpec, searcher: Searcher, sets: Sequence[QuerySet], setting: Setting
) -> tuple[dict[str, Truth], str]:
    """Query set -> the rows that are nearest, without deleted ones; and the source of that, for the report."""
    if not spec.growth.exact:
        nprobe = min(searcher.nlist, FARTHER * setting.nprobe)
        far = Setting(nprobe=nprobe, k_factor=DEEPER * setting.k_factor)
        return {drawn.name: _by_search(searcher, drawn, far) for drawn in sets}, f"a search of {nprobe} lists"
    paths = [task.file("truth", number, "truth") for number in range(len(spec.blocks))]
    bits = deleted_bits(searcher.version)
    return {name: _without(nearest, bits) for name, nearest in read_truth(paths, sets).items()}, "exact search"


def _without(truth: Truth, bits: np.ndarray) -> Truth:
    ids = np.where(is_set(bits, truth.ids), -1, truth.ids)
    return merged([Truth(ids=ids, scores=truth.scores, tolerance=truth.tolerance)])


def _by_search(searcher: Searcher, query_set: QuerySet, setting: Setting) -> Truth:
    hits = searcher.search(query_set.vectors, TRUTH_DEPTH // 4 + 1, nprobe=setting.nprobe, k_factor=setting.k_factor)
    ids = np.where(hits.ids == query_set.own[:, None], -1, hits.ids)
    scores = -hits.scores if searcher.version.plan.metric == "l2" else hits.scores
    return merged([Truth(ids=ids, scores=scores)])


def _worth(
    searcher: Searcher, query_set: QuerySet | None, truth: Mapping[str, Truth], goal: Goal, setting: Setting
) -> tuple[float | None, float]:
    """recall@k of searches for new rows, and its standard error; None and 0 if nothing can be measured."""
    if query_set is None:
        return None, 0.0
    half = Half(vectors=query_set.vectors, own=query_set.own, truth=truth[NEW])
    each = recall(half.search(searcher, goal.k, setting), truth[NEW], goal.k)
    measured = each[~np.isnan(each)]
    return (float(measured.mean()), float(measured.std() / len(measured) ** 0.5)) if len(measured) else (None, 0.0)


def _misses(worth: float | None, error: float, goal: Goal) -> bool:
    """True if recall is below the target by more than the choice of the queries explains."""
    return worth is not None and goal.recall is not None and worth + error < goal.recall


def _higher(tuned: Setting, current: Setting) -> Setting:
    """The higher of each parameter: a tuning for new rows alone makes no search worse."""
    return Setting(nprobe=max(tuned.nprobe, current.nprobe), k_factor=max(tuned.k_factor, current.k_factor))


def _infos(tuning: Tuning | None, setting: Setting, *, for_all: bool) -> Mapping[str, Any]:
    """Entries of infos.json that a tuning changes."""
    if tuning is None:
        return {}
    changed: dict[str, Any] = {"index_param": setting.parameters, "search": asdict(setting)}
    return {**changed, **recall_and_latency(tuning.scores), "target_met": tuning.met} if for_all else changed


def compact(task: Task) -> StageResult:
    """One range of the lists; rows stand in the order of the groups, as a search of all groups sees them."""
    base = read_version(task.index, task.spec["base"])
    first, last = task.spec["bounds"][task.unit.number]
    sources = (
        nullcontext((file.check(task.index), range(file.first, file.last))) for group in base.groups for file in group
    )
    return merge_lists(task, range(first, last), sources, deleted_bits(base))
