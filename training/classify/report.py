"""What a training came to, for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from embq.display import duration
from training.classify.journal import lines

if TYPE_CHECKING:
    from training.classify.training import Training

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
        from embq.experiments.report import table

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
