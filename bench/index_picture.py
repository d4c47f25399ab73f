"""The picture of the benchmark of the index: recall against latency, both sides, a field for each case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.index_scoring import Point, front
from bench.report import RESULTS

COLORS = {"theirs": "tab:orange", "ours": "tab:blue"}
NAMES = {"theirs": "autofaiss", "ours": "embq index"}
COLUMNS = 3


def plot(measured: Sequence[dict[str, Any]], name: str) -> Path:
    """Fronts as lines, what each side has chosen itself as a star; time runs on a logarithmic scale."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    fields = [(one, each) for one in measured for each in one["query_sets"]]
    columns = min(COLUMNS, len(fields))
    rows = -(-len(fields) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3.4 * rows), layout="constrained", squeeze=False
    )
    for axis, (one, each) in zip(axes.flat, fields, strict=False):
        for side, color in COLORS.items():
            found = [Point(**point) for point in each["points"][side]]
            kept = front(found)
            label = f"{NAMES[side]}: {one['builds'][side]['key']}"
            axis.plot([p.p50_ms for p in kept], [p.recall for p in kept], ".-", color=color, label=label)
            tuned = next(point for point in found if point.tuned)
            axis.plot([tuned.p50_ms], [tuned.recall], "*", color=color, markersize=14, markeredgecolor="black")
        axis.set_xscale("log")
        axis.set_title(f"{one['rows']:,} of {one['vectors']}, {one['index_memory']}, {each['queries']}", fontsize=9)
        axis.set_xlabel("median ms of a query, one thread", fontsize=8)
        axis.set_ylabel("recall@10", fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6, loc="lower right")
    for axis in list(axes.flat)[len(fields) :]:
        axis.set_visible(False)
    figure.suptitle("stars: what each side has chosen itself", fontsize=9)
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
