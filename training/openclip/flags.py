"""The flags of open_clip that follow from what was asked, and all its arguments as it reads them."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from core.errors import UsageError
from training.openclip.asked import Asked
from training.openclip.models import Beginning
from training.shards.counts import Shards
from training.shards.sums import contract

UNSUITED = {
    "log_local": "embq reads the one log of the first process",
    "remote_sync": "embq goes on from the checkpoint in --out, and open_clip then does not copy it elsewhere",
}
"""Arguments of open_clip that a training by embq does without, and why."""


def flags_of(asked: Asked, shards: Shards, samples: int, beginning: Beginning, device: str) -> list[str]:
    """Those of open_clip that follow from what was asked."""
    owned = owned_flags(asked, shards, samples, beginning, device)
    pairs = {**owned, **{f"--{name}": value for name, value in beginning.optimizer.items()}}
    flags = [text for name, value in pairs.items() for text in (name, str(value))]
    return [*flags, "--save-most-recent", *(["--dataset-resampled"] if asked.resampled else [])]


def owned_flags(asked: Asked, shards: Shards, samples: int, beginning: Beginning, device: str) -> dict[str, object]:
    """The flags with a value that nobody but embq says."""
    out = asked.out.absolute()
    return {
        "--train-data": "::".join(run.expression for run in contract(absolute(shards.urls))),
        "--dataset-type": "webdataset",
        "--train-num-samples": samples,
        "--model": beginning.name,
        "--logs": out.parent,
        "--name": out.name,
        "--epochs": asked.epochs,
        "--batch-size": asked.batch_size,
        "--workers": asked.loader_workers,
        "--precision": asked.precision or ("fp32" if device == "cpu" else "amp"),
        "--device": device,
        "--log-every-n-steps": asked.log_every,
        # A restart of all processes, and the same command again, go on where the last epoch ended.
        "--resume": "latest",
        **({} if asked.lr is None else {"--lr": asked.lr}),
        **({} if asked.warmup_steps is None else {"--warmup": asked.warmup_steps}),
    }


def absolute(urls: Sequence[str]) -> list[str]:
    """The URLs as the training reads them, wherever its processes run."""
    return [url if "://" in url else str(Path(url).absolute()) for url in urls]


def settings_of(flags: Sequence[str], owned: Iterable[str], further: Sequence[str]) -> argparse.Namespace:
    """All arguments as open_clip reads them.

    Raises UsageError where a further flag is none, says what embq says, or does not suit embq.
    """
    ours, settings = vars(_parsed(flags)), _parsed([*flags, *further])
    for name, why in UNSUITED.items():
        if getattr(settings, name):
            raise UsageError(f"--{name.replace('_', '-')} does not suit embq: {why}", next_step="leave it out")
    for flag in (*owned, "--dataset-resampled"):
        name = flag.removeprefix("--").replace("-", "_")
        if ours[name] != getattr(settings, name):
            raise UsageError(
                f"{flag} is for embq to say, which gives {ours[name]}",
                next_step="leave it out behind the --, and see embq train openclip --help for the option that sets it",
            )
    return settings


def _parsed(flags: Sequence[str]) -> argparse.Namespace:
    from open_clip_train.params import parse_args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parsed: argparse.Namespace = parse_args(list(flags))
    except SystemExit as end:
        last = (said.getvalue().strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(
            f"open_clip does not take these flags: {last.partition('error: ')[2] or last}",
            next_step="its flags: python -m open_clip_train.main --help",
        ) from end
    return parsed
