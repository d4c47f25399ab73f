"""Plots of the experiments, in the colour-blind safe palette of Okabe and Ito.

Every point and bar is a mean; its error bar is one standard deviation up and one down.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from embq.app.bench.outcomes import Fleet, Outcome
from embq.app.bench.statistics import Measured, UnitCost, number

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#767676"
DPI = 150
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")
ERROR_BAR: dict[str, Any] = {"capsize": 5.0, "capthick": 1.5, "elinewidth": 1.5}


def draw_workers(outcomes: Sequence[Outcome], path: Path, *, title: str) -> None:
    """Speed and memory against the number of workers, with the line of ideal scaling."""
    figure, (speed, memory) = _figure(title, 2)
    counts = [one.condition.worker_set.size for one in outcomes]
    rates = [one.rate for one in outcomes]
    ideal = [rates[0].mean * count / counts[0] for count in counts]
    speed.plot(
        counts, ideal, "--", color=GREY, label=f"ideal: {counts[0]} x n" if counts[0] > 1 else "ideal: n times one"
    )
    _points(speed, counts, rates, color=BLUE, label="measured")
    speed.set_ylabel("records/s")
    # The ideal line may leave the picture: the scale is that of the measurements.
    speed.set_ylim(0, min(max(ideal), 2.2 * max(rate.mean for rate in rates)) * 1.08)
    speed.legend(loc="best", frameon=False)
    known = [(count, one.memory_mb) for count, one in zip(counts, outcomes, strict=True)]
    there = [(count, value) for count, value in known if value is not None]
    _points(
        memory, [count for count, _ in there], [value.scaled(1e-3) for _, value in there], color=ORANGE, labels=BESIDE
    )
    memory.set_ylabel("memory of all workers, GB")
    memory.set_ylim(bottom=0)
    for axes in (speed, memory):
        axes.set_xlabel(f"workers on {outcomes[0].condition.worker_set.devices[0]}")
        axes.xaxis.set_major_locator(FixedLocator(counts))
        axes.set_xlim(0, max(counts) * 1.08)
    _save(figure, path, outcomes)


def draw_devices(fleet: Fleet, outcomes: Sequence[Outcome], path: Path, *, title: str) -> None:
    """Bars of the rates alone, summed and together; and each device's share of the work beside that of the rates."""
    figure, (rates, shares) = _figure(title, 2)
    single = [(f"{device} alone{_how_many(fleet, device)}", rate, BLUE) for device, rate in fleet.alone.items()]
    _bars(
        rates,
        [
            *single,
            ("sum of all", fleet.ideal, GREY),
            ("equal split,\ncomputed", fleet.equal, GREY),
            ("all together,\nfrom the queue", fleet.rate, ORANGE),
        ],
    )
    _shares(shares, fleet)
    _save(figure, path, outcomes)


def _how_many(fleet: Fleet, device: str) -> str:
    count = fleet.devices.count(device)
    return f"\n(there are {count})" if count > 1 else ""


def _bars(axes: Axes, bars: Sequence[tuple[str, Measured, str]]) -> None:
    at, means, deviations = range(len(bars)), [one.mean for _, one, _ in bars], [one.sd for _, one, _ in bars]
    axes.barh(at, means, color=[color for *_, color in bars], height=0.66)
    axes.errorbar(means, at, xerr=deviations, fmt="none", ecolor="black", **ERROR_BAR)
    most = max(mean + deviation for mean, deviation in zip(means, deviations, strict=True))
    for i, (_, rate, _) in enumerate(bars):
        axes.text(rate.mean + rate.sd + 0.03 * most, i, str(rate), va="center", fontsize=9)
    axes.set_yticks(at, [name for name, *_ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.42 * most)
    axes.set_xlabel("records/s")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(THOUSANDS)


def _shares(axes: Axes, fleet: Fleet, width: float = 0.38) -> None:
    left, right = ([i + side * width / 2 for i in range(len(fleet.devices))] for side in (-1, 1))
    done = [100 * share.mean for share in fleet.shares]
    axes.bar(left, [100 * share for share in fleet.rate_shares], width, color=GREY, label="of the sum of the rates")
    axes.bar(right, done, width, color=ORANGE, label="of the work")
    deviations = [100 * share.sd for share in fleet.shares]
    axes.errorbar(right, done, yerr=deviations, fmt="none", ecolor="black", **ERROR_BAR)
    for x, share, deviation in zip(right, done, deviations, strict=True):
        axes.text(x, share + deviation + 2, f"{share:.1f}", ha="center", fontsize=9)
    for x, part in zip(left, fleet.rate_shares, strict=True):
        axes.text(x, 100 * part + 2, f"{100 * part:.1f}", ha="center", fontsize=9)
    axes.set_xticks(range(len(fleet.devices)), fleet.devices)
    axes.set_ylabel("share of the device, %")
    axes.set_ylim(0, 118)
    axes.legend(loc="upper right", frameon=False)


def draw_unit_size(outcomes: Sequence[Outcome], cost: UnitCost | None, path: Path, *, title: str) -> None:
    """Speed against unit size on a logarithmic axis, with the fit."""
    figure, (axes,) = _figure(title, 1)
    sizes = [one.condition.unit_size for one in outcomes]
    rates = [one.rate for one in outcomes]
    if cost is not None and len(sizes) > 1:
        least, most = min(sizes), max(sizes)
        curve = [least * (most / least) ** (i / 200) for i in range(201)]
        label = f"fit: {cost.t0_ms} ms for a unit, {number(1000 * cost.t1_s)} ms for each record"
        axes.plot(curve, [cost.rate(size) for size in curve], "--", color=GREY, label=label)
    _points(axes, sizes, rates, color=BLUE, label="measured", style="o" if cost is not None else "o-")
    axes.set_xscale("log")
    axes.set_xlabel("records per unit")
    axes.set_ylabel("records/s")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 1.25 * max(rate.mean + rate.sd for rate in rates))
    axes.legend(loc="lower center", frameon=False)
    _save(figure, path, outcomes)


def _figure(title: str, columns: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(9.6 if columns > 1 else 7.2, 4.4), layout="constrained")
    figure.suptitle(title, fontsize=13)
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


ABOVE, BESIDE = ("center", (0, 8)), ("right", (0, 6))
"""Label of a point: alignment, and offset in points. Left of a line that rises."""


def _points(
    axes: Axes,
    xs: Sequence[int],
    values: Sequence[Measured],
    *,
    color: str,
    label: str = "",
    style: str = "o-",
    labels: tuple[str, tuple[int, int]] = ABOVE,
) -> None:
    means, deviations = [value.mean for value in values], [value.sd for value in values]
    axes.errorbar(xs, means, yerr=deviations, fmt=style, color=color, ecolor="black", label=label or None, **ERROR_BAR)
    for x, value in zip(xs, values, strict=True):
        axes.annotate(
            number(value.mean),
            (x, value.mean + value.sd),
            labels[1],
            textcoords="offset points",
            ha=labels[0],
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )
    axes.set_ylim(0, 1.25 * max((value.mean + value.sd for value in values), default=1.0))


def _save(figure: Figure, path: Path, outcomes: Sequence[Outcome]) -> None:
    first = outcomes[0]
    replicates = len(first.replicates)
    names = list(dict.fromkeys(name for one in outcomes for name in one.device_names.values()))
    simulated = all(name.startswith("simulated") for name in names)
    device = "simulated devices" if simulated and len(names) > 1 else ", ".join(names)
    figure.text(
        0.5,
        -0.005,
        f"{first.model.spec}, {first.model.precision}, {device}; {replicates} runs each, "
        "error bars: one standard deviation up and down",
        ha="center",
        va="top",
        fontsize=8,
        color=GREY,
    )
    figure.savefig(path, dpi=DPI, bbox_inches="tight", pad_inches=0.15)
