"""What is told of a growth: how well the new rows fit the index, and what is to be warned of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from indexer.build import mean_residual
from indexer.sidecar import Sidecar
from indexer.sizes import imbalance

if TYPE_CHECKING:
    from indexer.growth import Growth
    from indexer.version import Version

OUTGROWN = 2.0
"""Beyond so many times the rows at training, other lists would be chosen."""
WARN_CHANGE = 0.10
"""Drift beyond this is worth a warning."""


def told_of(growth: Growth, base: Version, stages: Mapping[str, Sequence[Sidecar]]) -> dict[str, Any]:
    """What infos.json says under "growth".

    Args:
        base: the version that grew.
        stages: stage -> sidecars of its units.
    """
    added, retuned = stages["grow"], stages["retune"][0].stats
    collection, plan = growth.spec.collection, growth.spec.plan
    drift = _drift(growth, base, added)
    every = [one for units in stages.values() for one in units]
    return {
        "rows_added": growth.rows,
        "excluded": sum(one.stats["excluded"] for one in added),
        "rows_at_training": plan.n,
        "rows_since_training": collection.n - plan.n,
        "drift": drift,
        "recall_of_new_rows": {
            f"recall@{retuned['k']}": retuned["recall"],
            "before_tuning": retuned["recall_before"],
            "queries": retuned["queries"],
            "truth": retuned["truth"],
        },
        "tuned_again": retuned["tuned"],
        "warnings": _warnings(drift, retuned, rows=collection.n, rows_at_training=plan.n),
        "seconds": {stage: sum(one.seconds for one in units) for stage, units in stages.items()},
        "cpu_seconds": {stage: sum(one.cpu_seconds for one in units) for stage, units in stages.items()},
        "peak_rss_bytes": max(one.peak_rss_bytes for one in every),
    }


def _drift(growth: Growth, base: Version, added: Sequence[Sidecar]) -> dict[str, float]:
    """How far the new rows are from what the lists were made for, and how much less equal the lists have become."""
    at_training, residual = float(base.notes["residual"]), mean_residual(added)
    return {
        "residual": residual,
        "residual_at_training": at_training,
        "change": residual / at_training - 1.0 if at_training > 0.0 and residual else 0.0,
        "imbalance_factor": imbalance(growth.draft(base, added)),
        "imbalance_factor_before": float(base.notes.get("imbalance_factor") or imbalance(base)),
    }


def _warnings(drift: Mapping[str, float], retuned: Mapping[str, Any], *, rows: int, rows_at_training: int) -> list[str]:
    """What speaks for building the index again, a sentence each."""
    told = []
    if drift["change"] > WARN_CHANGE:
        told.append(
            "the new rows are unlike those that the index was trained on: their mean squared distance to the centres "
            f"of their lists is {drift['residual']:.4g}, {100 * drift['change']:.0f} % more than at training; "
            "consider --rebuild"
        )
    now, before = drift["imbalance_factor"], drift["imbalance_factor_before"]
    if now > before * (1.0 + WARN_CHANGE):
        told.append(
            f"the lists have become less equal, so that searches take longer: imbalance factor {now:.3g}, "
            f"{before:.3g} at training; consider --rebuild"
        )
    if retuned["met"] is False:
        told.append(
            f"recall@{retuned['k']} of searches for new rows is {retuned['recall']:.3f}, below what was asked for; "
            "consider --rebuild"
        )
    if rows > OUTGROWN * rows_at_training:
        told.append(
            f"the index has {rows / rows_at_training:.1f} times the {rows_at_training:,} rows that its lists were "
            "chosen for, so that searches take longer than they need to; consider --rebuild"
        )
    return told
