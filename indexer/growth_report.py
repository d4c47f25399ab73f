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
    at_training, residual = float(base.notes["residual"]), mean_residual(added)
    before = float(base.notes.get("imbalance_factor") or imbalance(base))
    now = imbalance(growth.draft(base, added))
    change = residual / at_training - 1.0 if at_training > 0.0 and residual else 0.0
    warnings = []
    if change > WARN_CHANGE:
        warnings.append(
            "the new rows are unlike those that the index was trained on: their mean squared distance to the centres "
            f"of their lists is {residual:.4g}, {100 * change:.0f} % more than at training; consider --rebuild"
        )
    if now > before * (1.0 + WARN_CHANGE):
        warnings.append(
            f"the lists have become less equal, so that searches take longer: imbalance factor {now:.3g}, "
            f"{before:.3g} at training; consider --rebuild"
        )
    if retuned["met"] is False:
        warnings.append(
            f"recall@{retuned['k']} of searches for new rows is {retuned['recall']:.3f}, below what was asked for; "
            "consider --rebuild"
        )
    if collection.n > OUTGROWN * plan.n:
        warnings.append(
            f"the index has {collection.n / plan.n:.1f} times the {plan.n:,} rows that its lists were chosen for, so "
            "that searches take longer than they need to; consider --rebuild"
        )
    every = [one for units in stages.values() for one in units]
    return {
        "rows_added": growth.rows,
        "excluded": sum(one.stats["excluded"] for one in added),
        "rows_at_training": plan.n,
        "rows_since_training": collection.n - plan.n,
        "drift": {
            "residual": residual,
            "residual_at_training": at_training,
            "change": change,
            "imbalance_factor": now,
            "imbalance_factor_before": before,
        },
        "recall_of_new_rows": {
            f"recall@{retuned['k']}": retuned["recall"],
            "before_tuning": retuned["recall_before"],
            "queries": retuned["queries"],
            "truth": retuned["truth"],
        },
        "tuned_again": retuned["tuned"],
        "warnings": warnings,
        "seconds": {stage: sum(one.seconds for one in units) for stage, units in stages.items()},
        "cpu_seconds": {stage: sum(one.cpu_seconds for one in units) for stage, units in stages.items()},
        "peak_rss_bytes": max(one.peak_rss_bytes for one in every),
    }
