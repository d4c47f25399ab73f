"""Work of the devices in a run by `EMBQ_TRACE`: when each was busy, beside the ideal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch of one worker process.

    Attributes:
        worker: its name, which no other process has.
        device: "sim:SPEED" or a real one.
        began: Unix seconds.
        ended: Unix seconds.
        units: indices of the units that its samples belong to.
    """

    worker: str
    device: str
    began: float
    ended: float
    rows: int
    units: tuple[int, ...]


def read_traces(folder: Path) -> list[Batch]:
    """Every batch that was traced, in the order of their beginnings."""
    batches = []
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            said = json.loads(line)
            batches.append(
                Batch(
                    worker=path.stem,
                    device=said["device"],
                    began=said["began"],
                    ended=said["ended"],
                    rows=said["rows"],
                    units=tuple(said["units"]),
                )
            )
    return sorted(batches, key=lambda batch: batch.began)


def workers(batches: Iterable[Batch]) -> dict[str, list[Batch]]:
    """The batches of each worker process, in order of its first one."""
    found: dict[str, list[Batch]] = {}
    for batch in batches:
        found.setdefault(batch.worker, []).append(batch)
    return found


def makespan(batches: list[Batch]) -> float:
    """Seconds from the beginning of the first batch to the end of the last."""
    return max(batch.ended for batch in batches) - batches[0].began


def idle_ends(batches: list[Batch]) -> dict[str, float]:
    """Worker -> seconds between its last batch and the last one of all."""
    end = max(batch.ended for batch in batches)
    return {name: end - max(batch.ended for batch in own) for name, own in workers(batches).items()}


def busy_shares(batches: list[Batch]) -> dict[str, float]:
    """Worker -> share of the makespan in which it had a batch in hand."""
    whole = makespan(batches)
    return {name: sum(b.ended - b.began for b in own) / whole for name, own in workers(batches).items()}


def rows_twice(batches: list[Batch], rows: int) -> int:
    """Rows that were embedded beyond those that the run has."""
    return sum(batch.rows for batch in batches) - rows
