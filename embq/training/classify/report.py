"""The results of a training: its model, the picture of its log, and the report for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from embq.core.benchmark_record import table
from embq.core.service.progress_line import duration
from embq.training.classify.checkpoint import FORMAT, Folder
from embq.training.classify.config import Config
from embq.training.classify.inputs import InputPlan
from embq.training.data.batch import View
from embq.training.data.images import SHOWN
from embq.training.run.folder import replacing, save_weights, write_json, writing
from embq.training.run.journal import lines

SHOWN_EPOCHS = 10
"""Last epochs in the table."""


def write_model(folder: Folder, config: Config, plan: InputPlan, view: View, model: nn.Module, samples: int) -> None:
    """Write model.safetensors, model.json and, if matplotlib is installed, curve.png.

    Args:
        samples: of all epochs and processes.
    """
    with replacing(folder.weights) as temporary:
        save_weights(model.state_dict(), temporary)
    write_json(folder.model, _description(config, plan, view, samples))
    with writing(folder.curve):
        draw(folder.log, folder.curve)


def _description(config: Config, plan: InputPlan, view: View, samples: int) -> dict[str, Any]:
    """Facts for building the model again, and for preparing its input."""
    return {
        "format": FORMAT,
        "arch": config.arch,
        "classes": plan.classes,
        "preprocessing": {
            "image_size": view.image_size,
            "shown": SHOWN,
            "interpolation": "bilinear",
            "mean": list(view.mean),
            "std": list(view.std),
        },
        "training": {
            "epochs": config.epochs,
            "samples": samples,
            "shards": config.shards,
            "digest": plan.shards.digest,
            "precision": config.precision,
            "seed": config.seed,
        },
        "torch": torch.__version__,
    }


def draw(log: Path, path: Path) -> bool:
    """Plot loss and accuracy of a log.jsonl over the steps; False if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    logged = list(lines(log))
    offsets = _steps_before(logged)
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for axes, of_train, of_validation, name in ((above, "loss", "loss", "loss"), (below, "accuracy", "top1", "top-1")):
        steps, values = _series(logged, "train", of_train, offsets)
        axes.plot(steps, values, color="#7fa8d1", linewidth=0.8, label="training, as logged")
        if len(values) > 20:
            axes.plot(steps, _smoothed(values), color="#1f5f9f", linewidth=1.6, label="training, smoothed")
        steps, values = _series(logged, "validation", of_validation, offsets)
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


def _steps_before(logged: list[dict[str, Any]]) -> dict[int, int]:
    """Epoch -> steps of all epochs before it."""
    epoch_steps = {line["epoch"]: line["step"] for line in logged if line["kind"] == "epoch"}
    offsets, total = {}, 0
    for epoch in range(max(epoch_steps, default=0) + 2):
        offsets[epoch] = total
        total += epoch_steps.get(epoch, 0)
    return offsets


def _series(
    logged: list[dict[str, Any]], kind: str, name: str, offsets: dict[int, int]
) -> tuple[list[int], list[float]]:
    chosen = [line for line in logged if line["kind"] == kind]
    return [offsets[line["epoch"]] + line["step"] for line in chosen], [line[name] for line in chosen]


def _smoothed(values: list[float], keep: float = 0.9) -> list[float]:
    """Exponential moving average."""
    smooth, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        smooth.append(mean / weight)
    return smooth


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRow:
    """One epoch.

    Attributes:
        epoch: number, from 1.
        loss, accuracy: of the last steps of the process that leads; None if it made none.
        top1, top5: on the validation set; None without one.
        samples: of all processes.
        failed: samples that could not be read.
        seconds: since the epoch was begun or resumed.
        samples_per_s: of all processes.
    """

    epoch: int
    loss: float | None
    accuracy: float | None
    top1: float | None
    top5: float | None
    samples: int
    failed: int
    seconds: float
    samples_per_s: float

    def cells(self, processes: int) -> dict[str, object]:
        """Column -> cell of the row of a table."""
        parts = {"accuracy": self.accuracy, "top-1": self.top1, "top-5": self.top5}
        return {
            "epoch": self.epoch,
            "loss": "-" if self.loss is None else f"{self.loss:.3f}",
            **{name: "-" if value is None else f"{value:.1%}" for name, value in parts.items()},
            "samples": f"{self.samples:,}",
            "failed": f"{self.failed:,}",
            "time": duration(self.seconds),
            "samples/s": f"{self.samples_per_s:,.0f}",
            "of a process": f"{self.samples_per_s / processes:,.0f}",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """A finished training.

    Attributes:
        out: its folder.
        arch: full name of the architecture.
        processes: number of training processes.
        samples: of all epochs and processes.
        failed: different samples that could not be read.
        failures: file that lists them.
        epochs: every epoch.
    """

    out: str
    arch: str
    processes: int
    samples: int
    failed: int
    failures: str
    epochs: list[EpochRow]

    def text(self) -> str:
        """A table of the last epochs, and a sentence."""
        rows = [row.cells(self.processes) for row in self.epochs[-SHOWN_EPOCHS:]]
        text = f"{self.arch} trained on {self.samples:,} samples; the model is {self.out}/model.safetensors"
        if self.failed:
            text += f"\n{self.failed:,} samples could not be read: {self.failures}"
        return f"{table(list(rows[0]), [list(row.values()) for row in rows])}\n{text}"


def report_of(folder: Folder, arch: str, processes: int, samples: int, failed: int) -> TrainingReport:
    """The report of a finished training, with the epochs of its log; other arguments as in `TrainingReport`."""
    by_epoch: dict[int, dict[str, dict[str, Any]]] = {}
    for line in lines(folder.log):
        by_epoch.setdefault(line["epoch"], {})[line["kind"]] = line
    return TrainingReport(
        out=str(folder.root),
        arch=arch,
        processes=processes,
        samples=samples,
        failed=failed,
        failures=str(folder.failures),
        epochs=[_row(epoch, logged) for epoch, logged in sorted(by_epoch.items()) if "epoch" in logged],
    )


def _row(epoch: int, logged: dict[str, dict[str, Any]]) -> EpochRow:
    train, validation, sums = logged.get("train", {}), logged.get("validation", {}), logged["epoch"]
    return EpochRow(
        epoch=epoch + 1,
        loss=train.get("loss"),
        accuracy=train.get("accuracy"),
        top1=validation.get("top1"),
        top5=validation.get("top5"),
        **{name: sums[name] for name in ("samples", "failed", "seconds", "samples_per_s")},
    )
