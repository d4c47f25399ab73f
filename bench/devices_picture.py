"""A timeline of devices: who was busy when, and the last seconds of it enlarged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.traces import Batch, workers

TAIL_S = 3.0
COLOURS = ("#1b6ca8", "#e08e0b", "#4f9d69", "#a23b72")
BUSY_ALPHA = 0.9


def draw(path: Path, traces: Sequence[list[Batch]], figures: Sequence[Mapping[str, Any]]) -> None:
    """One row of panels for each run and its figures: the whole run at the left, the last seconds at the right."""
    figure, panels = plt.subplots(
        len(traces), 2, figsize=(13, 2.6 * len(traces) + 0.8), squeeze=False, gridspec_kw={"width_ratios": (3, 2)}
    )
    for (whole, tail), batches, told in zip(panels, traces, figures, strict=True):
        began, ideal_s = batches[0].began, told["ideal_s"]
        end_s = max(batch.ended for batch in batches) - began
        for axes, since_s in ((whole, 0.0), (tail, min(ideal_s, end_s) - TAIL_S)):
            _lanes(axes, batches, began, since_s, labelled=axes is whole, edges=axes is tail)
            axes.axvline(ideal_s, color="black", linestyle="--", linewidth=1)
            axes.set_xlim(since_s, max(end_s, ideal_s) + 0.02 * (end_s - since_s))
        even = told["even_split_of_ideal"]
        control = "" if even is None else f" (dealt out evenly: {even:.1f} x)"
        whole.set_title(
            f"{told['fleet']}: {told['makespan_s']:.1f} s = {told['of_ideal']:.3f} x the ideal{control}",
            loc="left",
            fontsize=11,
        )
        tail.set_title(f"the last {TAIL_S:.0f} s and more, pass by pass", loc="left", fontsize=11)
        tail.annotate(
            "ideal", (ideal_s, 1.0), xycoords=("data", "axes fraction"), xytext=(-3, -3), textcoords="offset points",
            ha="right", va="top", fontsize=9,
        )  # fmt: skip
    for axes in panels[-1]:
        axes.set_xlabel("seconds since the first pass")
    figure.suptitle("Busy devices of unequal speed, 2,000 units from one queue", x=0.01, ha="left", fontsize=13)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lanes(axes: Axes, batches: list[Batch], began: float, since_s: float, *, labelled: bool, edges: bool) -> None:
    """A lane for each device, the fastest on top."""
    lanes = sorted(workers(batches).values(), key=lambda own: float(own[0].device.partition(":")[2]))
    labels = []
    for place, own in enumerate(lanes):
        spans = [(b.began - began, b.ended - b.began) for b in own if b.ended - began > since_s]
        colour = COLOURS[(len(lanes) - 1 - place) % len(COLOURS)]
        edge = {"edgecolor": "white", "linewidth": 0.8} if edges else {"linewidth": 0}
        axes.broken_barh(spans, (place - 0.36, 0.72), facecolor=colour, alpha=BUSY_ALPHA, **edge)
        whole_s = max(b.ended for b in batches) - began
        busy = sum(b.ended - b.began for b in own) / whole_s
        speed = own[0].device.partition(":")[2]
        labels.append(f"speed {speed}\n{sum(b.rows for b in own):,} rows, {busy:.0%} busy")
    axes.set_yticks(range(len(lanes)), labels if labelled else [""] * len(lanes), fontsize=9)
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.spines[["top", "right"]].set_visible(False)
