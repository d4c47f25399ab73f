"""What limits a run, from what its workers say of themselves: one word, the shares behind it, and a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PREPARING = ("decoding", "tokenising")

RELIEVED = ("cpu-fast", "gpu")
"""Decode paths that spare the CPU the full size of large photographs already."""

MEANING = {
    "device": "the device: the other stages wait for it",
    "decoding": "decoding: the device waits for it",
    "tokenising": "tokenising: the device waits for it",
    "reading": "reading the input: the device waits for it (nearer storage, more --prefetch, larger units)",
    "publishing": "handing results over: the device waits for it (larger units, a nearer broker)",
    "writer": "the writer: results find no room (disk speed? does it run?)",
    "work": "nothing here: the workers wait for units",
    "turn": "its turn: the workers serve",
    "": "not known yet",
}
"""A word of `limit` -> what a person is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What limits a run, or one span of it.

    Attributes:
        name: a key of `MEANING`.
        causes: what held the workers up -> its part of their time.
        stages: stage -> state ("busy", "starved", "blocked") -> its part of the time.
        threads: that decode or tokenise in the workers which this limits.
        workers: how many these are.
        cores: of the machine, where it is one worker.
        whole_images: their CPUs decode images at full size, also where a smaller one would do.
        cores_needed: with which their devices would be busy; None where that is not the question, or not known.
        cores_exact: False where more may be needed: the devices have not shown yet what they can do.
    """

    name: str = ""
    causes: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    threads: int = 0
    workers: int = 0
    cores: int = 0
    whole_images: bool = False
    cores_needed: int | None = None
    cores_exact: bool = True

    @property
    def device_waits(self) -> float:
        """Part of the time in which the devices computed nothing."""
        return max(0.0, 1.0 - self.stages["embed"].get("busy", 0.0)) if "embed" in self.stages else 0.0

    def sentence(self) -> str:
        """The verdict for people, with what to do about it."""
        if self.name not in PREPARING or not self.stages:
            return MEANING.get(self.name, self.name)
        waits, it = ("the device waits", "it") if self.workers == 1 else ("the devices wait", "them")
        said = f"{self.name}: {_many(self.threads, 'thread')}, {waits} {self.device_waits:.0%} of the time"
        if self.cores_needed is None:
            return said
        about = "" if self.cores_exact else "at least "
        ways = ["smaller images"] if self.name == "decoding" else ["more machines"]
        if self.whole_images:
            ways.insert(0, "--decode cpu-fast for large photographs")
        if self.threads < min(self.cores, self.cores_needed):
            ways.insert(0, f"--prepare-threads {min(self.cores, self.cores_needed)}: here are {self.cores} cores")
        return f"{said}; {about}{_many(self.cores_needed, 'core')} would keep {it} busy (or {', or '.join(ways)})"

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "limit": self.name,
            "device_waits": round(self.device_waits, 3),
            "workers": self.workers,
            "threads": self.threads,
            "cores_needed": self.cores_needed,
            "cores_exact": self.cores_exact,
            "causes": dict(self.causes),
            "stages": {stage: dict(states) for stage, states in self.stages.items()},
        }


def bottleneck_now(workers: Sequence[Mapping[str, Any]]) -> Bottleneck:
    """What limits the workers of a run now; "work" where they hold nothing."""
    if workers and not any(worker.get("held") for worker in workers):
        return Bottleneck(name="work")
    return _limit(workers, lambda worker: (str(worker.get("limit", "")), worker["attribution"]["late"]))


def bottleneck_so_far(workers: Sequence[Mapping[str, Any]]) -> Bottleneck:
    """What limited them since they have work."""
    return _limit(workers, lambda w: (w["attribution"]["whole"].get("limit", ""), w["attribution"]["whole"]))


def _limit(
    workers: Sequence[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], tuple[str, Mapping[str, Any]]]
) -> Bottleneck:
    """The word of the workers that do most of the rows, and means over all, each by its rows."""
    said = [(*of(w), w["attribution"], _weight(w)) for w in workers if w.get("attribution")]
    said = [one for one in said if one[0]]
    if not said:
        return Bottleneck()
    for_each: dict[str, float] = {}
    for name, *_, weight in said:
        for_each[name] = for_each.get(name, 0.0) + weight
    name = max(sorted(for_each), key=lambda one: for_each[one])
    total = sum(for_each.values())
    causes: dict[str, float] = {}
    stages: dict[str, dict[str, float]] = {}
    for _, told, _, weight in said:
        for cause, share in told["causes"].items():
            causes[cause] = round(causes.get(cause, 0.0) + share * weight / total, 3)
        for stage, states in told["stages"].items():
            mean = stages.setdefault(stage, {})
            for state, share in states.items():
                mean[state] = round(mean.get(state, 0.0) + share * weight / total, 3)
    held_up = [(told, all_told) for one, told, all_told, _ in said if one == name]
    cores = [int(told["cores_needed"]) for told, _ in held_up if told.get("cores_needed")]
    return Bottleneck(
        name=name,
        causes=causes,
        stages=stages,
        threads=sum(int(all_told["threads"]) for _, all_told in held_up),
        workers=len(held_up),
        whole_images=name == "decoding" and any(all_told["decode"] not in RELIEVED for _, all_told in held_up),
        cores=int(held_up[0][1]["cores"]) if len(held_up) == 1 else 0,
        cores_needed=sum(cores) if len(cores) == len(held_up) else None,
        cores_exact=all(told.get("cores_exact", True) for told, _ in held_up),
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _weight(worker: Mapping[str, Any]) -> float:
    # One that has done nothing yet counts little, and where all are so, each the same.
    return float(worker.get("rows_per_s") or 0.0) + 1e-6
