"""A picture of a training: loss and accuracy over its steps."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from training.classify.journal import lines


def draw(log: Path, path: Path) -> bool:
    """Draw what a log.jsonl says; False where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    said = list(lines(log))
    ends = _ends(said)
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for axes, of_train, of_validation, name in ((above, "loss", "loss", "loss"), (below, "accuracy", "top1", "top-1")):
        steps, values = _series(said, "train", of_train, ends)
        axes.plot(steps, values, color="#7fa8d1", linewidth=0.8, label="training, as logged")
        if len(values) > 20:
            axes.plot(steps, _smoothed(values), color="#1f5f9f", linewidth=1.6, label="training, smoothed")
        steps, values = _series(said, "validation", of_validation, ends)
        if values:
            axes.plot(steps, values, color="#d1651f", marker="o", markersize=4, linewidth=1.6, label="validation")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    below.set_ylim(0, 1)
    below.set_xlabel("step")
    above.legend(frameon=False)
    figure.savefig(path, dpi=120)
    return True


def _ends(said: list[dict[str, Any]]) -> dict[int, int]:
    """Epoch -> steps of all epochs before it."""
    made = {line["epoch"]: line["step"] for line in said if line["kind"] == "epoch"}
    before, total = {}, 0
    for epoch in range(max(made, default=0) + 2):
        before[epoch] = total
        total += made.get(epoch, 0)
    return before


def _series(said: list[dict[str, Any]], kind: str, name: str, ends: dict[int, int]) -> tuple[list[int], list[float]]:
    chosen = [line for line in said if line["kind"] == kind]
    return [ends[line["epoch"]] + line["step"] for line in chosen], [line[name] for line in chosen]


def _smoothed(values: list[float], keep: float = 0.9) -> list[float]:
    """A running mean in which each value counts a tenth less than the next."""
    smooth, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        smooth.append(mean / weight)
    return smooth
