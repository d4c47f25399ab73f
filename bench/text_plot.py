"""The picture of the text benchmark: how many times faster, with the bars as lines, and where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.report import RESULTS

COLORS = {"fp32": "tab:blue", "bf16": "tab:orange", "int8": "tab:green"}
KINDS = ("gemm", "attention", "gelu", "normalisation", "other")


def plot(ratios: list[dict[str, Any]], profiles: list[dict[str, Any]], name: str) -> Path:
    """Bars of the ratios, each with its bar as a line; below them the shares of the time in each precision."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    heights = (0.45 * len(ratios) + 0.6, 0.45 * len(profiles) + 1.0)
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(9, sum(heights) + 0.6), layout="constrained", height_ratios=heights
    )
    labels = [f"{one['precision']} beside {one['beside']}" for one in ratios]
    bars = above.barh(labels, [one["ratio"] for one in ratios], color=[COLORS[one["precision"]] for one in ratios])
    above.bar_label(bars, [f" {one['ratio']:.2f}" for one in ratios], padding=3)
    for place, one in enumerate(ratios):
        if one["bar"] is not None:
            above.plot([one["bar"]] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
    above.plot([], [], color="black", linewidth=2, label="bar")
    above.axvline(1, color="gray", linewidth=0.8, linestyle=":")
    above.invert_yaxis()
    above.set_xlim(0, 1.15 * max(one["ratio"] for one in ratios))
    above.set_xlabel("speed of embq run over that of the other")
    above.legend(loc="lower right")
    left = [0.0] * len(profiles)
    for kind in KINDS:
        shares = [one["shares"].get(kind, 0.0) for one in profiles]
        below.barh([one["who"] for one in profiles], shares, left=left, label=kind)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    below.invert_yaxis()
    below.set_xlim(0, 1)
    below.set_xlabel("share of the time of the forward passes")
    figure.legend(*below.get_legend_handles_labels(), ncols=len(KINDS), loc="outside lower center", frameon=False)
    path = RESULTS / f"{name}.svg"
    figure.savefig(path)
    pyplot.close(figure)
    return path
