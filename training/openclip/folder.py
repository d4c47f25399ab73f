"""The folder of a training by open_clip: what it was begun with, and that one command at a time trains in it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import OutputError, TryLaterError
from core.storage.durable import overwrite
from training.openclip.checkpoints import CHECKPOINTS, LATEST, bring_forward, epochs_done
from training.openclip.plan import Plan

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
