"""How the index is best searched, measured on the built index itself."""

from __future__ import annotations

import json

from indexer.building import BuildSpec
from indexer.points import Goal
from indexer.queries import read_queries
from indexer.searcher import Searcher
from indexer.task import Made, Task
from indexer.truth import read_truth
from indexer.tuning import tune as tuned
from indexer.wish import parse_recall


def tune(task: Task) -> Made:
    """The search parameters, and what they are worth, on one thread."""
    # Here, because building needs no stage and the stages need the draft.
    from indexer.build import draft

    spec = BuildSpec.from_description(task.spec)
    searcher = Searcher(draft(spec, task.index, task.unit.build, task.before), memory="ram", threads=1)
    sets = read_queries(task.file("queries", 0, "queries"))
    truth = read_truth([task.file("truth", number, "truth") for number in range(len(spec.blocks))], sets)
    tuning = tuned(
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
    return Made(work={"tuning": path}, stats={"search": tuning.setting.describe(), "met": tuning.met})


def goal_of(spec: BuildSpec) -> Goal:
    """What the user asked of a search."""
    asked = spec.asked
    recall, k = parse_recall(asked["recall"])
    within_ms = asked["max_index_query_time_ms"]
    return Goal(
        recall=recall if within_ms is None else None,
        k=k,
        milliseconds=within_ms,
        least_found=asked["min_nearest_neighbors_to_retrieve"],
    )
