"""Prints a judgement: the benchmark's table and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from embq.training.mmoclip import required
from embq.training.mmoclip.judgement import FAIL, NOT_COMPARABLE, PASS, UNSOUND, Figures, Judgement, on_cpu

COLUMNS = {
    "nodes": "d",
    "n_gpu": "d",
    "model": "s",
    "batch_size": "d",
    "done_percent_last": ".1f",
    "throughput_avg": ".2f",
    "time_per_iteration_secs_avg": ".3f",
    "total_time_secs": ".3f",
}
"""The columns of the benchmark's table, and how their values are written."""


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Cells between bars, as JUBE prints its tables."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"

    return [line(header), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)]


def cells(figures: Figures) -> list[str]:
    """The benchmark's columns of one training; "-" for unknown values."""
    named = replace(figures, model=short(figures.model) if figures.model else None)
    return [cell(getattr(named, name), how) for name, how in COLUMNS.items()]


def short(model: str) -> str:
    """The name of a model; for a path, that of the folder."""
    return model.rstrip("/").rpartition("/")[2]


def cell(value: Any, how: str) -> str:
    """A value in a table."""
    return "-" if value is None else format(value, how)


def lines(run: Judgement) -> list[str]:
    """The table of one training, and its verdict."""
    return [*columns(list(COLUMNS), [cells(run.figures)]), "", *verdict(run)]


def verdict(run: Judgement) -> list[str]:
    """The verdict of a training, its speed beside the published one, and its conditions."""
    return [*_verdict(run), *_speed(run), _conditions(run)]


def _verdict(run: Judgement) -> list[str]:
    figures = run.figures
    if run.verdict in (PASS, FAIL):
        sign = "<=" if run.verdict == PASS else ">"
        return [f"{run.verdict}: {figures.total_time_secs} s {sign} {required.BASELINE_S:g} s on 32 A100, the baseline"]
    if run.verdict == NOT_COMPARABLE:
        return [f"not comparable with the baseline of {required.BASELINE_S:g} s on 32 A100:", *_listed(run.reasons)]
    sentences = ["no total: " + run.faults[0], *_listed(run.faults[1:])]
    if figures.counted_secs is not None and run.verdict != UNSOUND:
        sentences.append(
            f"{figures.counted_secs:.3f} s for {_iterations(figures.counted_iterations)} counted, "
            f"from the second on (the first: {figures.first_iteration_s} s)"
        )
    if figures.estimated_total_secs is not None:
        sentences.append(f"an estimate of the whole at their mean, and no result: {figures.estimated_total_secs:.1f} s")
    return sentences + (["also not comparable:", *_listed(run.reasons)] if run.reasons else [])


def _iterations(count: int) -> str:
    return f"{count:,} iteration{'' if count == 1 else 's'}"


def _speed(run: Judgement) -> list[str]:
    figures = run.figures
    if figures.samples_per_s_per_gpu is None or run.verdict == UNSOUND:
        return []
    each = "process" if on_cpu(run.training.settings) else "GPU"
    text = f"{figures.samples_per_s_per_gpu:.2f} samples/s per {each} from the second iteration on"
    published = f"; published: {required.PUBLISHED_PER_GPU_S:g} per A100"
    speeds = [text + (published if each == "GPU" and figures.model in (None, required.MODEL) else "")]
    if run.extrapolated_secs is not None and not run.comparable:
        speeds.append(
            f"extrapolation, and no result: 32 GPUs, each as fast as here, would take {run.extrapolated_secs:,.0f} s"
        )
    return speeds


def _conditions(run: Judgement) -> str:
    settings, figures, versions = run.training.settings, run.figures, run.training.launch.get("versions", {})
    conditions = {
        "processes": figures.world_size,
        "on": run.gpu or None,
        "precision": settings.get("precision"),
        "grad_checkpointing": settings.get("grad_checkpointing"),
        "torchcompile": settings.get("torchcompile"),
        "loader workers": settings.get("workers"),
        "torch": versions.get("torch"),
        "open_clip_torch": versions.get("open_clip_torch"),
        "loss": figures.loss,
        "ln(global batch)": figures.loss_expected,
    }
    return ", ".join(f"{name} {value}" for name, value in conditions.items() if value is not None)


def _listed(sentences: Sequence[str]) -> list[str]:
    return [f"  {sentence}" for sentence in sentences]
