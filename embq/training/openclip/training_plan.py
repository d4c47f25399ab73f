"""Checks a training by open_clip before it starts, and derives its command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embq.core.errors import InputError, UsageError
from embq.core.redaction import masked
from embq.training.openclip.flags import OwnFlags, absolute, flags_of, owned_flags, settings_of
from embq.training.openclip.models import HUB, LOCAL, InitialModel, initial_model
from embq.training.openclip.request import TrainingRequest
from embq.training.openclip.split import Split
from embq.training.openclip.usable_samples import count_usable
from embq.training.run.folder import RunFolder
from embq.training.shards.shard_set import Shards, open_shards

if TYPE_CHECKING:
    from embq.training.launch.launch_options import Where


RECORD = "training.json"
"""File of a training for the settings it was begun with."""
KEYS = "keys"
"""Folder of a training for what each process was trained on."""
UNREADABLE = "unreadable"
"""Folder of a training for what each process could not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A training that passed all checks.

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

    asked: TrainingRequest
    shards: Shards
    samples: int
    processes: int | None
    beginning: InitialModel
    device: str
    settings: argparse.Namespace
    notes: tuple[str, ...]

    def arguments(self) -> list[str]:
        """Command line of `embq.training.openclip`."""
        out = self.asked.out.absolute()
        own = OwnFlags(keys=out / KEYS if self.asked.exact else None, unreadable=out / UNREADABLE, progress=True)
        flags = flags_of(self.asked, self.shards, self.samples, self.beginning, self.device)
        return [*own.render(), *flags, *self.asked.further]

    def inputs(self) -> tuple[str, ...]:
        """Paths and URLs that every host of the training has to reach."""
        model = [self.beginning.name.removeprefix(LOCAL)] if self.beginning.name.startswith(LOCAL) else []
        # Checkpoints are written by the first process alone; the keys of an exact epoch by each.
        out = [str(self.asked.out.absolute())] if self.asked.exact else []
        return (*absolute(self.shards.urls), *model, *out)


def plan(asked: TrainingRequest, where: Where) -> Plan:
    """Make all checks that need no process of the training.

    Raises ConfigError where the device is not there, InputError and ModelError where open_clip could not train on
    these shards as asked, or would not do what was asked without saying so.
    """
    processes = _processes(where)
    beginning = initial_model(begun_with(asked.out, asked.model))
    shards = open_shards(asked.shards)
    samples = _samples(asked, shards)
    flags = flags_of(asked, shards, samples, beginning, where.device)
    settings = settings_of(flags, owned_flags(asked, shards, samples, beginning, where.device), asked.further)
    secrets = [name for name, value in vars(settings).items() if masked(str(value)) != str(value)]
    if secrets and any(name in settings.report_to for name in ("wandb", "all")):  # as open_clip looks for them
        raise UsageError(
            f"--{secrets[0].replace('_', '-')} has a secret, and wandb is sent all settings",
            next_step="name a URL without a secret, or leave --report-to wandb out",
            code="secret_in_url",
        )
    notes = [f"begins with the weights of {beginning.weights}"] if beginning.weights else []
    notes += _look_at_samples(asked, shards)
    _check_split(asked, shards, processes, settings.accum_freq)
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


def begun_with(out: Path, model: str) -> str:
    """A name of the hub with the commit with which the training in `out` was begun; others as they are."""
    record = RunFolder(out, RECORD).read_record() if model.startswith(HUB) and out.is_dir() else None
    then = str((record or {}).get("model"))
    return then if then.startswith(f"{model}@") else model


def _processes(where: Where) -> int | None:
    """Processes of all hosts; None where each host has one per GPU."""
    if where.launcher == "local":
        from embq.training.launch.devices import processes_for

        return processes_for(where.device, where.processes)
    if where.processes is None and where.device == "cuda":
        return None
    return (where.processes or 1) * (len(where.hosts) or 1)


def _samples(asked: TrainingRequest, shards: Shards) -> int:
    """Samples of an epoch; InputError where they are not known."""
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


def _look_at_samples(asked: TrainingRequest, shards: Shards) -> list[str]:
    """A note on samples that open_clip leaves out; of the first shard only, unless the training is exact."""
    looked = count_usable(shards.urls if asked.exact else shards.urls[:1])
    is_whole = asked.exact and not any("://" in url for url in shards.urls)
    if is_whole and shards.samples is not None and looked.samples != shards.samples:
        raise InputError(
            f"the shards hold {looked.samples:,} samples, and the sizes.json beside them says {shards.samples:,}",
            code="sizes_differ",
            next_step="count them again: `embq shards verify FOLDER --write-sizes`",
        )
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


def _check_split(asked: TrainingRequest, shards: Shards, processes: int | None, batches_of_a_step: int) -> None:
    if asked.exact and asked.resampled:
        raise UsageError("--exact and --resampled exclude each other", next_step="leave one of them out")
    if asked.exact and shards.counts is None:
        raise UsageError(
            "--exact needs a sizes.json beside the shards",
            next_step="count them once: `embq shards verify FOLDER --write-sizes`; or train without --exact",
        )
    if asked.exact and processes is None:
        raise UsageError("--exact needs --num-devices", next_step="give it, or train without --exact")
    if asked.resampled or processes is None:
        return
    # Without counts the number of shards still tells something.
    counts = shards.counts or (asked.batch_size,) * len(shards.urls)
    split = Split(counts=counts, processes=processes, loader_workers=asked.loader_workers, batch_size=asked.batch_size)
    if not asked.exact:
        split.check()
        return
    split.check_exact()
    batches = sum(counts) // (processes * asked.batch_size)
    if left := batches % batches_of_a_step:
        raise InputError(
            f"--exact: of the {batches:,} batches of a process, --accum-freq {batches_of_a_step} leaves the last "
            f"{left:,} without a step",
            next_step=f"an --accum-freq that divides {batches:,}, or another --batch-size",
        )
