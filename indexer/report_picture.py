"""The picture of an index: what recall costs in time, and which setting was chosen.

Colours are those of Okabe and Ito, which people who see few colours tell apart; sets differ by their marks as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indexer.points import Tuning

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
MARKS = ("o", "s", "^", "D", "v")
GREY = "#767676"
DPI = 150


def draw_report(infos: Mapping[str, Any], tuning: Tuning, path: Path) -> bool:
    """Draw recall against latency to `path`, as PNG; False where matplotlib is missing or there is nothing to draw."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, NullLocator
    except ImportError:
        return False
    if not tuning.front:
        return False
    goal = tuning.goal
    figure = Figure(figsize=(7.6, 5.0), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    names = list(tuning.scores)
    times = [point.cost for point in tuning.front]
    for at, name in enumerate(names):
        colour, mark = COLOURS[at % len(COLOURS)], MARKS[at % len(MARKS)]
        recalls = [point.recall[name] for point in tuning.front]
        axes.plot(times, recalls, f"{mark}-", color=colour, markersize=4, linewidth=1.2, label=f"{name} queries")
    chosen = [point for point in tuning.points if point.setting == tuning.setting]
    for at, name in enumerate(names):
        if chosen:
            axes.plot(
                chosen[0].cost,
                tuning.scores[name].recall[goal.k],
                MARKS[at % len(MARKS)],
                color=COLOURS[at % len(COLOURS)],
                markeredgecolor="black",
                markersize=10,
            )
    if goal.recall is not None:
        axes.axhline(goal.recall, color=GREY, linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("median time of a single search on one thread, ms")
    axes.set_ylabel(f"recall@{goal.k}")
    axes.legend(loc="lower right", frameon=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    figure.suptitle(f"{infos['index_key']}, {infos['nb vectors']:,} vectors")
    figure.savefig(path, dpi=DPI)
    return True
