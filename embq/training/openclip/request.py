"""The settings of a training by open_clip: each option of `embq train openclip` is a field of `TrainingRequest`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from embq.training.run.options import COUNT, FROM_0, option, required

PRECISIONS = ("amp", "amp_bf16", "bf16", "fp16", "pure_bf16", "pure_fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """A training as asked for; None leaves a setting to open_clip. The help text of a field is its description.

    `shards` is in any form that `open_shards` takes; `further` are flags of open_clip.
    """

    shards: str
    further: tuple[str, ...]
    model: str = required("Model of open_clip, a folder, or hf-hub:ORG/NAME.", metavar="NAME|FOLDER", short="-m")
    out: Path = required(  # noqa: RUF009 - a field
        "Folder of this training.", click.Path(path_type=Path, file_okay=False), name="--output", short="-o"
    )
    epochs: int = option(32, "Passes over all samples.", COUNT)
    batch_size: int = option(64, "Samples per step of each process.", COUNT)
    loader_workers: int = option(
        4, "Worker processes per device, which read and decode.", FROM_0, metavar="N", name="--workers"
    )
    lr: float | None = option(None, "Peak learning rate.  [5e-4]", float, metavar="X")
    warmup_steps: int | None = option(
        None, "Steps of linear warm-up of the learning rate.  [10000]", FROM_0, metavar="N"
    )
    precision: str | None = option(None, "Compute precision.  [amp; fp32 on the CPU]", click.Choice(PRECISIONS))
    resampled: bool = option(False, "Draw shards with replacement.  [each epoch splits all shards]", is_flag=True)
    exact: bool = option(
        False,
        "Refuse settings whose epochs do not have each sample once, record the samples, and check them at the end.",
        is_flag=True,
    )
    epoch_samples: int | None = option(None, "Samples per epoch.  [as sizes.json says]", COUNT, metavar="N")
    log_every: int = option(20, "Steps between lines of the log.", COUNT, metavar="N")
