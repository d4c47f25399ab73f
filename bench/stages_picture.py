"""The stages of a worker as bars, and what held it up second by second, for several runs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

STATES = {
    "busy": ("at work", "#0072B2"),
    "starved": ("waits for input", "#E69F00"),
    "blocked": ("blocked: the next stage has enough", "#B8B8B8"),
}
"""State -> what a reader calls it, and its colour; those of Okabe and Ito, and grey."""
CAUSES = {
    "device": ("device at work", "#0072B2"),
    "decoding": ("waits for decoding", "#D55E00"),
    "reading": ("waits for reading", "#009E73"),
    "work": ("waits for units", "#CC79A7"),
    "publishing": ("waits for publishing", "#56B4E9"),
    "writer": ("results find no room", "#000000"),
}
LEAST_LABEL = 0.07
"""A part of a bar that is narrower than this has no room for its number."""

TITLE_CHARACTERS = 60
"""What fits above the left axes, beside those at the right."""

LEAST_SHOWN = 0.02
"""A cause that never took more of a second than this is left out."""


def draw(path: Path, figures: Mapping[str, Any]) -> None:
    """A row for each run: at the left its stages, at the right what held it up over time."""
    runs = figures["runs"]
    figure, panels = plt.subplots(len(runs), 2, figsize=(12.5, 3.1 * len(runs) + 1.5), squeeze=False)
    for (left, right), run in zip(panels, runs, strict=True):
        _stages(left, run, figures["threads"])
        _causes(right, run)
        title = f"{run['run']}: {run['rows_per_s']:,.0f} images/s"
        left.set_title("\n".join([title, *textwrap.wrap(_verdict(run), TITLE_CHARACTERS)]), loc="left", fontsize=11)
    panels[-1][0].set_xlabel("share of the whole run")
    panels[-1][1].set_xlabel("seconds since the first unit")
    for column, title in ((0, "each stage"), (1, "the device at each moment: at work, or what it waits for")):
        handles: dict[str, Any] = {}
        for row in panels:
            found, labels = row[column].get_legend_handles_labels()
            handles |= dict(zip(labels, found, strict=True))
        figure.legend(
            handles.values(),
            handles.keys(),
            title=title,
            loc="lower left",
            bbox_to_anchor=((0.09, 0.55)[column], 0.0),
            ncols=4,
            columnspacing=1.0,
            handlelength=1.4,
            frameon=False,
            fontsize=8.5,
            title_fontsize=9,
            alignment="left",
        )
    width, height = figures["size"]
    figure.suptitle(
        f"Where a worker's time goes: photographs of {width}x{height}, decoded by {figures['threads']} threads", x=0.01,
        ha="left", fontsize=13,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.08, 1, 1), w_pad=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _verdict(run: Mapping[str, Any]) -> str:
    if run["limit"] == "device":
        return f"limited by the device, which is idle {run['device_waits']:.0%} of the time"
    cores = run["cores_needed"]
    more = f"; {cores} cores would keep it busy" if cores else ""
    return f"limited by {run['limit']}: the device is idle {run['device_waits']:.0%} of the time{more}"


def _stages(axes: Axes, run: Mapping[str, Any], threads: int) -> None:
    """A bar for each stage, from reading at the top; what is missing to 1 it was between two states."""
    names = {"read": "read", "prepare": f"decode\n(mean of {threads} threads)", "embed": "device", "publish": "publish"}
    for place, stage in enumerate(names):
        at = 0.0
        for state, (label, colour) in STATES.items():
            share = run["stages"][stage][state]
            axes.barh(place, share, left=at, height=0.62, color=colour, label=label if place == 0 else "")
            if share >= LEAST_LABEL:
                ink = "white" if state == "busy" else "black"
                axes.text(at + share / 2, place, f"{share:.0%}", ha="center", va="center", fontsize=9, color=ink)
            at += share
    axes.set_yticks(range(len(names)), list(names.values()))
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.spines[["top", "right"]].set_visible(False)


def _causes(axes: Axes, run: Mapping[str, Any]) -> None:
    spans = run["over_time"]
    lefts = [span["from_s"] for span in spans]
    widths = [span["to_s"] - span["from_s"] for span in spans]
    bottoms = [0.0] * len(spans)
    for cause, (label, colour) in CAUSES.items():
        shares = [span["causes"].get(cause, 0.0) for span in spans]
        if max(shares, default=0.0) < LEAST_SHOWN:
            continue
        axes.bar(
            lefts, shares, widths, bottom=bottoms, align="edge", color=colour, label=label, edgecolor="white",
            linewidth=0.4,
        )  # fmt: skip
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    axes.set_ylim(0, 1)
    axes.set_xlim(0, spans[-1]["to_s"] if spans else 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.spines[["top", "right"]].set_visible(False)
