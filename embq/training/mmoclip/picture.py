"""Plots samples per second over the iterations of a training."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from embq.training.mmoclip import required
from embq.training.mmoclip.judgement import Judgement
from embq.training.mmoclip.table import short

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#767676"
"""Colours of Okabe and Ito, suited to colour blindness."""
DPI = 150
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


def draw(judgement: Judgement, path: Path) -> None:
    """Write the plot as PNG. The training has one iteration at least."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    lines, figures = judgement.training.log.iterations, judgement.figures
    numbers, rates = range(1, len(lines) + 1), [line.per_s for line in lines]
    axes.plot(numbers, rates, "o-", color=BLUE, markersize=3, linewidth=1, label="each iteration")
    axes.plot(1, rates[0], "o", color=ORANGE, markersize=8, label=f"the first, {lines[0].batch_s:g} s: not counted")
    if figures.throughput_avg is not None:
        axes.axhline(figures.throughput_avg, color=GREEN, linestyle="--", label=f"mean {figures.throughput_avg:,.1f}/s")
    published = _published(axes, judgement, max(rates))
    axes.set_xlabel(f"iteration, of {figures.iterations_expected or len(lines):,}")
    axes.set_ylabel("samples/s of all processes")
    axes.set_xlim(0.5, max(figures.iterations_expected or 0, len(lines)) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(THOUSANDS)
    axes.set_ylim(0, 1.12 * max(*rates, published))
    axes.legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none")
    axes.set_title(_title(judgement), loc="left", fontsize=11)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def _published(axes: Axes, judgement: Judgement, most: float) -> float:
    """Plot the published rate for as many A100; returns 0 if it is for another model, or off the scale."""
    world, model = judgement.figures.world_size, judgement.training.settings.get("model", required.MODEL)
    rate = (world or 0) * required.PUBLISHED_PER_GPU_S
    if model != required.MODEL or not 0 < rate < 4 * most:
        return 0.0
    label = f"published: {required.PUBLISHED_PER_GPU_S:g}/s per A100, {rate:,.0f}/s"
    axes.axhline(rate, color=GREY, linestyle=":", label=label)
    return rate


def _title(judgement: Judgement) -> str:
    figures = judgement.figures
    total = "no total" if figures.total_time_secs is None else f"total {figures.total_time_secs:,.2f} s"
    on = f" on {judgement.gpu}" if judgement.gpu else ""
    processes = "" if figures.world_size is None else f", {figures.world_size} x {figures.batch_size} samples{on}"
    return f"MMoCLIP: {short(figures.model or 'model not known')}{processes}; {total} ({judgement.verdict})"
