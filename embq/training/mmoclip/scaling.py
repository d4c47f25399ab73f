"""Compares trainings with different numbers of processes: the efficiency of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from embq.core.benchmark_record import write
from embq.core.errors import Exit, InputError
from embq.training.mmoclip import required, table
from embq.training.mmoclip.judgement import Judgement, on_cpu
from embq.training.mmoclip.picture import BLUE, DPI, GREY, THOUSANDS

RESULT, PICTURE = "scaling.json", "scaling.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One training of several."""

    judgement: Judgement
    efficiency: float | None
    """Its samples/s per GPU over those of the smallest; None if one of the two has no total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Trainings by their number of processes, smallest first."""

    points: tuple[Point, ...]

    @property
    def exit(self) -> Exit:
        """BAD_INPUT if one of them has no total."""
        return max((point.judgement.exit for point in self.points), default=Exit.DONE)

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        rows = [{**point.judgement.describe(), "efficiency": point.efficiency} for point in self.points]
        return {"schema": 1, "trainings": rows}

    def lines(self) -> list[str]:
        """The benchmark's table with a row for each, the efficiency, and reasons for missing totals."""
        header = [*table.COLUMNS, "processes", "samples/s per GPU", "efficiency"]
        rows = []
        for point in self.points:
            figures = point.judgement.figures
            rate = None if point.judgement.faults else figures.samples_per_s_per_gpu
            rows.append(
                [
                    *table.cells(figures),
                    table.cell(figures.world_size, "d"),
                    table.cell(rate, ".2f"),
                    table.cell(point.efficiency, ".3f"),
                ]
            )
        wrong = [
            f"{point.judgement.training.log.path}: no total: {fault}"
            for point in self.points
            for fault in point.judgement.faults
        ]
        other = dict.fromkeys(reason for point in self.points for reason in point.judgement.reasons)
        smallest = "efficiency: samples/s per GPU over those of the smallest, from the second iteration on"
        reasons = ["not comparable with the baseline:", *(f"  {reason}" for reason in other)] if other else []
        return [*table.columns(header, rows), "", smallest, *wrong, *reasons]


def compare(judgements: Sequence[Judgement]) -> Scaling:
    """Compare trainings. InputError if they are not of one series."""
    for name in ("model", "train_num_samples", "precision", "grad_checkpointing"):
        values = sorted({str(judgement.training.settings.get(name)) for judgement in judgements})
        if len(values) > 1:
            raise InputError(
                f"these trainings are not of one series: {name} is {' and '.join(values)}",
                next_step="name logs that differ in their number of GPUs only",
            )
    ordered = sorted(judgements, key=lambda judgement: judgement.figures.world_size or 0)
    first = ordered[0]
    base = None if first.faults else first.figures.samples_per_s_per_gpu
    return Scaling(points=tuple(Point(judgement=judged, efficiency=_efficiency(judged, base)) for judged in ordered))


def _efficiency(judgement: Judgement, base: float | None) -> float | None:
    rate = judgement.figures.samples_per_s_per_gpu
    return None if judgement.faults or base is None or rate is None else rate / base


def draw(scaling: Scaling, path: Path) -> None:
    """Plot samples per second over processes, beside perfect scaling."""
    shown = [point.judgement for point in scaling.points if point.efficiency is not None]
    sizes = [judgement.figures.world_size or 0 for judgement in shown]
    rates = [judgement.figures.samples_per_s or 0.0 for judgement in shown]
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.plot(sizes, [rates[0] * size / sizes[0] for size in sizes], "--", color=GREY, label="no loss")
    axes.plot(sizes, rates, "o-", color=BLUE, label="measured")
    for point, size, rate in zip([p for p in scaling.points if p.efficiency is not None], sizes, rates, strict=True):
        axes.annotate(
            f"{point.efficiency:.0%}", (size, rate), (6, -14), textcoords="offset points", fontsize=9, color=BLUE
        )
    if shown[0].figures.model == required.MODEL:
        published = [size * required.PUBLISHED_PER_GPU_S for size in sizes]
        label = f"published: {required.PUBLISHED_PER_GPU_S:g}/s per A100"
        axes.plot(sizes, published, ":", color=GREY, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.set_xlabel("processes, one per GPU")
    axes.set_ylabel("samples/s, from the second iteration on")
    axes.legend(loc="upper left", frameon=False)
    axes.set_title(title(shown[0]), loc="left", fontsize=11)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def title(judgement: Judgement) -> str:
    """Title of the plot: model, and devices if they are known."""
    on = judgement.gpu or ("the CPU" if on_cpu(judgement.training.settings) else "")
    return f"MMoCLIP: {table.short(judgement.figures.model or 'model not known')}{f' on {on}' if on else ''}"


def keep(scaling: Scaling, place: Path) -> None:
    """Write the series to a folder, with a plot if there is an efficiency."""
    write(place / RESULT, scaling.describe())
    if any(point.efficiency is not None for point in scaling.points):
        draw(scaling, place / PICTURE)
