"""One training by open_clip: what was asked for, checked, and as flags."""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import ConfigError, InputError, UsageError
from training.openclip.left_out import look_into
from training.openclip.models import LOCAL, Beginning, beginning_of
from training.openclip.own_flags import OwnFlags
from training.openclip.split import Split
from training.shards.counts import Shards, open_shards
from training.shards.sums import contract

if TYPE_CHECKING:
    from training.launch.options import Where

KEYS = "keys"
"""Folder of a training for what each process was trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user says of a training; None and "" leave a setting to open_clip.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A training that may begin.

    Attributes:
        asked: what the user said.
        shards: what it is trained on.
        samples: of an epoch.
        processes: of the training; None where only the hosts know.
        beginning: the model.
        device: "cuda" or "cpu".
        settings: all arguments of open_clip.
        notes: what the user may want to know before it begins.
    """

    asked: Asked
    shards: Shards
    samples: int
    processes: int | None
    beginning: Beginning
    device: str
    settings: argparse.Namespace
    notes: tuple[str, ...]

    def arguments(self) -> list[str]:
        """For `training.openclip`."""
        keys = self.asked.out.absolute() / KEYS if self.asked.exact else None
        flags = _flags(self.asked, self.shards, self.samples, self.beginning, self.device)
        return [*OwnFlags(keys=keys, progress=True).render(), *flags, *self.asked.further]

    def inputs(self) -> tuple[str, ...]:
        """What every host of the training has to reach."""
        model = [self.beginning.name.removeprefix(LOCAL)] if self.beginning.name.startswith(LOCAL) else []
        # Checkpoints are written by the first process alone; the keys of an exact epoch by each.
        out = [str(self.asked.out.absolute())] if self.asked.exact else []
        return (*absolute(self.shards.urls), *model, *out)


def plan(asked: Asked, where: Where) -> Plan:
    """What would be trained, after all checks that can be made without a process of the training.

    Raises ConfigError where the device is not there, InputError and ModelError where open_clip could not train on
    these shards as asked, or would not do what was asked without saying so.
    """
    processes = _processes(where)
    beginning = beginning_of(asked.model)
    shards = open_shards(asked.shards)
    _check_curl(shards)
    samples = _samples(asked, shards)
    flags = _flags(asked, shards, samples, beginning, where.device)
    settings = _settings(flags, _owned(asked, shards, samples, beginning, where.device), asked.further)
    notes = [f"begins with the weights of {beginning.weights}"] if beginning.weights else []
    notes += _look_at_samples(asked, shards)
    _check_split(asked, shards, processes)
    steps = settings.epochs * -(-samples // (settings.batch_size * (processes or 1) * settings.accum_freq))
    if settings.warmup >= steps and not settings.skip_scheduler:
        notes.append(
            f"the learning rate rises over {settings.warmup:,} steps, and the training has about {steps:,}: it never "
            f"gets to --lr {settings.lr:g} (--warmup-steps says otherwise)"
        )
    return Plan(
        asked=asked,
        shards=shards,
        samples=samples,
        processes=processes,
        beginning=beginning,
        device=where.device,
        settings=settings,
        notes=tuple(notes),
    )


def _processes(where: Where) -> int | None:
    """Processes of all hosts; None where a host has as many as it has GPUs."""
    if where.launcher == "local":
        from training.launch.devices import processes_for

        return processes_for(where.device, where.processes)
    if where.processes is None and where.device == "cuda":
        return None
    return (where.processes or 1) * (len(where.hosts) or 1)


def _check_curl(shards: Shards) -> None:
    if any("://" in url for url in shards.urls) and shutil.which("curl") is None:
        raise ConfigError(
            "webdataset reads shards over http by the program curl, which is not on this machine",
            next_step="install curl, or copy the shards here",
        )


def _samples(asked: Asked, shards: Shards) -> int:
    """Samples of an epoch; InputError where nothing says how many there are."""
    if asked.exact and shards.samples is not None and asked.epoch_samples not in (None, shards.samples):
        raise UsageError(
            "--exact is an epoch of all samples, and --epoch-samples another number", next_step="leave one of them out"
        )
    samples = asked.epoch_samples or shards.samples
    if samples is None:
        raise InputError(
            "no sizes.json lies beside the shards, so nothing says how many samples an epoch has",
            next_step="count them once: `embq shards verify FOLDER --write-sizes`; or say it: --epoch-samples N",
        )
    if samples == 0:
        raise InputError("the shards hold no sample", next_step="name shards that do")
    return samples


def _look_at_samples(asked: Asked, shards: Shards) -> list[str]:
    """A note on samples that open_clip leaves out; of the first shard only, unless each sample counts."""
    looked = look_into(shards.urls if asked.exact else shards.urls[:1])
    if not looked.left_out:
        return []
    where = "in all shards" if asked.exact else f"in {shards.urls[0]}"
    if asked.exact or not looked.used:
        raise InputError(
            f"{where}, {looked.sentence()}",
            next_step="convert with captions, and to JPEG: `embq shards convert`"
            + ("; or train without --exact" if asked.exact else ""),
        )
    return [f"{where}, {looked.sentence()}; others are taken twice in their place"]


def _check_split(asked: Asked, shards: Shards, processes: int | None) -> None:
    if asked.exact and asked.resampled:
        raise UsageError("--exact and --resampled exclude each other", next_step="leave one of them out")
    if asked.exact and (processes is None or shards.counts is None):
        missing = "--processes" if processes is None else "a sizes.json beside the shards"
        raise UsageError(f"--exact needs {missing}", next_step="give it, or train without --exact")
    if asked.resampled or processes is None:
        return
    # Without counts the number of shards still tells something.
    counts = shards.counts or (asked.batch_size,) * len(shards.urls)
    split = Split(counts=counts, processes=processes, loader_workers=asked.loader_workers, batch_size=asked.batch_size)
    split.check()
    if asked.exact:
        split.check_exact()


def _flags(asked: Asked, shards: Shards, samples: int, beginning: Beginning, device: str) -> list[str]:
    """Those of open_clip that follow from what was asked."""
    owned = _owned(asked, shards, samples, beginning, device)
    pairs = {**owned, **{f"--{name}": value for name, value in beginning.optimizer.items()}}
    flags = [text for name, value in pairs.items() for text in (name, str(value))]
    return [*flags, "--save-most-recent", *(["--dataset-resampled"] if asked.resampled else [])]


def _owned(asked: Asked, shards: Shards, samples: int, beginning: Beginning, device: str) -> dict[str, object]:
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


def _settings(flags: Sequence[str], owned: Iterable[str], further: Sequence[str]) -> argparse.Namespace:
    """All arguments as open_clip reads them; UsageError where a further flag is none, or says what embq says."""
    ours, settings = vars(_parsed(flags)), _parsed([*flags, *further])
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
