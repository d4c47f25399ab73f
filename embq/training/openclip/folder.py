"""The folder of a training by open_clip: the settings it was begun with, its lock, and its result."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embq.core.errors import OutputError
from embq.core.storage.beneath import open_regular, read_small
from embq.training.openclip.checkpoints import CHECKPOINTS, LATEST, bring_forward, epochs_done
from embq.training.openclip.log import parse
from embq.training.openclip.models import HUB
from embq.training.openclip.training_plan import KEYS, RECORD, UNREADABLE, TrainingPlan, absolute
from embq.training.run.folder import RunFolder

LOG = "out.log"
_PLACES = {"logs", "name", "train_data", "model", "resume", "cache_dir", "device", "workers"}
_WATCHING = {"debug", "log_every_n_steps", "log_local", "report_to", "wandb_notes", "wandb_project_name"}
_VALIDATION = {"val_data", "val_num_samples", "val_frequency", "imagenet_val", "imagenet_v2", "zeroshot_frequency"}
_CHECKPOINTS = {"save_frequency", "delete_previous_checkpoint", "copy_codebase", "grad_checkpointing"}
_NETWORK = {"dist_url", "dist_backend", "no_set_device_rank"}
FREE = _PLACES | _WATCHING | _VALIDATION | _CHECKPOINTS | _NETWORK
"""Arguments of open_clip that may change when a training is resumed: nothing of what is learnt depends on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedFolder:
    """The locked folder of a training.

    Attributes:
        folder: its path.
        epochs_done: epochs that earlier starts of the training have finished.
        log_bytes: length of its log before this start.
    """

    folder: Path
    epochs_done: int
    log_bytes: int

    @property
    def latest(self) -> Path:
        """The checkpoint from which open_clip resumes, if it is there."""
        return self.folder / CHECKPOINTS / LATEST


@contextmanager
def begin(plan: TrainingPlan) -> Iterator[LockedFolder]:
    """Create the folder of a training, or resume the training in it, and hold it for the block.

    Raises OutputError if it holds anything else, TryLaterError if another process trains in it.
    """
    folder = RunFolder(plan.request.out, RECORD)
    root = folder.root
    folder.read_record()  # before the lock is written into it
    with folder.locked():
        settings = _settings(plan)
        recorded = folder.read_record()
        if recorded is None:
            folder.write_record(settings)
        else:
            _check_same(root, recorded, settings)
        bring_forward(root)
        log = root / LOG
        yield LockedFolder(
            folder=root, epochs_done=epochs_done(root), log_bytes=log.stat().st_size if log.exists() else 0
        )


def _settings(plan: TrainingPlan) -> dict[str, Any]:
    """The settings that decide what is learnt, as JSON has them."""
    settings = {name: value for name, value in vars(plan.settings).items() if name not in FREE}
    content: dict[str, Any] = json.loads(
        json.dumps(
            {
                "schema": 1,
                "shards": plan.shards.digest,
                "model": plan.beginning.name if plan.request.model.startswith(HUB) else plan.request.model,
                "processes": plan.processes,
                "exact": plan.request.exact,
                "settings": settings,
            }
        )
    )
    return content


def _check_same(folder: Path, recorded: dict[str, Any], now: dict[str, Any]) -> None:
    """OutputError that names the first setting with another value."""
    old, new = ({**content, **content["settings"]} for content in (recorded, now))
    for name in ("shards", "model", "processes", "exact", *sorted(now["settings"])):
        if old.get(name) != new[name]:
            change = "other shards" if name == "shards" else f"{name} {old.get(name)!r}, now {new[name]!r}"
            raise OutputError(
                f"{folder} holds a training with other settings: {change}",
                next_step="name another --output, or give the settings of the one that is there, with which it goes on",
                code="other_run",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """A finished training.

    Attributes:
        epochs: finished epochs.
        samples_per_s: of all processes, without the first iteration; None if there were fewer than two.
        unreadable: shards, and members of shards, that a process could not read since the training was begun.
        unheard: processes whose record of unreadable samples is on a host with another --output.
        inexact: reasons why epochs of an exact training were not exact.
    """

    epochs: int
    samples_per_s: float | None
    unreadable: tuple[str, ...]
    unheard: int
    inexact: tuple[str, ...]


def result_of(plan: TrainingPlan, begun: LockedFolder) -> TrainingResult:
    """The result of a training whose processes have ended; OutputError if its files lie on another host."""
    log = begun.folder / LOG
    try:
        written = read_small(log, most_bytes=1 << 30)
    except FileNotFoundError as error:
        raise OutputError(
            f"the training is over, and its log is not {log}: the first host has another {begun.folder}",
            next_step="look there for its checkpoints, or share --output between all hosts and this machine",
        ) from error
    now, ever = (
        parse(log, part.decode(errors="replace").splitlines()) for part in (written[begun.log_bytes :], written)
    )
    iterations = now.iterations[1:]
    reporting, unreadable = noted(begun.folder / UNREADABLE)
    epochs = range(plan.settings.epochs) if plan.request.exact else ()
    return TrainingResult(
        epochs=epochs_done(begun.folder),
        samples_per_s=sum(iteration.per_s for iteration in iterations) / len(iterations) if iterations else None,
        unreadable=tuple(f"{shard} {member}".rstrip() for shard, member in unreadable),
        unheard=max(0, int(ever.settings.get("world_size", 1)) - reporting),
        inexact=tuple(why for epoch in epochs if (why := _inexact(plan, begun.folder / KEYS, epoch))),
    )


def noted(folder: Path) -> tuple[int, list[tuple[str, str]]]:
    """(number of ranks with a record, sorted shards and members that could not be read)."""
    files = [read_small(path).decode(errors="replace") for path in folder.glob("rank-*.txt")]
    unreadable = {
        (shard, member) for text in files for line in text.splitlines() for shard, _, member in [line.partition("\t")]
    }
    return len(files), sorted(unreadable)


def _inexact(plan: TrainingPlan, folder: Path, epoch: int) -> str:
    """Reason why an epoch did not have each sample once, by the recorded keys; "" if it did."""
    counts: Counter[str] = Counter()
    for path in folder.glob(f"epoch-{epoch}-rank-*.txt"):
        with open_regular(path) as file:
            counts.update(line.decode().rstrip("\n") for line in file)
    again = [line for line, times in counts.items() if times > 1]
    missing = plan.samples - len(counts)
    if not missing and not again:
        return ""
    of_shards = Counter(line.partition("\t")[0] for line in counts)
    expected = zip(absolute(plan.shards.urls), plan.shards.counts or (), strict=True)
    short = [f"{os.path.basename(url)} ({lack:,})" for url, count in expected if (lack := count - of_shards[url])]
    return (
        f"epoch {epoch + 1}: {missing:,} samples were not trained on, and {len(again):,} more than once; "
        f"missing of {', '.join(short[:5]) or 'no shard'}"
    )
