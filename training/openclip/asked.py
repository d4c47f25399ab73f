"""What the user says of a training by open_clip."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A training as it was asked for; None and "" leave a setting to open_clip.

    Attributes:
        shards: in any form that `open_shards` takes.
        model: a name of open_clip's, or a folder.
        out: the folder of the training.
        epochs: how often the samples are gone through.
        batch_size: samples of one process in one step.
        loader_workers: processes that read and decode, for each process that trains.
        lr: highest learning rate.
        warmup_steps: steps in which the learning rate rises.
        precision: one of open_clip's; "" for amp on GPUs and fp32 on cores.
        resampled: whether shards are drawn with replacement.
        exact: whether each epoch must have each sample once.
        epoch_samples: samples of an epoch, of all processes; None for all that there are.
        log_every: steps between two lines of the log.
        further: flags of open_clip.
    """

    shards: str
    model: str
    out: Path
    epochs: int
    batch_size: int
    loader_workers: int
    lr: float | None
    warmup_steps: int | None
    precision: str
    resampled: bool
    exact: bool
    epoch_samples: int | None
    log_every: int
    further: tuple[str, ...]
