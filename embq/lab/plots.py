"""Plots of the experiments, in the colour-blind safe palette of Okabe and Ito.

Every point and bar is a mean; its error bar is one standard deviation up and one down.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from embq.lab.outcomes import ConditionOutcome, ExperimentResult, Fleet, cost_of
from embq.lab.statistics import Measured, number

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#767676"
DPI = 150
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")
ERROR_BAR: dict[str, Any] = {"capsize": 5.0, "capthick": 1.5, "elinewidth": 1.5, "ecolor": "black"}


def draw(result: ExperimentResult, *, model: str) -> bytes:
    """The plot of an experiment as PNG.

    Args:
        model: its spec and precision, for the caption.
    """
    drawing, columns = DRAWINGS[result.name]
    figure = Figure(figsize=(9.6 if columns > 1 else 7.2, 4.4), layout="constrained")
    figure.suptitle(textwrap.fill(result.title, 48 * columns + 24), fontsize=12)
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for subplot in axes:
        subplot.spines[["top", "right"]].set_visible(False)
    drawing(result.outcomes, *axes)
    names = list(dict.fromkeys(name for outcome in result.outcomes for name in outcome.device_names.values()))
    simulated = len(names) > 1 and all(name.startswith("simulated") for name in names)
    caption = (
        f"{model}, {'simulated devices' if simulated else ', '.join(names)}; "
        f"{len(result.outcomes[0].replicates)} runs each, error bars: one standard deviation up and down"
    )
    figure.text(0.5, -0.005, caption, ha="center", va="top", fontsize=8, color=GREY)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=DPI, bbox_inches="tight", pad_inches=0.15)
    return picture.getvalue()


def _draw_workers(outcomes: Sequence[ConditionOutcome], speed: Axes, memory: Axes) -> None:
    """Speed and memory against the number of workers, with the line of ideal scaling."""
    counts = [outcome.condition.worker_set.size for outcome in outcomes]
    rates = [outcome.rate for outcome in outcomes]
    ideal = [rates[0].mean * count / counts[0] for count in counts]
    label = f"ideal: {counts[0]} x n" if counts[0] > 1 else "ideal: n times one"
    speed.plot(counts, ideal, "--", color=GREY, label=label)
    _points(speed, dict(zip(counts, rates, strict=True)), color=BLUE, label="measured")
    speed.set_ylabel("records/s")
    # The ideal line may leave the picture: the scale is that of the measurements.
    speed.set_ylim(0, min(max(ideal), 2.2 * max(rate.mean for rate in rates)) * 1.08)
    speed.legend(loc="best", frameon=False)
    sizes = {count: used.scaled(1e-3) for count, o in zip(counts, outcomes, strict=True) if (used := o.memory_mb)}
    _points(memory, sizes, color=ORANGE, align="right")
    memory.set_ylabel("memory of all workers, GB")
    memory.set_ylim(bottom=0)
    for axes in (speed, memory):
        axes.set_xlabel(f"workers on {outcomes[0].condition.worker_set.devices[0]}")
        axes.xaxis.set_major_locator(FixedLocator(counts))
        axes.set_xlim(0, max(counts) * 1.08)


def _draw_devices(outcomes: Sequence[ConditionOutcome], rates: Axes, shares: Axes) -> None:
    """Bars of the rates alone, summed and together; and each device's share of the work beside that of the rates."""
    fleet = Fleet.of(outcomes)
    bars: dict[str, tuple[Measured, str]] = {}
    for device, rate in fleet.single_rates.items():
        count = fleet.devices.count(device)
        bars[f"{device} alone" + (f"\n(there are {count})" if count > 1 else "")] = rate, BLUE
    bars["sum of all"] = fleet.ideal, GREY
    bars["equal split,\ncomputed"] = fleet.equal, GREY
    bars["all together,\nfrom the queue"] = fleet.rate, ORANGE
    means, deviations = zip(*((rate.mean, rate.sd) for rate, _ in bars.values()), strict=True)
    drawn = rates.barh(
        list(bars), means, xerr=deviations, height=0.66, color=[color for _, color in bars.values()], error_kw=ERROR_BAR
    )
    rates.bar_label(drawn, [str(rate) for rate, _ in bars.values()], padding=6, fontsize=9)
    rates.invert_yaxis()
    rates.margins(x=0.35)
    rates.set_xlabel("records/s")
    rates.xaxis.set_major_locator(MaxNLocator(5))
    rates.xaxis.set_major_formatter(THOUSANDS)
    _draw_shares(fleet, shares)


def _draw_shares(fleet: Fleet, axes: Axes, width: float = 0.38) -> None:
    work = [share.scaled(100) for share in fleet.shares]
    rates = [100 * share for share in fleet.rate_shares]
    left, right = ([i + side * width / 2 for i in range(len(rates))] for side in (-1, 1))
    of_rates = axes.bar(left, rates, width, color=GREY, label="of the sum of the rates")
    done, errors = [share.mean for share in work], [share.sd for share in work]
    of_work = axes.bar(right, done, width, yerr=errors, color=ORANGE, label="of the work", error_kw=ERROR_BAR)
    for bars in (of_rates, of_work):
        axes.bar_label(bars, fmt="%.1f", padding=4, fontsize=9)
    axes.set_xticks(range(len(rates)), fleet.devices)
    axes.set_ylabel("share of the device, %")
    axes.set_ylim(0, 118)
    axes.legend(loc="upper right", frameon=False)


def _draw_unit_sizes(outcomes: Sequence[ConditionOutcome], axes: Axes) -> None:
    """Speed against unit size on a logarithmic axis, with the fit."""
    rates = {outcome.condition.unit_size: outcome.rate for outcome in outcomes}
    least, most = min(rates), max(rates)
    cost = cost_of(outcomes)
    if cost is not None:
        curve = [least * (most / least) ** (i / 200) for i in range(201)]
        label = f"fit: {cost.t0_ms} ms for a unit, {number(1000 * cost.t1_s)} ms for each record"
        axes.plot(curve, [cost.rate(size) for size in curve], "--", color=GREY, label=label)
    _points(axes, rates, color=BLUE, label="measured", style="o" if cost is not None else "o-")
    axes.set_xscale("log")
    axes.set_xlabel("records per unit")
    axes.set_ylabel("records/s")
    axes.xaxis.set_major_locator(FixedLocator(list(rates)))
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.legend(loc="lower center", frameon=False)


DRAWINGS: dict[str, tuple[Any, int]] = {
    "workers": (_draw_workers, 2),
    "devices": (_draw_devices, 2),
    "unit-size": (_draw_unit_sizes, 1),
}
"""Name of an experiment -> function that draws it, and the axes that it takes."""


def _points(
    axes: Axes, values: dict[int, Measured], *, color: str, label: str = "", style: str = "o-", align: str = "center"
) -> None:
    """Points with error bars and labels, `align`ed above the points, or to the left of a line that rises."""
    means, deviations = [value.mean for value in values.values()], [value.sd for value in values.values()]
    axes.errorbar(list(values), means, yerr=deviations, fmt=style, color=color, label=label or None, **ERROR_BAR)
    for x, value in values.items():
        axes.annotate(
            number(value.mean),
            (x, value.mean + value.sd),
            (0, 8),
            textcoords="offset points",
            ha=align,
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )
    axes.set_ylim(0, 1.25 * max((value.mean + value.sd for value in values.values()), default=1.0))
