"""The flags of a training by open_clip: those asked for, those derived, and those of embq's entry point."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from embq.core.errors import UsageError
from embq.training.openclip.models import InitialModel
from embq.training.openclip.request import TrainingRequest
from embq.training.shards.names import contract
from embq.training.shards.shard_set import Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFlags:
    """Flags of `python -m embq.training.openclip` that open_clip does not have.

    Attributes:
        keys: folder for the keys of the samples that each rank was trained on; None for nowhere.
        unreadable: folder for what each rank could not read; None for nowhere.
        progress: a line of progress on the terminal, in place of open_clip's log, which its file has anyway.
    """

    keys: Path | None = None
    unreadable: Path | None = None
    progress: bool = False

    def render(self) -> list[str]:
        """The flags as command-line arguments."""
        keys = [] if self.keys is None else ["--keys", str(self.keys)]
        unreadable = [] if self.unreadable is None else ["--unreadable", str(self.unreadable)]
        return [*keys, *unreadable, *(["--progress"] if self.progress else [])]


def split_flags(arguments: Sequence[str]) -> tuple[OwnFlags, list[str]]:
    """(embq's flags, those of open_clip in their order)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--unreadable", type=Path)
    parser.add_argument("--progress", action="store_true")
    own, others = parser.parse_known_args(list(arguments))
    return OwnFlags(keys=own.keys, unreadable=own.unreadable, progress=own.progress), others


UNSUITED = {
    "log_local": "embq reads the one log of the first process",
    "remote_sync": "embq goes on from the checkpoint in --output, and open_clip then does not copy it elsewhere",
}
"""Arguments of open_clip that a training by embq does without, and why."""


def flags_of(asked: TrainingRequest, shards: Shards, samples: int, beginning: InitialModel, device: str) -> list[str]:
    """The flags of open_clip that follow from a request."""
    owned = owned_flags(asked, shards, samples, beginning, device)
    pairs = {**owned, **{f"--{name}": value for name, value in beginning.optimizer.items()}}
    flags = [text for name, value in pairs.items() for text in (name, str(value))]
    return [*flags, "--save-most-recent", *(["--dataset-resampled"] if asked.resampled else [])]


def owned_flags(
    asked: TrainingRequest, shards: Shards, samples: int, beginning: InitialModel, device: str
) -> dict[str, object]:
    """The flags with values that the user cannot set behind --."""
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
    """The URLs with absolute paths, independent of the working folder."""
    return [url if "://" in url else str(Path(url).absolute()) for url in urls]


def settings_of(flags: Sequence[str], owned: Iterable[str], further: Sequence[str]) -> argparse.Namespace:
    """All arguments as open_clip parses them.

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

    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            parsed: argparse.Namespace = parse_args(list(flags))
    except SystemExit as end:
        last = (output.getvalue().strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(
            f"open_clip does not take these flags: {last.partition('error: ')[2] or last}",
            next_step="its flags: python -m open_clip_train.main --help",
        ) from end
    return parsed
