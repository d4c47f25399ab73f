"""Picture of an index: recall over latency, with the chosen setting.

Colours are those of Okabe and Ito, which are safe for colour-blind readers; sets differ by their marks as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embq.index.tune.points import Point, Tuning

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
MARKS = ("o", "s", "^", "D", "v")
GREY = "#767676"
DPI = 150
LEAST_SHOWN = 0.7
TICKS = (1.0, 2.0, 5.0)
"""Ticks of each power of ten, on the axis of time."""


def draw_report(infos: Mapping[str, Any], tuning: Tuning, path: Path) -> bool:
    """Draw recall against latency to `path`, as PNG; False without matplotlib or without two settings to compare."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not is_drawable(tuning):
        return False
    figure = Figure(figsize=(7.6, 4.9), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    _draw_sets(axes, tuning)
    _draw_goal(axes, tuning)
    _scale(axes, tuning)
    per = infos["bytes_per_vector"]
    figure.suptitle(
        f"{infos['index_key']}: {infos['nb vectors']:,} vectors of {infos['vectors dimension']} dimensions, "
        f"{per['ram']:.0f} bytes each in memory",
        fontsize=11.5,
    )
    figure.text(
        0.5,
        -0.005,
        "lines: settings that none beats in both time and recall, by the half of the queries that was tuned on; "
        "rings: the chosen one, by the other half",
        ha="center",
        va="top",
        fontsize=7.5,
        color=GREY,
    )
    figure.savefig(path, dpi=DPI, bbox_inches="tight", pad_inches=0.15)
    return True


def is_drawable(tuning: Tuning) -> bool:
    """True if the picture has a line: of two settings at least."""
    return bool(tuning.front) and len(_shown(tuning)) > 1


def _draw_sets(axes: Axes, tuning: Tuning) -> None:
    k = tuning.goal.k
    front = _shown(tuning)
    times = [point.cost for point in front]
    for at, (name, scores) in enumerate(tuning.scores.items()):
        colour, mark = COLOURS[at % len(COLOURS)], MARKS[at % len(MARKS)]
        recalls = [point.recall[name] for point in front]
        label = f"{name}: recall@{k} {scores.recall[k]:.3f}, median {scores.p50_ms:.2g} ms"
        axes.plot(times, recalls, "-", marker=mark, color=colour, markersize=4, linewidth=1.3)
        ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgewidth": 2.0, "markersize": 11}
        axes.plot(scores.p50_ms, scores.recall[k], mark, color=colour, label=label, zorder=5, **ring)


def _shown(tuning: Tuning) -> list[Point]:
    """The part of the front that matters: what has a fraction of the best recall is no choice."""
    best = max(point.worst for point in tuning.front)
    return [point for point in tuning.front if point.worst >= LEAST_SHOWN * best]


def _draw_goal(axes: Axes, tuning: Tuning) -> None:
    goal, setting = tuning.goal, tuning.setting
    line: dict[str, Any] = {"color": GREY, "linestyle": "--", "linewidth": 1.2, "zorder": 1.5}
    if goal.recall is not None:
        axes.axhline(goal.recall, label=f"asked for: {goal.recall:g}", **line)
    if goal.milliseconds is not None:
        axes.axvline(goal.milliseconds, label=f"asked for: {goal.milliseconds:g} ms", **line)
    chosen = f"{setting.nprobe:,} lists probed" + (
        f", {setting.k_factor * goal.k} candidates re-ranked" if setting.k_factor > 1 else ""
    )
    legend = axes.legend(loc="lower right", title=f"chosen: {chosen}", title_fontsize=9.5, fontsize=9.5)
    legend.get_frame().set(facecolor="white", edgecolor="none", alpha=1.0)


def _scale(axes: Axes, tuning: Tuning) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("median time of a single search on one thread, ms")
    axes.set_ylabel(f"recall@{tuning.goal.k}")
    shown = [value for point in _shown(tuning) for value in point.recall.values()]
    shown += [score.recall[tuning.goal.k] for score in tuning.scores.values()]
    low, high = min(shown), max(shown)
    if tuning.goal.recall is not None:
        low, high = min(low, tuning.goal.recall), max(high, tuning.goal.recall)
    room = max(0.01, 0.06 * (high - low))
    axes.set_ylim(low - room, min(1.0, high) + room)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
