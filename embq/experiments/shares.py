"""What each worker process did in one run: rows and busy seconds from its trace, memory from the system."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one worker process did.

    Attributes:
        device: as `--devices` names it.
        rows: that its device embedded, also where another worker's copy of a unit was faster.
        tokens: of these.
        busy_s: seconds that the device had a batch in hand.
    """

    device: str
    rows: int
    tokens: int
    busy_s: float


class Traces:
    """The batch traces of worker processes, see `worker.meter.batch_trace`; each line is read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, int] = {}

    def shares(self, workers: Sequence[tuple[str, str]], *, since: float) -> tuple[Share, ...]:
        """One share for each (name, device) of `workers`, of what began after `since` (Unix seconds)."""
        return tuple(self._share(name, device, since) for name, device in workers)

    def _share(self, name: str, device: str, since: float) -> Share:
        lines = [line for line in self._new_lines(name) if line["began"] >= since]
        return Share(
            device=device,
            rows=sum(line["rows"] for line in lines),
            tokens=sum(line["tokens"] for line in lines),
            busy_s=sum(line["ended"] - line["began"] for line in lines),
        )

    def _new_lines(self, name: str) -> Iterator[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            return
        with path.open(encoding="utf-8") as file:
            file.seek(self._read.get(name, 0))
            text = file.read()
        whole, _, _ = text.rpartition("\n")
        self._read[name] = self._read.get(name, 0) + len(whole.encode()) + bool(whole)
        for line in whole.splitlines():
            yield json.loads(line)


def memory_mb(processes: Iterable[int]) -> float | None:
    """Megabytes of these processes together, what they share counted once; None where the system does not tell."""
    total_kb = 0
    for process in processes:
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            return None
        found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        if found is None:
            return None
        total_kb += int(found.group(1))
    return total_kb * 1024 / 1e6
