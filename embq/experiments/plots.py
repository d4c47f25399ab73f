"""The pictures of the experiments. Colours are those of Okabe and Ito, which people who see few colours tell apart.

Every point and bar is a mean; its error bar is one standard deviation up and one down.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from embq.experiments.statistics import Measured, UnitCost, number
from embq.experiments.trials import Outcome

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#767676"
DPI = 150
ERROR_BAR: dict[str, Any] = {"capsize": 5.0, "capthick": 1.5, "elinewidth": 1.5}


def draw_workers(outcomes: Sequence[Outcome], path: Path, *, title: str) -> None:
    """Speed against the number of workers beside the ideal line, and the memory that they take."""
    figure, (speed, memory) = _figure(title, 2)
    counts = [one.condition.crew.size for one in outcomes]
    rates = [one.rate for one in outcomes]
    ideal = [rates[0].mean * count / counts[0] for count in counts]
    speed.plot(
        counts, ideal, "--", color=GREY, label=f"ideal: {counts[0]} x n" if counts[0] > 1 else "ideal: n times one"
    )
    _points(speed, counts, rates, color=BLUE, label="measured")
    speed.set_ylabel("records/s")
    # The ideal line may leave the picture: what was measured is what is to be seen.
    speed.set_ylim(0, min(max(ideal), 2.2 * max(rate.mean for rate in rates)) * 1.08)
    speed.legend(loc="upper left", frameon=False)
    known = [(count, one.memory_mb) for count, one in zip(counts, outcomes, strict=True)]
    there = [(count, value) for count, value in known if value is not None]
    _points(memory, [count for count, _ in there], [value.scaled(1e-3) for _, value in there], color=ORANGE)
    memory.set_ylabel("memory of all workers, GB")
    memory.set_ylim(bottom=0)
    for axes in (speed, memory):
        axes.set_xlabel(f"workers on {outcomes[0].condition.crew.devices[0]}")
        axes.xaxis.set_major_locator(FixedLocator(counts))
        axes.set_xlim(0, max(counts) * 1.08)
    _save(figure, path, outcomes)


def draw_devices(
    alone: Sequence[tuple[str, Measured]],
    ideal: Measured,
    equal: Measured,
    fleet: Measured,
    shares: Sequence[Measured],
    path: Path,
    *,
    title: str,
    outcomes: Sequence[Outcome],
) -> None:
    """Bars of the rates, alone, as a sum, and as a fleet; and the share of each device beside that of its rate."""
    figure, (speed, share) = _figure(title, 2)
    names = [_numbered(device, i, [d for d, _ in alone]) for i, (device, _) in enumerate(alone)]
    bars = [
        *((f"{name} alone", rate, BLUE) for name, (_, rate) in zip(names, alone, strict=True)),
        ("sum of these", ideal, GREY),
        ("equal split,\ncomputed", equal, GREY),
        ("all together,\nfrom the queue", fleet, ORANGE),
    ]
    at = range(len(bars))
    speed.barh(at, [rate.mean for _, rate, _ in bars], color=[color for *_, color in bars], height=0.66)
    speed.errorbar(
        [rate.mean for _, rate, _ in bars],
        list(at),
        xerr=[rate.sd for _, rate, _ in bars],
        fmt="none",
        ecolor="black",
        **ERROR_BAR,
    )
    most = max(rate.mean + rate.sd for _, rate, _ in bars)
    for i, (_, rate, _) in enumerate(bars):
        speed.text(rate.mean + rate.sd + 0.03 * most, i, str(rate), va="center", fontsize=9)
    speed.set_yticks(list(at), [name for name, *_ in bars])
    speed.invert_yaxis()
    speed.set_xlim(0, 1.42 * most)
    speed.set_xlabel("records/s")
    width = 0.38
    spots = list(range(len(alone)))
    share.bar(
        [x - width / 2 for x in spots],
        [100 * rate.mean / ideal.mean for _, rate in alone],
        width,
        color=GREY,
        label="of the sum of the rates",
    )
    share.bar(
        [x + width / 2 for x in spots],
        [100 * one.mean for one in shares],
        width,
        color=ORANGE,
        label="of the work done",
    )
    share.errorbar(
        [x + width / 2 for x in spots],
        [100 * one.mean for one in shares],
        yerr=[100 * one.sd for one in shares],
        fmt="none",
        ecolor="black",
        **ERROR_BAR,
    )
    share.set_xticks(spots, names)
    share.set_ylabel("share, %")
    share.set_ylim(0, 118)
    share.legend(loc="upper right", frameon=False)
    _save(figure, path, outcomes)


def draw_unit_size(outcomes: Sequence[Outcome], cost: UnitCost | None, path: Path, *, title: str) -> None:
    """Speed against the size of units on a logarithmic axis, with the fit."""
    figure, (axes,) = _figure(title, 1)
    sizes = [one.condition.unit_size for one in outcomes]
    rates = [one.rate for one in outcomes]
    if cost is not None and len(sizes) > 1:
        least, most = min(sizes), max(sizes)
        curve = [least * (most / least) ** (i / 200) for i in range(201)]
        label = f"fit: {cost} per unit"
        axes.plot(curve, [cost.rate(size) for size in curve], "--", color=GREY, label=label)
    _points(axes, sizes, rates, color=BLUE, label="measured")
    axes.set_xscale("log")
    axes.set_xlabel("records per unit")
    axes.set_ylabel("records/s")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
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


def _points(axes: Axes, xs: Sequence[int], values: Sequence[Measured], *, color: str, label: str = "") -> None:
    axes.errorbar(
        xs,
        [value.mean for value in values],
        yerr=[value.sd for value in values],
        fmt="o-",
        color=color,
        ecolor="black",
        label=label or None,
        **ERROR_BAR,
    )
    most = max((value.mean + value.sd for value in values), default=1.0)
    for x, value in zip(xs, values, strict=True):
        axes.annotate(
            number(value.mean), (x, value.mean + value.sd), (0, 7), textcoords="offset points", ha="center", fontsize=9
        )
    axes.set_ylim(0, 1.25 * most)


def _numbered(device: str, i: int, devices: Sequence[str]) -> str:
    """sim:1 #2 where there are several of a name."""
    return f"{device} #{list(devices[: i + 1]).count(device)}" if list(devices).count(device) > 1 else device


def _save(figure: Figure, path: Path, outcomes: Sequence[Outcome]) -> None:
    first = outcomes[0]
    replicates = len(first.replicates)
    device = next(iter(first.device_names.values()), "")
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
