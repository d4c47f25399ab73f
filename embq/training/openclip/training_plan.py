"""Checks a training by open_clip before it starts, and derives its flags: those asked for, and those that follow."""

from __future__ import annotations

import argparse
import contextlib
import io
import mmap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from embq.core.errors import InputError, UsageError
from embq.core.redaction import masked
from embq.core.storage.paths import is_url
from embq.sources.access.files import source_errors
from embq.sources.formats.compressed import beginning
from embq.sources.formats.tar import LOOKED_AT_BYTES, SUFFIX, TarSource, split_name
from embq.sources.formats.tar_headers import TarMember, parse_first_members, parse_members
from embq.sources.reader_options import ReadOptions
from embq.training.openclip.models import HUB, LOCAL, InitialModel, initial_model
from embq.training.openclip.request import TrainingRequest
from embq.training.openclip.split import Split
from embq.training.run.folder import RunFolder
from embq.training.shards.names import contract
from embq.training.shards.shard_set import Shards, open_shards

if TYPE_CHECKING:
    from embq.training.launch.launch_options import Where


RECORD = "training.json"
"""File of a training for the settings it was begun with."""
KEYS = "keys"
"""Folder of a training for what each process was trained on."""
UNREADABLE = "unreadable"
"""Folder of a training for what each process could not read."""

IMAGES = frozenset({"png", "jpg", "jpeg", "webp"})
CAPTION = "txt"
"""Extensions by which `filter_no_caption_or_no_image` of open_clip_train/data.py chooses samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A training that passed all checks.

    Attributes:
        request: what the user asked for.
        shards: what it is trained on.
        samples: of an epoch.
        processes: of the training; None if only the hosts know.
        beginning: the model.
        device: "cuda" or "cpu".
        flags: of open_clip, without those of the user.
        settings: all arguments of open_clip.
        notes: what the user may want to know before it begins.
    """

    request: TrainingRequest
    shards: Shards
    samples: int
    processes: int | None
    beginning: InitialModel
    device: str
    flags: Sequence[str]
    settings: argparse.Namespace
    notes: tuple[str, ...]

    def arguments(self) -> list[str]:
        """Command line of `embq.training.openclip`."""
        out = self.request.out.absolute()
        keys = ["--keys", str(out / KEYS)] if self.request.exact else []
        return [*keys, "--unreadable", str(out / UNREADABLE), "--progress", *self.flags, *self.request.further]

    def inputs(self) -> tuple[str, ...]:
        """Paths and URLs that every host of the training has to reach."""
        model = [self.beginning.name.removeprefix(LOCAL)] if self.beginning.name.startswith(LOCAL) else []
        # Checkpoints are written by the first process alone; the keys of an exact epoch by each.
        out = [str(self.request.out.absolute())] if self.request.exact else []
        return (*absolute(self.shards.urls), *model, *out)


def plan(request: TrainingRequest, where: Where) -> TrainingPlan:
    """Make all checks that need no process of the training.

    Raises ConfigError if the device is not there, InputError and ModelError if open_clip could not train on
    these shards as asked, or would not do what was asked without saying so.
    """
    processes = _processes(where)
    beginning = initial_model(begun_with(request.out, request.model))
    shards = open_shards(request.shards)
    samples = shards.epoch_samples(request.epoch_samples, "--exact" if request.exact else "")
    owned = owned_flags(request, shards, samples, beginning, where.device)
    flags = flags_of(request, owned, beginning)
    settings = settings_of(flags, owned, request.further)
    secrets = [name for name, value in vars(settings).items() if masked(str(value)) != str(value)]
    if secrets and any(name in settings.report_to for name in ("wandb", "all")):  # as open_clip looks for them
        raise UsageError(
            f"--{secrets[0].replace('_', '-')} has a secret, and wandb is sent all settings",
            next_step="name a URL without a secret, or leave --report-to wandb out",
            code="secret_in_url",
        )
    notes = [f"begins with the weights of {beginning.weights}"] if beginning.weights else []
    notes += _look_at_samples(request, shards)
    _check_split(request, shards, processes, settings.accum_freq)
    steps = settings.epochs * -(-samples // (settings.batch_size * (processes or 1) * settings.accum_freq))
    if settings.warmup >= steps and not settings.skip_scheduler:
        notes.append(
            f"the learning rate rises over {settings.warmup:,} steps, and the training has about {steps:,}: it never "
            f"gets to --lr {settings.lr:g} (--warmup-steps says otherwise)"
        )
    return TrainingPlan(
        request=request,
        shards=shards,
        samples=samples,
        processes=processes,
        beginning=beginning,
        device=where.device,
        flags=flags,
        settings=settings,
        notes=tuple(notes),
    )


def split_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Flags of `python -m embq.training.openclip` that open_clip does not have, and those of open_clip in their order.

    Of the former, `keys` is the folder for the keys of the samples that each rank was trained on, `unreadable` that for
    what each rank could not read, each None for nowhere; `progress` shows a line of progress on the terminal, in place
    of open_clip's log, which its file has anyway.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--unreadable", type=Path)
    parser.add_argument("--progress", action="store_true")
    return parser.parse_known_args(list(arguments))


UNSUITED = {
    "log_local": "embq reads the one log of the first process",
    "remote_sync": "embq goes on from the checkpoint in --output, and open_clip then does not copy it elsewhere",
}
"""Arguments of open_clip that a training by embq does without, and why."""


def flags_of(request: TrainingRequest, owned: Mapping[str, object], beginning: InitialModel) -> list[str]:
    """The flags of open_clip that follow from a request.

    Args:
        owned: see `owned_flags`.
    """
    pairs = {**owned, **{f"--{name}": value for name, value in beginning.optimizer.items()}}
    flags = [text for name, value in pairs.items() for text in (name, str(value))]
    return [*flags, "--save-most-recent", *(["--dataset-resampled"] if request.resampled else [])]


def owned_flags(
    request: TrainingRequest, shards: Shards, samples: int, beginning: InitialModel, device: str
) -> dict[str, object]:
    """The flags with values that the user cannot set behind --."""
    out = request.out.absolute()
    return {
        "--train-data": "::".join(run.expression for run in contract(absolute(shards.urls))),
        "--dataset-type": "webdataset",
        "--train-num-samples": samples,
        "--model": beginning.name,
        "--logs": out.parent,
        "--name": out.name,
        "--epochs": request.epochs,
        "--batch-size": request.batch_size,
        "--workers": request.loader_workers,
        "--precision": request.precision or ("fp32" if device == "cpu" else "amp"),
        "--device": device,
        "--log-every-n-steps": request.log_every,
        # A restart of all processes, and the same command again, go on where the last epoch ended.
        "--resume": "latest",
        **({} if request.lr is None else {"--lr": request.lr}),
        **({} if request.warmup_steps is None else {"--warmup": request.warmup_steps}),
    }


def absolute(urls: Sequence[str]) -> list[str]:
    """The URLs with absolute paths, independent of the working folder."""
    return [url if "://" in url else str(Path(url).absolute()) for url in urls]


def settings_of(flags: Sequence[str], owned: Iterable[str], further: Sequence[str]) -> argparse.Namespace:
    """All arguments as open_clip parses them.

    Raises UsageError if a further flag is none, says what embq says, or does not suit embq.
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


def begun_with(out: Path, model: str) -> str:
    """A name of the hub with the commit with which the training in `out` was begun; others as they are."""
    record = RunFolder(out, RECORD).read_record() if model.startswith(HUB) and out.is_dir() else None
    then = str((record or {}).get("model"))
    return then if then.startswith(f"{model}@") else model


def _processes(where: Where) -> int | None:
    """Processes of all hosts; None if each host has one per GPU."""
    if where.launcher == "local":
        from embq.training.launch.devices import processes_for

        return processes_for(where.device, where.processes)
    if where.processes is None and where.device == "cuda":
        return None
    return (where.processes or 1) * (len(where.hosts) or 1)


def _look_at_samples(request: TrainingRequest, shards: Shards) -> list[str]:
    """A note on samples that open_clip leaves out; of the first shard only, unless the training is exact."""
    looked = count_usable(shards.urls if request.exact else shards.urls[:1])
    is_whole = request.exact and not any("://" in url for url in shards.urls)
    if is_whole and shards.samples is not None and looked.samples != shards.samples:
        raise InputError(
            f"the shards hold {looked.samples:,} samples, and the sizes.json beside them says {shards.samples:,}",
            code="sizes_differ",
            next_step="count them again: `embq shards verify FOLDER --write-sizes`",
        )
    if not looked.left_out:
        return []
    where = "in all shards" if request.exact else f"in {shards.urls[0]}"
    if request.exact or not looked.used:
        raise InputError(
            f"{where}, {looked.sentence()}",
            next_step="convert with captions, and to JPEG: `embq shards convert`"
            + ("; or train without --exact" if request.exact else ""),
        )
    return [f"{where}, {looked.sentence()}; others are taken twice in their place"]


def _check_split(request: TrainingRequest, shards: Shards, processes: int | None, batches_of_a_step: int) -> None:
    if request.exact and request.resampled:
        raise UsageError("--exact and --resampled exclude each other", next_step="leave one of them out")
    if request.exact and shards.counts is None:
        raise UsageError(
            "--exact needs a sizes.json beside the shards",
            next_step="count them once: `embq shards verify FOLDER --write-sizes`; or train without --exact",
        )
    if request.exact and processes is None:
        raise UsageError("--exact needs --num-devices", next_step="give it, or train without --exact")
    if request.resampled or processes is None:
        return
    # Without counts the number of shards still tells something.
    counts = shards.counts or (request.batch_size,) * len(shards.urls)
    split = Split(
        counts=counts, processes=processes, loader_workers=request.loader_workers, batch_size=request.batch_size
    )
    if not request.exact:
        split.check()
        return
    split.check_exact()
    batches = sum(counts) // (processes * request.batch_size)
    if remainder := batches % batches_of_a_step:
        raise InputError(
            f"--exact: of the {batches:,} batches of a process, --accum-freq {batches_of_a_step} leaves the last "
            f"{remainder:,} without a step",
            next_step=f"an --accum-freq that divides {batches:,}, or another --batch-size",
        )


@dataclass(slots=True, kw_only=True)
class UsableSamples:
    """Counts of samples in shards, and of those that open_clip silently leaves out.

    Attributes:
        samples: all of them.
        used: those with a caption and an image that open_clip takes.
        without_caption: samples of which no member ends in `.txt`.
        extensions: what samples without such an image have instead.
    """

    samples: int = 0
    used: int = 0
    without_caption: int = 0
    extensions: Counter[str] = field(default_factory=Counter)

    @property
    def left_out(self) -> int:
        """Samples that are not trained on."""
        return self.samples - self.used

    def sentence(self) -> str:
        """Reasons for samples that are left out, as a sentence."""
        reasons = [f"{self.without_caption:,} without a caption (.{CAPTION})"] if self.without_caption else []
        if self.extensions:
            kinds = ", ".join(f".{kind}" for kind, _ in self.extensions.most_common(5))
            reasons.append(f"{self.extensions.total():,} without a .jpg, .jpeg, .png or .webp (they have {kinds})")
        return f"{self.left_out:,} of {self.samples:,} samples are left out by open_clip: {' and '.join(reasons)}"

    def scan(self, members: Iterable[TarMember]) -> None:
        """Count the samples of members: neighbours with one key, as open_clip groups them."""
        key, extensions = "", set[str]()
        for member in members:
            own, extension = split_name(member.name)
            if not own:
                continue
            if own != key or extension in extensions:
                self._count(extensions)
                key, extensions = own, set()
            extensions.add(extension)
        self._count(extensions)

    def _count(self, extensions: set[str]) -> None:
        if not extensions:
            return
        self.samples += 1
        has_image = not IMAGES.isdisjoint(extensions)
        self.used += has_image and CAPTION in extensions
        self.without_caption += CAPTION not in extensions
        if not has_image:
            self.extensions[min(extensions - {CAPTION, "json", "cls"}, default="none")] += 1


def count_usable(urls: Iterable[str]) -> UsableSamples:
    """Count samples: all of a plain local shard, those at the beginning of any other.

    Raises SourceError if one is damaged or cannot be read.
    """
    looked = UsableSamples()
    for url in urls:
        looked.scan(_members(url))
    return looked


def _members(url: str) -> list[TarMember]:
    if is_url(url) or not url.endswith(SUFFIX):
        (unit,) = TarSource().split(url, ReadOptions())
        first = beginning(unit, LOOKED_AT_BYTES)
        members = parse_first_members(first)
        if len(first) < LOOKED_AT_BYTES or not members:
            return members
        cut = split_name(members[-1].name)[0]  # of which more may follow
        return [member for member in members if split_name(member.name)[0] != cut]
    with source_errors(url), open(url, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return parse_members(data, url)
