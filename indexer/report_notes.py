"""The notes of a report: what a user may not expect of the index, and what to do about a goal that was missed."""

from __future__ import annotations

from indexer.building import BuildSpec
from indexer.points import Tuning
from indexer.queries import DATA
from indexer.version import Version


def notes_of(spec: BuildSpec, version: Version, tuning: Tuning) -> list[str]:
    """A sentence each."""
    notes = []
    if tuning.met is None:
        notes.append("there are no queries to measure by: recall and latency are unknown")
    if tuning.met is False:
        notes += [_missed(tuning), _advice(version, tuning)]
    if _asked_across(spec) and set(tuning.scores) <= {DATA}:
        notes.append(
            "recall is that of queries like the rows; queries of the model's other modality need several times the "
            "probes, and none were measured (give some with --queries)"
        )
    if tuning.met is False and not tuning.swept_all:
        notes.append("tuning took its time and ended before all settings were looked at")
    if tuning.load > 1.0:
        notes.append(
            f"other processes kept the machine {tuning.load:.1f} times busy while searches were timed: "
            "alone they are faster"
        )
    if version.excluded:
        notes.append(f"{version.excluded:,} vectors are zero or not finite, and in no list; they keep their ids")
    if not spec.collection.complete:
        notes.append("the run is not finished: its later rows are not in this index")
    return notes


def _asked_across(spec: BuildSpec) -> bool:
    """Whether the rows can be asked for by another modality than theirs."""
    collection = spec.collection
    output = (collection.model or {}).get("output") or {}
    return bool(collection.query_columns) or str(output.get("spec", "")).startswith("open_clip:")


def _missed(tuning: Tuning) -> str:
    k, goal, best = tuning.goal.k, tuning.goal, tuning.best
    worst = min(tuning.scores, key=lambda name: tuning.scores[name].recall[k])
    if goal.recall is not None and best is not None and best < goal.recall:
        return f"recall@{k} is {best:.4f} with the queries of set {worst}, below the {goal.recall:g} asked for"
    return f"a search takes longer than the {goal.milliseconds:g} ms asked for"


def _advice(version: Version, tuning: Tuning) -> str:
    """What reaches the goal that was missed."""
    plan, goal = version.plan, tuning.goal
    reachable = max((point.worst for point in tuning.points), default=0.0)
    if goal.milliseconds is not None and (goal.recall is None or reachable >= goal.recall):
        return "give more time with --max-index-query-time-ms, or ask for a lower --recall"
    if plan.refine == "none":
        return (
            f"the codes of {plan.codec} lose too much: add --refine fp16 (rows on disk, {2 * plan.dim} bytes each), "
            "or give more --max-index-memory-usage for a finer codec"
        )
    return "give more --max-index-memory-usage for a finer codec, or ask for a lower --recall"
