"""What a training came to, for people and as JSON."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.service.progress_line import duration
from core.storage.durable import drop, publish
from training.run.folder import FORMAT, save, write_json, writing
from training.run.journal import lines

if TYPE_CHECKING:
    from training.classify.loop import Training


def finish(training: Training) -> None:
    """Write model.safetensors, model.json and, where matplotlib is installed, curve.png."""
    folder = training.folder
    temporary = folder.root / f".{folder.weights.name}.{os.getpid()}"
    try:
        with writing(folder.weights):
            save(training.learner.model.state_dict(), temporary)
            publish(temporary, folder.weights)
    finally:
        drop(temporary)
    write_json(folder.model, described(training))
    with writing(folder.curve):
        draw(folder.log, folder.curve)


def described(training: Training) -> dict[str, Any]:
    """What the weights are: enough to build the model again, and to give it what it was trained on."""
    import torch

    from training.data.images import SHOWN

    view, config = training.view, training.config
    return {
        "format": FORMAT,
        "arch": config.arch,
        "classes": training.plan.classes,
        "preprocessing": {
            "image_size": view.image_size,
            "shown": SHOWN,
            "interpolation": "bilinear",
            "mean": list(view.mean),
            "std": list(view.std),
        },
        "training": {
            "epochs": config.epochs,
            "samples": training.samples,
            "shards": config.shards,
            "digest": training.plan.shards.digest,
            "precision": config.precision,
            "seed": config.seed,
        },
        "torch": torch.__version__,
    }


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


SHOWN_EPOCHS = 10
"""The last ones, in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRow:
    """One epoch.

    Attributes:
        epoch: from 1.
        loss, accuracy: of the steps of the process that led, at the epoch's end; None where it made none.
        top1, top5: on the validation set; None without one.
        samples: of all processes.
        failed: samples of it that could not be read.
        seconds: since it was begun or gone on with.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A training that has come to its end.

    Attributes:
        out: its folder.
        arch: full name.
        processes: that trained.
        samples: of all epochs and processes.
        failed: different samples that could not be read.
        failures: the file that lists them.
        epochs: each of them.
    """

    out: str
    arch: str
    processes: int
    samples: int
    failed: int
    failures: str
    epochs: list[EpochRow]

    def to_json(self) -> dict[str, Any]:
        """One object."""
        return asdict(self)

    def text(self) -> str:
        """A table of the last epochs, and a sentence."""
        from core.benchmark_record import table

        header = [
            "epoch",
            "loss",
            "accuracy",
            "top-1",
            "top-5",
            "samples",
            "failed",
            "time",
            "samples/s",
            "of a process",
        ]
        rows = [_cells(row, self.processes) for row in self.epochs[-SHOWN_EPOCHS:]]
        told = f"{self.arch} trained on {self.samples:,} samples; the model is {self.out}/model.safetensors"
        if self.failed:
            told += f"\n{self.failed:,} samples could not be read: {self.failures}"
        return f"{table(header, rows)}\n{told}"


def _cells(row: EpochRow, processes: int) -> list[object]:
    parts = ["-" if value is None else f"{value:.1%}" for value in (row.accuracy, row.top1, row.top5)]
    return [
        row.epoch,
        "-" if row.loss is None else f"{row.loss:.3f}",
        *parts,
        f"{row.samples:,}",
        f"{row.failed:,}",
        duration(row.seconds),
        f"{row.samples_per_s:,.0f}",
        f"{row.samples_per_s / processes:,.0f}",
    ]


def report_of(training: Training) -> Report:
    """What the log says."""
    by_epoch: dict[int, dict[str, dict[str, Any]]] = {}
    for line in lines(training.folder.log):
        by_epoch.setdefault(line["epoch"], {})[line["kind"]] = line
    return Report(
        out=str(training.folder.root),
        arch=training.config.arch,
        processes=training.member.world,
        samples=training.samples,
        failed=training.failures.samples,
        failures=str(training.folder.failures),
        epochs=[_row(epoch, said) for epoch, said in sorted(by_epoch.items()) if "epoch" in said],
    )


def _row(epoch: int, said: dict[str, dict[str, Any]]) -> EpochRow:
    train, validation, whole = said.get("train", {}), said.get("validation", {}), said["epoch"]
    return EpochRow(
        epoch=epoch + 1,
        loss=train.get("loss"),
        accuracy=train.get("accuracy"),
        top1=validation.get("top1"),
        top5=validation.get("top5"),
        samples=whole["samples"],
        failed=whole["failed"],
        seconds=whole["seconds"],
        samples_per_s=whole["samples_per_s"],
    )
