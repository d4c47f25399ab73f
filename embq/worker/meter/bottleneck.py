"""Identifies the bottleneck of a worker, now and over its whole time, with the shares of time behind the verdict."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from embq.core.process.limits import cores as usable_cores
from embq.worker.meter.meter import Meter
from embq.worker.meter.stage_times import STAGES, Cause, Spent

WINDOW_S = 10.0
"""Window of the current shares, so that a change of speed shows soon."""
LEAST_S = 1.0
"""A verdict before that would be one over the first chunks of the first unit."""
MOST_WAIT = 0.1
"""A device that waits for less of its time than this is the limit: nothing else could make a worker much faster."""
MARGIN = 0.025
"""By so much more or less has it to wait for the verdict to change, or it would come and go."""
CLEAR_LEAD = 0.1
"""By this part of the waiting another cause must be ahead: of two that are alike, one is named, and stays."""


def verdict(causes: Mapping[str, float], previous: str = "") -> str:
    """The bottleneck in one word: the device, unless it waits; else the cause of most waiting.

    Args:
        causes: what held it up -> its part of the time; they add up to 1. "device" is the time that it was at work.
        previous: the verdict until now, which stands in doubt.
    """
    waiting = {cause: share for cause, share in causes.items() if cause != "device" and share > 0.0}
    waits = sum(waiting.values())
    most = MOST_WAIT + (0.0 if not previous else MARGIN if previous == "device" else -MARGIN)
    if waits < most or not waiting:
        return "device"
    first = max(waiting, key=lambda cause: waiting[cause])
    return previous if previous in waiting and waiting[first] - waiting[previous] < CLEAR_LEAD * waits else first


def cores_needed(*, cores_used: float, device_per_s: float, comes_per_s: float) -> int:
    """Cores with which as much would come as the device could do, where `comes_per_s` comes with `cores_used`."""
    return math.ceil(round(cores_used * device_per_s / comes_per_s, 2))


class Bottleneck:
    """Identifies every second what limits this worker. For one thread.

    Args:
        modalities: of the model, which say whether preparing is decoding or tokenising.
        decode: how it has images decoded, as `embq.core.models` names it.
        cores: that this process may use.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        modalities: Sequence[str] = (),
        decode: str = "",
        cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meter = meter
        self._decode = decode
        self._preparing = "decoding" if "image" in modalities else "tokenising"
        self._cores = cores or usable_cores()
        self._clock = clock
        self._looks: deque[tuple[float, Spent, int]] = deque()
        self._verdict = ""

    def report(self) -> dict[str, Any]:
        """Fields for the report of the worker, see the table of `limit_detail` in docs/reference/status.md."""
        now, spent, tokens = self._clock(), self._meter.times.spent(), self._meter.tokens
        self._looks.append((now, spent, tokens))
        while len(self._looks) > 2 and now - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()
        _, first, tokens_first = self._looks[0]
        late = spent.since(first) if len(self._looks) > 1 else spent
        if len(self._looks) > 1 and late.seconds >= LEAST_S:
            self._verdict = verdict(self._shares(late), self._verdict)
        overall = verdict(self._shares(spent)) if spent.seconds > 0.0 else ""
        return {
            "limit": self._verdict,
            "attribution": {
                "threads": self._meter.times.threads,
                "cores": self._cores,
                "decode": self._decode,
                # In seconds, for sums over workers: they never decrease, which rounded shares would.
                "spent": {
                    stage: {state: round(seconds, 2) for state, seconds in states.items()}
                    for stage, states in spent.stages.items()
                },
                "late": self._fields(late, self._verdict, tokens - tokens_first),
                "whole": {"limit": overall, **self._fields(spent, overall, tokens)},
            },
        }

    def _fields(self, spent: Spent, limit: str, tokens: int) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "seconds": round(spent.seconds, 2),
            "causes": {cause: round(share, 3) for cause, share in self._shares(spent).items()},
            "stages": {
                stage: {state: round(share, 3) for state, share in spent.shares(stage).items()} for stage in STAGES
            },
        }
        device = self._meter.device_per_s()
        if limit == self._preparing and device is not None and tokens > 0:
            threads = self._meter.times.threads * spent.shares("prepare")["busy"]
            fields["cores_needed"] = cores_needed(
                cores_used=min(threads, float(self._cores)),
                device_per_s=device.per_s,
                comes_per_s=tokens / spent.seconds,
            )
            fields["cores_exact"] = device.full
        return fields

    def _shares(self, spent: Spent) -> dict[str, float]:
        named: dict[Cause, str] = {"preparing": self._preparing}
        return {named.get(cause, cause): s / spent.seconds for cause, s in spent.causes.items() if spent.seconds}
