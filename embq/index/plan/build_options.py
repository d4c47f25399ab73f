"""Options of `embq index` that decide about the plan, with autofaiss's names, and parsers of sizes and targets."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from embq.core.errors import UsageError
from embq.core.process.limits import CGROUP, OWN_GROUPS, control_groups

METRICS = ("ip", "l2")
REFINES = ("auto", "none", "fp16")
AT_LEAST_1 = (
    *("max_index_memory_usage", "current_memory_available", "nb_indices_to_keep", "workers"),
    "min_nearest_neighbors_to_retrieve",
)
MOST_AVAILABLE_BYTES = 32 << 30
"""A build takes no more than this by itself, however large the machine: autofaiss's default."""

MEMINFO = Path("/proc/meminfo")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The options of `embq index` that decide about the plan.

    Attributes:
        max_index_memory_usage: bytes that one kept index may take in RAM when it is searched.
        current_memory_available: bytes that the building processes of this machine may take together.
        max_index_query_time_ms: mean time of a query on one thread, where latency decides.
        metric: "ip" or "l2"; "ip" of unit-length vectors is the cosine.
        index_key: faiss factory string; None leaves the choice to the plan.
        nb_indices_to_keep: into how many indices the lists are divided; each must fit the memory.
        min_nearest_neighbors_to_retrieve: a query must be able to find at least this many.
        recall: the part of the true nearest `recall_at` that a query must find, 0 to 1.
        refine: "fp16": full rows on disk for re-ranking; "none"; "auto": where the codec needs it.
        workers: processes that build side by side on this machine.
        seed: of samples and k-means.
    """

    max_index_memory_usage: int = 16 << 30
    current_memory_available: int = MOST_AVAILABLE_BYTES
    max_index_query_time_ms: float = 10.0
    metric: str = "ip"
    index_key: str | None = None
    nb_indices_to_keep: int = 1
    min_nearest_neighbors_to_retrieve: int = 20
    recall: float = 0.95
    recall_at: int = 10
    refine: str = "auto"
    workers: int = 1
    seed: int = 1234

    def check(self) -> None:
        """Raises UsageError if a value has no meaning, or two contradict each other."""
        for name in AT_LEAST_1:
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}", next_step="Give at least 1.")
        if self.metric not in METRICS:
            raise UsageError(
                f"there is no metric {self.metric!r}", next_step="Give --metric-type ip (cosine on unit vectors) or l2."
            )
        if self.refine not in REFINES:
            raise UsageError(f"there is no refinement {self.refine!r}", next_step="Give --refine auto, fp16 or none.")
        if not 0 < self.recall <= 1 or self.recall_at < 1:
            raise UsageError(
                f"a recall of {self.recall:g}@{self.recall_at} cannot be reached",
                next_step="Give --recall as 0.95@10: the part to find, above 0 and up to 1, and of how many.",
            )
        if self.max_index_query_time_ms <= 0:
            raise UsageError(
                f"--max-index-query-time-ms is {self.max_index_query_time_ms:g}", next_step="Give more than 0."
            )


def memory_option() -> str:
    """The name of the option of the building memory as this command was given it, else its canonical name."""
    is_short = any(word.replace("_", "-").startswith("--max-memory") for word in sys.argv)
    return "--max-memory" if is_short else "--current-memory-available"


def parse_bytes(text: str) -> int:
    """Bytes of "16G", "500M", "1.5GB", "64MiB" or "1000000"; the letters are powers of 1024, as autofaiss has them.

    Raises:
        UsageError: `text` is no size.
    """
    match = re.fullmatch(r"\s*+(\d{1,18}+(?:\.\d*+)?|\.\d++)\s*+([kmgt]?)(?:i?b)?\s*+", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"{text!r} is no size", next_step="Write it as 16G, 500M or a number of bytes.")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_recall(text: str) -> tuple[float, int]:
    """The part and the number of "0.95@10"; the number is 10 if it is left out.

    Raises:
        UsageError: `text` is no such target.
    """
    match = re.fullmatch(r"\s*+(\d++(?:\.\d++)?|\.\d++)\s*+(?:@\s*+(\d{1,9}))?\s*+", text)
    if match is None or not 0 < float(match[1]) <= 1 or match[2] == "0":
        raise UsageError(
            f"{text!r} is no recall target",
            next_step="Write it as 0.95@10: the part of the 10 nearest that a query must find, above 0 and up to 1.",
        )
    return float(match[1]), int(match[2] or 10)


def bytes_text(count: float) -> str:
    """ "1.5G", for `parse_bytes`, rounded up in the third digit: what is printed as needed is enough if given."""
    for letter, unit in (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if count >= unit:
            digits = 0 if count >= 100 * unit else 1 if count >= 10 * unit else 2
            scaled = -(-count * 10**digits // unit) / 10**digits
            return f"{scaled:.{digits}f}{letter}"
    return f"{int(count)}"


def available_memory(cgroup: Path = CGROUP, meminfo: Path = MEMINFO, own: Path = OWN_GROUPS) -> int:
    """Bytes that a build may take here: what the machine and its control groups have free, at most 32 GiB."""
    bounds = [MOST_AVAILABLE_BYTES]
    with suppress(OSError, IndexError, ValueError):
        bounds.append(int(meminfo.read_text(encoding="ascii").split("MemAvailable:")[1].split()[0]) * 1024)
    for folder in control_groups("memory", cgroup, own):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(OSError, ValueError):  # no such limit, or "max"
                most, taken = (int((folder / name).read_text(encoding="ascii")) for name in (limit, used))
                bounds.append(max(1, most - taken))
    return min(bounds)
