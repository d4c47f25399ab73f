"""Logs of MMoCLIP as open_clip writes them: the benchmark's own example, and whole ones that are made up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from embq.training.mmoclip import required

PUBLISHED = """\
2023-04-21,12:03:13 | INFO | Train Epoch: 0 [  16384/3200000 (1%)] Data (t): 90.938 Batch (t): 137.606, 119.065/s, \
3.72078/s/gpu LR: 0.000000 Logit Scale: 14.286 Contrastive_loss: 9.7031 (9.7031) Loss: 9.7031 (9.7031)
2023-04-21,12:03:20 | INFO | Train Epoch: 0 [  32768/3200000 (1%)] Data (t): 0.029 Batch (t): 6.655, 2461.78/s, \
76.9308/s/gpu LR: 0.000000 Logit Scale: 14.286 Contrastive_loss: 9.7031 (9.7031) Loss: 9.7031 (9.7031)
2023-04-21,12:03:26 | INFO | Train Epoch: 0 [  49152/3200000 (2%)] Data (t): 0.034 Batch (t): 6.466, 2533.71/s, \
79.1783/s/gpu LR: 0.000000 Logit Scale: 14.286 Contrastive_loss: 9.7031 (9.7031) Loss: 9.7031 (9.7031)
"""
"""The three lines of the benchmark's description, from 32 A100."""

FIRST_S, NEXT_S = 99.8, 6.46
"""Iteration 1 and the others of a made-up log; the published run's are 99.8 and 6.4614 s."""


def line(number: int, batch_s: float, *, world: int = 32, batch: int = 512, samples: int = required.SAMPLES) -> str:
    """One line as open_clip formats it."""
    total, digits = required.iterations(samples, world, batch), math.ceil(math.log(samples + 1, 10))
    rate, loss = world * batch / batch_s, math.log(world * batch)
    said = f"{loss:#.5g} ({loss:#.5g})"
    return (
        f"2026-01-02,03:04:05 | INFO | Train Epoch: 0 [{number * world * batch:>{digits}}/{samples} "
        f"({100 * number / total:.0f}%)] Data (t): 0.030 Batch (t): {batch_s:.3f}, {rate:#g}/s, "
        f"{rate / world:#g}/s/gpu LR: 0.000000 Logit Scale: 14.286 Contrastive_loss: {said} Loss: {said}"
    )


def whole(*, world: int = 32, batch: int = 512, samples: int = required.SAMPLES, next_s: float = NEXT_S) -> list[str]:
    """All lines of a training."""
    count = required.iterations(samples, world, batch)
    times = [FIRST_S, *[next_s] * (count - 1)]
    return [line(i + 1, s, world=world, batch=batch, samples=samples) for i, s in enumerate(times)]


def params(*, world: int = 32, batch: int = 512, **others: str) -> dict[str, str]:
    """The arguments of a training that is comparable, but for `others`."""
    free = {"world_size": str(world), "batch_size": str(batch), "precision": "amp", "grad_checkpointing": "True"}
    return {**required.VALUES, **required.WHOLE_WORK, **free, "workers": "4", "torchcompile": "False", **others}


def write(folder: Path, lines: Sequence[str], settings: dict[str, str] | None = None) -> Path:
    """The folder of a training, as open_clip leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "out.log").write_text(
        "2026-01-02,03:04:04 | INFO | Start epoch 0\n" + "".join(f"{one}\n" for one in lines)
    )
    if settings is not None:
        (folder / "params.txt").write_text("".join(f"{name}: {settings[name]}\n" for name in sorted(settings)))
    return folder
