"""Samples that could not be read: each once in failures.jsonl, and an error if there are too many."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from embq.core.errors import InputError
from embq.core.storage.beneath import open_appending, open_regular
from embq.training.run.folder import writing
from embq.training.run.journal import append, lines

if TYPE_CHECKING:
    from embq.training.data.batch import Failure

LISTED = 5
"""Failures that an error message names."""


class FailureList:
    """The file failures.jsonl, with a line of shard, key, code, message and samples for each failure.

    Args:
        path: the file.
        most: part of the samples that may fail, from 0 to 1.
    """

    def __init__(self, path: Path, most: float) -> None:
        self.path = path
        self._most = most
        self._samples = {(line["shard"], line["key"], line["code"]): int(line["samples"]) for line in lines(path)}

    @property
    def samples(self) -> int:
        """Samples that failed, each counted once however many epochs it failed in."""
        return sum(self._samples.values())

    def add(self, failures: Sequence[Failure]) -> None:
        """Append those that are new."""
        new = {(failure.shard, failure.key, failure.code): failure for failure in failures}
        new = {key: failure for key, failure in new.items() if key not in self._samples}
        if not new:
            return
        data = b"".join(json.dumps(asdict(failure)).encode() + b"\n" for failure in new.values())
        with writing(self.path), open(open_appending(self.path), "ab", buffering=0) as file:
            with open_regular(self.path) as existing:
                existing.seek(max(0, existing.seek(0, os.SEEK_END) - 1))
                cut = existing.read() not in (b"", b"\n")  # by a full disk
            append(file, b"\n" + data if cut else data)
        self._samples.update({key: failure.samples for key, failure in new.items()})

    def exceeds(self, failed: int, samples: int) -> bool:
        """True if more samples failed than may."""
        return failed > self._most * samples

    def check(self, failures: Sequence[Failure], failed: int, samples: int, of: str = "an epoch") -> None:
        """InputError if more samples failed than may.

        Args:
            failures: those that this process knows, for the message.
            failed: number of samples that failed.
            samples: number of samples of which they failed.
            of: what the samples belong to.
        """
        if not self.exceeds(failed, samples):
            return
        raise InputError(
            f"{failed} of {samples} samples of {of} cannot be used, more than --max-failures {self._most:g}: "
            f"{_listed(failures)}",
            next_step=f"all are listed in {self.path}; convert these pictures again or leave them out, or give a "
            "higher --max-failures. The same command goes on from the last checkpoint",
            code="too_many_failures",
        )


def _listed(failures: Sequence[Failure]) -> str:
    shown = [f"{failure.shard}{failure.key and f' {failure.key}'}: {failure.message}" for failure in failures[:LISTED]]
    suffix = f"; and {len(failures) - LISTED} more" if len(failures) > LISTED else ""
    return "; ".join(shown) + suffix
