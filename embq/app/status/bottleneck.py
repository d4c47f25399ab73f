"""Identifies the bottleneck stage of a run from worker timings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PREPARING = ("decoding", "tokenising")

RELIEVED = ("cpu-fast", "gpu")
"""Decode paths that never decode large photographs at full size on the CPU."""

STAGE_WORK = {"read": "reading", "prepare": "preparing samples", "publish": "publishing"}
"""Stage beside the device -> its work."""

LEAST_BUSY = 0.01
"""Share of the time below which nothing is concluded from it."""

MANY_TIMES = 10
"""Above this, a multiple of the devices is no figure to go by."""

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
"""Name of a bottleneck -> description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The bottleneck of a run in one time span.

    Attributes:
        name: a key of `MEANING`.
        causes: cause of waiting -> share of the workers' time.
        stages: stage -> state ("busy", "starved", "blocked") -> share of the time.
        threads: decoding or tokenising threads of the workers with this bottleneck.
        workers: number of these workers.
        cores: of the machine, for one worker.
        whole_images: whether their CPUs decode images at full size if a smaller one would do.
        cores_needed: CPU cores that would keep their devices busy; None if unknown or irrelevant.
        cores_exact: False if more may be needed, because the devices were never busy.
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
        """Share of the time in which the devices were idle."""
        return max(0.0, 1.0 - self.stages["embed"].get("busy", 0.0)) if "embed" in self.stages else 0.0

    def sentence(self) -> str:
        """Description for people, with remedies."""
        if self.name not in PREPARING or not self.stages:
            return MEANING.get(self.name, self.name)
        waits, it = ("the device waits", "it") if self.workers == 1 else ("the devices wait", "them")
        text = f"{self.name}: {_many(self.threads, 'thread')}, {waits} {self.device_waits:.0%} of the time"
        if self.cores_needed is None:
            return text
        about = "" if self.cores_exact else "at least "
        ways = ["smaller images"] if self.name == "decoding" else ["more machines"]
        if self.whole_images:
            ways.insert(0, "--decode cpu-fast for large photographs")
        if self.threads < min(self.cores, self.cores_needed):
            ways.insert(0, f"--threads {min(self.cores, self.cores_needed)}: here are {self.cores} cores")
        return f"{text}; {about}{_many(self.cores_needed, 'core')} would keep {it} busy (or {', or '.join(ways)})"

    def remedy(self) -> str:
        """The number that would end the bottleneck, if `sentence` has none and it is known; else ""."""
        busy = {stage: states.get("busy", 0.0) for stage, states in self.stages.items()}
        if self.name == "device":
            next_name, next_busy = max(
                ((stage, share) for stage, share in busy.items() if stage != "embed"),
                key=lambda pair: pair[1],
                default=("", 0.0),
            )
            if next_busy < LEAST_BUSY or busy.get("embed", 0.0) <= next_busy:
                return ""
            times = busy["embed"] / next_busy
            if times > MANY_TIMES:
                return f"{MANY_TIMES} times as many such devices would be kept busy as well"
            devices = int(self.workers * times)
            return f"with more than {_many(devices, 'such device')}, {STAGE_WORK[next_name]} would be the limit"
        waits = self.device_waits if self.name in ("reading", "publishing") else self.causes.get(self.name, 0.0)
        if self.name not in ("reading", "publishing", "writer") or not LEAST_BUSY <= waits <= 1 - LEAST_BUSY:
            return ""
        them = "the device" if self.workers == 1 else "the devices"
        work = "writing" if self.name == "writer" else self.name
        return f"{work} {1 / (1 - waits):.1f} times as fast would keep {them} busy"

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
    """The bottleneck of a run's workers now; "work" if they hold no unit."""
    if workers and not any(worker.get("held") for worker in workers):
        return Bottleneck(name="work")
    return _bottleneck(workers, lambda worker: (str(worker.get("limit", "")), worker["attribution"]["late"]))


def bottleneck_so_far(workers: Sequence[Mapping[str, Any]]) -> Bottleneck:
    """The bottleneck of a run's workers since they have work."""
    return _bottleneck(workers, lambda w: (w["attribution"]["whole"].get("limit", ""), w["attribution"]["whole"]))


def _bottleneck(
    workers: Sequence[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], tuple[str, Mapping[str, Any]]]
) -> Bottleneck:
    """The bottleneck of the workers with most rows, and means over all workers, weighted by rows."""
    reports = [(*of(w), w["attribution"], _weight(w)) for w in workers if w.get("attribution")]
    reports = [report for report in reports if report[0]]
    if not reports:
        return Bottleneck()
    for_each: dict[str, float] = {}
    for name, *_, weight in reports:
        for_each[name] = for_each.get(name, 0.0) + weight
    name = max(sorted(for_each), key=lambda candidate: for_each[candidate])
    total = sum(for_each.values())
    causes: dict[str, float] = defaultdict(float)
    stages: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for _, span, _, weight in reports:
        part = weight / total
        for cause, share in span["causes"].items():
            causes[cause] += share * part
        for stage, states in span["stages"].items():
            mean = stages[stage]
            for state, share in states.items():
                mean[state] += share * part
    held_up = [(span, report) for report_name, span, report, _ in reports if report_name == name]
    cores = [int(span["cores_needed"]) for span, _ in held_up if span.get("cores_needed")]
    return Bottleneck(
        name=name,
        # Rounded at the end: the share of one of a thousand workers is less than the last digit.
        causes={cause: round(share, 3) for cause, share in causes.items()},
        stages={stage: {state: round(share, 3) for state, share in mean.items()} for stage, mean in stages.items()},
        threads=sum(int(report["threads"]) for _, report in held_up),
        workers=len(held_up),
        whole_images=name == "decoding" and any(report["decode"] not in RELIEVED for _, report in held_up),
        cores=int(held_up[0][1]["cores"]) if len(held_up) == 1 else 0,
        cores_needed=sum(cores) if len(cores) == len(held_up) else None,
        cores_exact=all(span.get("cores_exact", True) for span, _ in held_up),
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _weight(worker: Mapping[str, Any]) -> float:
    # Never 0, so that workers that are all new count equally.
    return float(worker.get("rows_per_s") or 0.0) + 1e-6
