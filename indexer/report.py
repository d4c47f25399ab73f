"""The report of an index: infos.json, which says what a searcher will get, and the picture beside it.

autofaiss's keys come first, spelled as there and with its meaning, so that reports can be compared; then ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from indexer.building import BuildSpec
from indexer.collection import Collection
from indexer.faiss_module import faiss
from indexer.points import Scores, Tuning
from indexer.queries import DATA, QuerySet, read_queries
from indexer.report_notes import notes_of
from indexer.report_picture import draw_report
from indexer.sidecar import Sidecar
from indexer.sizes import imbalance, sizes_of
from indexer.template import Template
from indexer.units import STAGES
from indexer.version import Version
from indexer.workshop import read_json

INFOS, PICTURE = "infos.json", "report.png"
NO_PICTURE = "none: matplotlib is not installed (pip install 'embq[bench]')"
SCORE_KEYS = ("1-recall@20", "1-recall@40", "20-recall@20", "40-recall@40")
RECONSTRUCTED = 500
"""Queries whose codes are decoded, to see how much of them is lost."""


def write_report(spec: BuildSpec, version: Version, stages: Mapping[str, Sequence[Sidecar]], folder: Path) -> None:
    """Write infos.json and, where matplotlib is installed, report.png into the folder of a version."""
    tuned = stages["tune"][0]
    tuning = Tuning.from_description(read_json(tuned.files["tuning"].check(version.index)))
    sets = read_queries(stages["queries"][0].files["queries"].check(version.index))
    infos = make_infos(spec, version, stages, tuning, sets)
    drawn = draw_report(infos, tuning, folder / PICTURE)
    infos["picture"] = PICTURE if drawn else NO_PICTURE if tuning.front else "none: there is nothing to draw"
    (folder / INFOS).write_text(json.dumps(plain(infos), indent=1) + "\n", encoding="utf-8")


def make_infos(
    spec: BuildSpec,
    version: Version,
    stages: Mapping[str, Sequence[Sidecar]],
    tuning: Tuning,
    sets: Sequence[QuerySet],
) -> dict[str, Any]:
    """What infos.json says, but for the picture."""
    template = Template.read(version.trained.check(version.index))
    sizes = sizes_of(version)
    return {
        **_autofaiss_keys(version, tuning, sizes, _reconstruction_error(template, sets)),
        **_worth(tuning.scores),
        **_goal(tuning),
        "notes": notes_of(spec, version, tuning),
        **sizes,
        **_work(version.next_id, stages),
        "assign_agreement": _agreement(template, stages),
        "imbalance_factor": imbalance(version),
        "nlist": template.nlist,
        **_queries(tuning, sets),
        "pareto_front": [one.describe() for one in tuning.front],
        "plan": spec.plan.describe(),
        "collection": _collection(spec.collection),
        "seed": spec.plan.seed,
    }


def plain(value: Any) -> Any:
    """The value with all numpy scalars and arrays as JSON knows them; numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _autofaiss_keys(version: Version, tuning: Tuning, sizes: Mapping[str, Any], error: float | None) -> dict[str, Any]:
    setting, plan = tuning.setting, version.plan
    scores = tuning.scores.get(DATA) or next(iter(tuning.scores.values()), None)
    parameters = f"nprobe={setting.nprobe}" + (f",k_factor={setting.k_factor}" if setting.k_factor > 1 else "")
    return {
        "index_key": plan.key,
        "index_param": parameters,
        "index_path": str(version.index),
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
        "recall": {name: {f"recall@{k}": r for k, r in one.recall.items()} for name, one in scores.items()},
        **_standard_recall(scores),
        "latency_ms": {
            name: {"p50": one.p50_ms, "p95": one.p95_ms, "p99": one.p99_ms, "mean": one.mean_ms}
            for name, one in scores.items()
        },
        "qps": {name: 1e3 / one.mean_ms for name, one in scores.items()},
    }


def _standard_recall(scores: Mapping[str, Scores]) -> dict[str, float]:
    """recall@1, @10 and @100 of the worst set each."""
    known = sorted({k for one in scores.values() for k in one.recall})
    return {f"recall@{k}": min(one.recall[k] for one in scores.values()) for k in known}


def _goal(tuning: Tuning) -> dict[str, Any]:
    """What was asked for, and how tuning went about it."""
    goal = tuning.goal
    return {
        "latency_of": f"single searches of {goal.k} on one thread, with the index in memory",
        "search": tuning.setting.describe(),
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
    """What building took, and who did it.

    Args:
        rows: that were added.
    """
    seconds = {stage: sum(one.seconds for one in stages[stage]) for stage in STAGES if stage in stages}
    paces = {stage: rows / max(1e-3, seconds[stage]) for stage in ("add", "merge") if stage in seconds}
    return {
        "build_seconds": seconds,
        "build_seconds_total": sum(seconds.values()),
        "cpu_seconds": {stage: sum(one.cpu_seconds for one in stages[stage]) for stage in seconds},
        "peak_rss_bytes": {stage: max((one.peak_rss_bytes for one in stages[stage]), default=0) for stage in seconds},
        "vectors_per_second": {**paces, "all": rows / max(1e-3, sum(seconds.values()))},
        "versions": dict(stages["tune"][0].versions),
        "workers": sorted({one.worker for units in stages.values() for one in units}),
    }


def _queries(tuning: Tuning, sets: Sequence[QuerySet]) -> dict[str, Any]:
    return {
        "gt_queries": {one.name: len(one) for one in sets},
        "reported_queries": {name: one.queries for name, one in tuning.scores.items()},
        "query_sets": {one.name: {"source": one.source, "left_out": one.left_out} for one in sets},
    }


def _collection(collection: Collection) -> dict[str, Any]:
    """What was indexed."""
    return {
        "kind": collection.kind,
        "output": collection.output,
        "column": collection.column,
        "run": collection.run,
        "model": collection.model,
        "fingerprint": collection.fingerprint,
        "digest": collection.digest,
        "complete": collection.complete,
    }


def _reconstruction_error(template: Template, sets: Sequence[QuerySet]) -> float | None:
    """Mean length of what the code of a vector has lost, in percent of the mean length of a vector."""
    data = next((one.vectors for one in sets if one.name == DATA), None)
    if data is None:
        return None
    before = np.ascontiguousarray(data[:RECONSTRUCTED])
    try:
        after = template.index.sa_decode(template.index.sa_encode(before))
    except RuntimeError:
        return None  # the codec cannot decode
    lengths = np.linalg.norm(before, axis=1).mean()
    return float(100.0 * np.linalg.norm(after - before, axis=1).mean() / lengths)


def _agreement(template: Template, stages: Mapping[str, Sequence[Sidecar]]) -> float | None:
    """Share of rows that are in their nearest list: 1 where assignment is exact, None where nobody has looked."""
    told = [one.stats["assign_agreement"] for one in stages["add"] if "assign_agreement" in one.stats]
    if told:
        return float(np.mean(told))
    quantizer = faiss().downcast_index(template.ivf.quantizer)
    return 1.0 if type(quantizer).__name__.startswith("IndexFlat") else None
