"""Report of an index: infos.json, the picture beside it, and the summary on the terminal.

The keys of autofaiss come first, with its spelling and meaning, so that reports can be compared; then ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embq.core.service.progress_line import size_text
from embq.core.storage.paths import Place
from embq.index.faiss_module import faiss
from embq.index.index_files.files import from_json, read_json, to_json
from embq.index.index_files.sizes import imbalance_of, sizes_of
from embq.index.index_files.template import Template
from embq.index.index_files.version import Version
from embq.index.stages.report_picture import draw_report, is_drawable
from embq.index.stages.spec import BuildSpec
from embq.index.stages.units import STAGES, Sidecar
from embq.index.tune.points import Scores, Tuning
from embq.index.tune.queries import DATA, QuerySet, read_queries

INFOS, PICTURE = "infos.json", "report.png"

NO_LINE = "none: no two settings could be compared"
NO_PICTURE = "none: matplotlib is not installed (pip install 'embq[bench]')"

SCORE_KEYS = ("1-recall@20", "1-recall@40", "20-recall@20", "40-recall@40")
"""Scores of autofaiss."""

COLLECTION_KEYS = ("kind", "output", "column", "run", "model", "fingerprint", "digest", "complete")

RECONSTRUCTED = 500
"""Queries whose codes are decoded, to see how much of them is lost."""


def write_report(
    index: Place, spec: BuildSpec, version: Version, stages: Mapping[str, Sequence[Sidecar]], folder: Path
) -> None:
    """Write infos.json and, where matplotlib is installed, report.png into a folder.

    Args:
        index: folder or URL of the index. Of the files of `version` the template alone is read, and beside it the
            payloads of `tune` and `queries`.
    """
    tuned = stages["tune"][0]
    tuning = from_json(
        Tuning, read_json(tuned.files["tuning"].check(version.index)), "tuning of an index", strict=False
    )
    sets = read_queries(stages["queries"][0].files["queries"].check(version.index))
    infos = make_infos(index, spec, version, stages, tuning, sets)
    drawn = draw_report(infos, tuning, folder / PICTURE)
    infos["picture"] = PICTURE if drawn else NO_PICTURE if is_drawable(tuning) else NO_LINE
    (folder / INFOS).write_text(json.dumps(plain(infos), indent=1) + "\n", encoding="utf-8")


def make_infos(
    index: Place,
    spec: BuildSpec,
    version: Version,
    stages: Mapping[str, Sequence[Sidecar]],
    tuning: Tuning,
    sets: Sequence[QuerySet],
) -> dict[str, Any]:
    """Content of infos.json without the picture."""
    template = Template.read(version.trained.check(version.index))
    sizes = sizes_of(version)
    return {
        **_autofaiss_keys(index, version, tuning, sizes, _reconstruction_error(template, sets)),
        **_worth(tuning.scores),
        **_goal(tuning),
        "notes": notes_of(spec, version, tuning),
        **sizes,
        **_work(version.next_id, stages),
        "assign_agreement": _agreement(template, stages),
        "imbalance_factor": imbalance_of(
            template.nlist,
            sum(sidecar.stats["squares"] for sidecar in stages["merge"]),
            sum(sidecar.stats["rows"] for sidecar in stages["merge"]),
        ),
        "nlist": template.nlist,
        **_queries(tuning, sets),
        "pareto_front": [point.describe() for point in tuning.front],
        "plan": to_json(spec.plan),
        "collection": {name: getattr(spec.collection, name) for name in COLLECTION_KEYS},
        "seed": spec.plan.seed,
    }


def plain(value: Any) -> Any:
    """The value with all numpy scalars and arrays as JSON knows them; numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _autofaiss_keys(
    index: Place, version: Version, tuning: Tuning, sizes: Mapping[str, Any], error: float | None
) -> dict[str, Any]:
    plan = version.plan
    scores = tuning.scores.get(DATA) or next(iter(tuning.scores.values()), None)
    return {
        "index_key": plan.key,
        "index_param": tuning.setting.parameters,
        "index_path": str(index),
        "size in bytes": sizes["size in bytes"],
        "avg_search_speed_ms": scores.mean_40_ms if scores else None,
        "99p_search_speed_ms": scores.p99_40_ms if scores else None,
        "reconstruction error %": error,
        "nb vectors": sizes["nb vectors"],
        "vectors dimension": plan.dim,
        "compression ratio": sizes["compression ratio"],
        **(scores.autofaiss if scores else dict.fromkeys(SCORE_KEYS)),
    }


def _worth(scores: Mapping[str, Scores]) -> dict[str, Any]:
    """Recall and time of searches, of each set of queries."""
    return {
        **recall_and_latency(scores),
        **_standard_recall(scores),
        "qps": {name: 1e3 / score.mean_ms for name, score in scores.items()},
    }


def recall_and_latency(scores: Mapping[str, Scores]) -> dict[str, Any]:
    """Entries "recall" and "latency_ms" of infos.json."""
    return {
        "recall": {name: {f"recall@{k}": r for k, r in score.recall.items()} for name, score in scores.items()},
        "latency_ms": {
            name: {"p50": score.p50_ms, "p95": score.p95_ms, "p99": score.p99_ms, "mean": score.mean_ms}
            for name, score in scores.items()
        },
    }


def _standard_recall(scores: Mapping[str, Scores]) -> dict[str, float]:
    """recall@1, @10 and @100 of the worst set each."""
    depths = sorted({k for score in scores.values() for k in score.recall})
    return {f"recall@{k}": min(score.recall[k] for score in scores.values()) for k in depths}


def _goal(tuning: Tuning) -> dict[str, Any]:
    """Target, chosen setting and course of the tuning."""
    goal = tuning.goal
    return {
        "latency_of": f"single searches of {goal.k} on one thread, with the index in memory",
        "search": to_json(tuning.setting),
        "target": {f"recall@{goal.k}": goal.recall, "max_index_query_time_ms": goal.milliseconds},
        "target_met": tuning.met,
        "tuning": {
            "seconds": tuning.seconds,
            "swept_all": tuning.swept_all,
            "raised": tuning.raised,
            "load": tuning.load,
        },
    }


def _work(rows: int, stages: Mapping[str, Sequence[Sidecar]]) -> dict[str, Any]:
    """Time, memory and workers of the build.

    Args:
        rows: that were added.
    """
    seconds = {stage: sum(sidecar.seconds for sidecar in stages[stage]) for stage in STAGES if stage in stages}
    paces = {stage: rows / max(1e-3, seconds[stage]) for stage in ("add", "merge") if stage in seconds}
    return {
        "build_seconds": seconds,
        "build_seconds_total": sum(seconds.values()),
        "cpu_seconds": {stage: sum(unit.cpu_seconds for unit in stages[stage]) for stage in seconds},
        "peak_rss_bytes": {stage: max((unit.peak_rss_bytes for unit in stages[stage]), default=0) for stage in seconds},
        "vectors_per_second": {**paces, "all": rows / max(1e-3, sum(seconds.values()))},
        "versions": dict(stages["tune"][0].versions),
        "workers": sorted({sidecar.worker for units in stages.values() for sidecar in units}),
    }


def _queries(tuning: Tuning, sets: Sequence[QuerySet]) -> dict[str, Any]:
    return {
        "gt_queries": {drawn.name: len(drawn) for drawn in sets},
        "reported_queries": {name: score.queries for name, score in tuning.scores.items()},
        "query_sets": {drawn.name: {"source": drawn.source, "left_out": drawn.left_out} for drawn in sets},
    }


def _reconstruction_error(template: Template, sets: Sequence[QuerySet]) -> float | None:
    """Mean length of what the code of a vector has lost, in percent of the mean length of a vector."""
    data = next((query_set.vectors for query_set in sets if query_set.name == DATA), None)
    if data is None:
        return None
    originals = np.ascontiguousarray(data[:RECONSTRUCTED])
    try:
        decoded = template.index.sa_decode(template.index.sa_encode(originals))
    except RuntimeError:
        return None  # the codec cannot decode
    lengths = np.linalg.norm(originals, axis=1).mean()
    return float(100.0 * np.linalg.norm(decoded - originals, axis=1).mean() / lengths)


def _agreement(template: Template, stages: Mapping[str, Sequence[Sidecar]]) -> float | None:
    """Share of rows that are in their nearest list: 1 where assignment is exact, None if it was not measured."""
    shares = [sidecar.stats["assign_agreement"] for sidecar in stages["add"] if "assign_agreement" in sidecar.stats]
    if shares:
        return float(np.mean(shares))
    quantizer = faiss().downcast_index(template.ivf.quantizer)
    return 1.0 if type(quantizer).__name__.startswith("IndexFlat") else None


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
        notes.append(
            f"{version.excluded:,} vectors are zero, not finite or missing, and in no list; they keep their ids"
        )
    if empty := spec.collection.empty:
        names = ", ".join(empty[:3]) + (", ..." if len(empty) > 3 else "")
        notes.append(f"files without rows of their own are left out: {len(empty):,} ({names})")
    if not spec.collection.complete:
        notes.append("the run is not finished: its later rows are not in this index")
    return notes


def _asked_across(spec: BuildSpec) -> bool:
    """True if queries of another modality than that of the rows are possible."""
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
    """Options that reach the goal that was missed."""
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


def summary(infos: Mapping[str, Any], *, report: Place | None = None) -> str:
    """Summary at the end of a build: some lines of text, without a line break at the end.

    Args:
        infos: content of infos.json.
        report: the folder with infos.json and report.png.
    """
    plan, search = infos["plan"], infos["search"]
    per = infos["bytes_per_vector"]
    lines = [
        f"index      {infos['index_key']}, {infos['nb vectors']:,} vectors of {infos['vectors dimension']} dimensions",
        f"size       {size_text(infos['size in bytes'])} in memory, {per['ram']:.0f} bytes per vector; "
        f"{size_text(sum(infos['bytes'].values()))} on disk, {per['disk']:.0f} per vector",
        f"search     looks at {search['nprobe']:,} of {plan['nlist']:,} lists"
        + (f", re-ranks {search['k_factor']} times as many rows as it returns" if search["k_factor"] > 1 else ""),
    ]
    for name, recalls in infos["recall"].items():
        values = ", ".join(f"{value:.3f}@{key.removeprefix('recall@')}" for key, value in recalls.items())
        times = infos["latency_ms"][name]
        lines.append(
            f"{name:<10} recall {values}; {times['p50']:.2g} ms per search (p95 {times['p95']:.2g}, "
            f"p99 {times['p99']:.2g})"
        )
    lines += [f"target     {_target(infos)}", *(f"note       {note}" for note in infos["notes"])]
    if report is not None:
        drawn = infos.get("picture", "")
        lines.append(f"report     {report / INFOS}" + (f" and {PICTURE}" if drawn == PICTURE else ""))
        if drawn == NO_PICTURE:
            lines.append(f"picture    {drawn}")
    return "\n".join(lines)


def _target(infos: Mapping[str, Any]) -> str:
    targets = [
        f"{name} >= {value:g} for every set" if name.startswith("recall") else f"{value:g} ms per search at most"
        for name, value in infos["target"].items()
        if value is not None
    ]
    met = {True: "met", False: "MISSED", None: "not measured"}[infos["target_met"]]
    return f"{', '.join(targets) or 'none'}: {met}"
