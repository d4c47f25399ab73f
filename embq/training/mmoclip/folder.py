"""Finds the log of a training, and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embq.core.errors import InputError
from embq.core.storage.beneath import read_small
from embq.training.openclip import log
from embq.training.openclip.log import OpenClipLog

LOG = "out.log"
PARAMS = "params.txt"
LAUNCH = "launch.json"
"""Note of `embq bench mmoclip` on nodes, GPUs and versions of a training, which its log lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training, as its folder has it."""

    log: OpenClipLog
    params: Mapping[str, str] = field(default_factory=dict)
    """The lines of `params.txt`; empty if it is not there."""
    launch: Mapping[str, Any] = field(default_factory=dict)
    """The note of its launch; empty if embq did not launch it."""

    @property
    def settings(self) -> Mapping[str, str]:
        """The training's arguments, from `params.txt` or else from the log."""
        return self.params or self.log.settings


def find(place: Path) -> Training:
    """The training of a folder or a log.

    Args:
        place: a log; the folder of one (`logs/test`); or any folder above that holds one log, such as the one that
            `embq bench mmoclip` made.

    Raises:
        InputError: there is no log, or more than one.
    """
    path = place if place.is_file() else _log_below(place)
    params = path.with_name(PARAMS)
    return Training(
        log=log.read(path),
        params=_params(params) if path.name == LOG and params.is_file() else {},
        launch=_launch(path),
    )


def _log_below(folder: Path) -> Path:
    if not folder.is_dir():
        raise InputError(
            f"there is no log {folder}", next_step=f"name a file such as logs/test/{LOG}, or the folder that holds it"
        )
    if (folder / LOG).is_file():
        return folder / LOG
    logs = sorted(folder.rglob(LOG))
    if not logs:
        raise InputError(
            f"{folder} holds no {LOG}",
            next_step=f"name the folder that holds logs/test/{LOG}; `embq bench mmoclip` without a folder trains",
        )
    if len(logs) > 1:
        raise InputError(
            f"{folder} holds {len(logs)} logs: {', '.join(str(path.parent.relative_to(folder)) for path in logs[:4])}",
            next_step="name one of them, or several folders, which are then compared",
        )
    return logs[0]


def _params(path: Path) -> dict[str, str]:
    try:
        lines = read_small(path).decode(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split(": ", 1) for line in lines)
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _launch(path: Path) -> dict[str, Any]:
    """The note of `embq bench mmoclip` beside `logs/`; empty without one."""
    for folder in list(path.parents)[:3]:
        if (folder / LAUNCH).is_file():
            try:
                note = json.loads(read_small(folder / LAUNCH))
            except (OSError, ValueError, RecursionError):
                return {}
            return note if isinstance(note, dict) and note.get("schema") == 1 else {}
    return {}
