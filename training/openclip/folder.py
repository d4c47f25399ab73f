"""The folder of a training by open_clip: what it was begun with, and that one command at a time trains in it."""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import OutputError, TryLaterError
from core.storage.durable import overwrite
from training.openclip.checkpoints import CHECKPOINTS, LATEST, bring_forward, epochs_done
from training.openclip.flags import absolute
from training.openclip.log import parse
from training.openclip.open_clip_patches import noted
from training.openclip.plan import KEYS, UNREADABLE, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a training came to.

    Attributes:
        epochs: that are over.
        samples_per_s: of all processes, without the first iteration; None where there were fewer than two.
        unreadable: shards, and members of shards, that a process could not read, in this start or an earlier one.
        unheard: processes of which nobody here knows what they could not read: their host has another --out.
        inexact: for each epoch of an exact training that was none, why.
    """

    epochs: int
    samples_per_s: float | None
    unreadable: tuple[str, ...]
    unheard: int
    inexact: tuple[str, ...]


def result_of(plan: Plan, begun: Begun) -> Result:
    """Look at what a training left, after its last process has ended; OutputError where it left it somewhere else."""
    log = begun.folder / LOG
    try:
        written = log.read_bytes()
    except FileNotFoundError as error:
        raise OutputError(
            f"the training is over, and its log is not {log}: the first host has another {begun.folder}",
            next_step="look there for its checkpoints; an --out that all hosts share with this machine has them here",
        ) from error
    now, ever = (
        parse(log, part.decode(errors="replace").splitlines()) for part in (written[begun.log_bytes :], written)
    )
    iterations = now.iterations[1:]
    heard, unreadable = noted(begun.folder / UNREADABLE)
    epochs = range(plan.settings.epochs) if plan.asked.exact else ()
    return Result(
        epochs=epochs_done(begun.folder),
        samples_per_s=sum(one.per_s for one in iterations) / len(iterations) if iterations else None,
        unreadable=tuple(f"{shard} {member}".rstrip() for shard, member in unreadable),
        unheard=max(0, int(ever.settings.get("world_size", 1)) - heard),
        inexact=tuple(said for epoch in epochs if (said := _inexact(plan, begun.folder / KEYS, epoch))),
    )


def _inexact(plan: Plan, folder: Path, epoch: int) -> str:
    """Why an epoch had not each sample once, by what every process wrote down; "" where it had."""
    seen: Counter[str] = Counter()
    for path in folder.glob(f"epoch-{epoch}-rank-*.txt"):
        seen.update(path.read_text(encoding="utf-8").splitlines())
    again = [line for line, times in seen.items() if times > 1]
    missing = plan.samples - len(seen)
    if not missing and not again:
        return ""
    of_shards = Counter(line.partition("\t")[0] for line in seen)
    expected = zip(absolute(plan.shards.urls), plan.shards.counts or (), strict=True)
    short = [f"{os.path.basename(url)} ({lack:,})" for url, count in expected if (lack := count - of_shards[url])]
    return (
        f"epoch {epoch + 1}: {missing:,} samples were not trained on, and {len(again):,} more than once; "
        f"missing of {', '.join(short[:5]) or 'no shard'}"
    )


BEGUN = "training.json"
LOG = "out.log"
_PLACES = {"logs", "name", "train_data", "model", "resume", "cache_dir", "device", "workers"}
_WATCHING = {"debug", "log_every_n_steps", "log_local", "report_to", "wandb_notes", "wandb_project_name"}
_VALIDATION = {"val_data", "val_num_samples", "val_frequency", "imagenet_val", "imagenet_v2", "zeroshot_frequency"}
_CHECKPOINTS = {"save_frequency", "delete_previous_checkpoint", "copy_codebase", "grad_checkpointing"}
_NETWORK = {"dist_url", "dist_backend", "no_set_device_rank"}
FREE = _PLACES | _WATCHING | _VALIDATION | _CHECKPOINTS | _NETWORK
"""Arguments that may be others when a training goes on: they change nothing of what is learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A training's folder that is ours until the block ends.

    Attributes:
        folder: its path.
        epochs_done: that an earlier start of the same training has ended.
        log_bytes: length of its log before this start.
    """

    folder: Path
    epochs_done: int
    log_bytes: int

    @property
    def latest(self) -> Path:
        """The checkpoint from which open_clip goes on, where it is there."""
        return self.folder / CHECKPOINTS / LATEST


@contextmanager
def begin(plan: Plan) -> Iterator[Begun]:
    """Make the folder of a training, or take up the one that the same command has made before.

    Raises OutputError where it holds anything else, TryLaterError where another process trains in it.
    """
    folder = plan.asked.out
    content = _description(plan)
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file", next_step="name a folder for --out")
    if not (folder / BEGUN).exists():
        if folder.is_dir() and any(folder.iterdir()):
            raise OutputError(
                f"{folder} is not empty, and holds no training of embq", next_step="name a new folder: --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        overwrite(folder / BEGUN, _encoded(content), temporary=folder / f".{BEGUN}.{os.getpid()}")
    with open(folder / BEGUN, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TryLaterError(
                f"another process trains in {folder}", next_step="wait for it, or name another --out"
            ) from error
        _check_same(folder, json.load(file), content)
        bring_forward(folder)
        log = folder / LOG
        yield Begun(
            folder=folder,
            epochs_done=epochs_done(folder),
            log_bytes=log.stat().st_size if log.exists() else 0,
        )


def _description(plan: Plan) -> dict[str, Any]:
    settings = {name: value for name, value in vars(plan.settings).items() if name not in FREE}
    return {
        "schema": 1,
        "shards": plan.shards.digest,
        "model": plan.asked.model,
        "processes": plan.processes,
        "exact": plan.asked.exact,
        "settings": settings,
    }


def _encoded(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _check_same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """OutputError naming the first setting that is another one."""
    then, asked = ({**content, **content["settings"]} for content in (before, json.loads(_encoded(now))))
    for name in ("shards", "model", "processes", "exact", *sorted(now["settings"])):
        if then.get(name) != asked[name]:
            told = "other shards" if name == "shards" else f"{name} {then.get(name)!r}, now {asked[name]!r}"
            raise OutputError(
                f"{folder} holds a training with other settings: {told}",
                next_step="name another --out, or give the settings of the one that is there, with which it goes on",
                code="other_run",
            )
