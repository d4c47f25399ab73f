"""Growth with a fleet: CPU time of single operations, and the server's share of a core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

LINES = {
    "tick": ("producer's round", "#1b6ca8"),
    "look": ("worker's look before a claim", "#e08e0b"),
    "service_round": ("report of a machine's supervisor", "#4f9d69"),
    "report": ("worker's report", "#a23b72"),
}
BEFORE = {
    "tick": {10: 4.379, 100: 16.805, 300: 69.345, 1000: 198.594, 3000: 697.054},
    "look": {10: 2.7, 100: 16.845, 300: 65.768, 1000: 187.487, 3000: 666.145},
}
"""ms by the number of devices at commit 61ac824b, when each worker read the reports of all."""
BARS_MS = {"tick": 10.0, "look": 1.0}
AT = 1_000
"""Devices for which the bars are."""


def draw(path: Path, growth: Mapping[str, Any], fleets: Sequence[Mapping[str, Any]], share: float, bar: float) -> None:
    """The picture. `share` is the computed one for `AT` devices."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), gridspec_kw={"width_ratios": (3, 2)})
    counts = [int(count) for count in growth]
    left.set(xscale="log", yscale="log", xlabel="devices", ylabel="ms of CPU of the caller")
    for name, (label, colour) in LINES.items():
        left.plot(counts, [growth[str(n)][name]["client_ms"] for n in counts], "o-", color=colour, label=label)
        if name in BEFORE:
            left.plot(*zip(*BEFORE[name].items(), strict=True), ":", color=colour, label=f"{label}, at 61ac824b")
            left.plot([AT], [BARS_MS[name]], "_", color=colour, markersize=34, markeredgewidth=2.5)
    left.plot([], [], "_", color="black", markersize=16, markeredgewidth=2.5, label="bar for 1,000 devices")
    left.set_xticks(counts, [f"{count:,}" for count in counts])
    left.yaxis.set_major_formatter("{x:,g}")
    left.set_title("one call, beside 1,000 runs that are over", loc="left", fontsize=11)
    left.legend(fontsize=9, frameon=False, loc="upper left")
    left.set_ylim(top=left.get_ylim()[1] * 12)  # room for the legend
    if fleets:
        right.plot(*zip(*((row["devices"], row["broker_share"]) for row in fleets), strict=True), "o-", color="#1b6ca8")
        last = fleets[-1]
        more = last["broker_share"] * AT / last["devices"]
        right.plot([last["devices"], AT], [last["broker_share"], more], ":", color="#1b6ca8")
        if last["devices"] < AT:
            _note(right, AT, more, f"in proportion: {more:.2f}", 9)
        right.plot([], [], "o-", color="#1b6ca8", label="fleets simulated in real time")
    right.plot([AT], [share], "s", color="#1b6ca8", fillstyle="none")
    _note(right, AT, share, f"from single operations: {share:.2f}", -18)
    right.axhline(bar, color="black", linestyle="--", linewidth=1)
    right.annotate(f"bar for 1,000 devices: {bar:g}", (0, bar), xytext=(4, -12), textcoords="offset points", fontsize=9)
    right.set(xlabel="devices, units of 10 s", ylabel="cores", xlim=(0, 1.1 * AT), ylim=(0, 1.25 * max(bar, share)))
    right.legend(fontsize=9, frameon=False, loc="upper left")
    right.set_title("share of a core that the server takes", loc="left", fontsize=11)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _note(axes: Axes, x: float, y: float, text: str, above: float) -> None:
    axes.annotate(text, (x, y), xytext=(0, above), textcoords="offset points", fontsize=9, ha="right")
