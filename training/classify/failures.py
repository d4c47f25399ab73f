"""Samples that could not be read: each in failures.jsonl once, and the end of a training that has too many of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import InputError
from training.classify.checkpoint import listed
from training.run.folder import append, writing
from training.run.journal import lines

if TYPE_CHECKING:
    from training.data.batch import Failure


class FailureList:
    """The file failures.jsonl, a line for each sample: shard, key, code, message, samples.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = {(line["shard"], line["key"], line["code"]): int(line["samples"]) for line in lines(path)}

    def add(self, failures: Sequence[Failure]) -> None:
        """Note those that are new."""
        new = {(one.shard, one.key, one.code): one for one in failures}
        new = {key: one for key, one in new.items() if key not in self._known}
        if not new:
            return
        data = b"".join(json.dumps(asdict(one)).encode() + b"\n" for one in new.values())
        with writing(self._path), open(self._path, "ab", buffering=0) as file:
            append(file, b"\n" + data if _is_cut(self._path) else data)
        self._known.update({key: one.samples for key, one in new.items()})

    @property
    def samples(self) -> int:
        """How many samples failed, each counted once however many epochs it failed in."""
        return sum(self._known.values())


def _is_cut(path: Path) -> bool:
    """Whether the last line has no end, because the disk was full."""
    data = path.read_bytes()
    return bool(data) and not data.endswith(b"\n")


def check_limit(
    failures: Sequence[Failure], failed: int, samples: int, part: float, path: Path, *, of: str = "an epoch"
) -> None:
    """InputError where more of an epoch's samples failed than may.

    Args:
        failures: those that are known here.
        failed: of all that are counted.
        samples: of the epoch.
        part: that may fail.
        path: where they are listed.
        of: what the samples are of.
    """
    if failed <= part * samples:
        return
    raise InputError(
        f"{failed} of {samples} samples of {of} cannot be used, more than --max-failures {part:g}: {listed(failures)}",
        next_step=f"all are listed in {path}; convert these pictures again or leave them out, or give a higher "
        "--max-failures. The same command goes on from the last checkpoint",
        code="too_many_failures",
    )
