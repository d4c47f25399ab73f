"""Start-time fair queueing (Goyal, Vin, Cheng 1996): runs share a queue by weight, and models share the workers.

Each party has a virtual time: the work that it was given divided by its weight. The party that is furthest behind is
next. A party without work does not save up for later: it goes on from where the others are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

from embq.core import wire
from embq.core.errors import MalformedError

_Time = Annotated[float, Meta(ge=-1e12, le=1e12)]

STAY = 0.5
"""A worker stays with its model if that is ahead of the one furthest behind by at most this many of its slices.
Otherwise two workers would exchange two models at the end of each slice for a difference of milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualTimes:
    """The virtual times at one moment.

    Attributes:
        now: virtual time of what is being worked on.
        times: party -> virtual time of its next work; a party that is not named, or is behind `now`, is at `now`.
    """

    now: _Time = 0.0
    times: Mapping[str, _Time] = field(default_factory=dict)

    def start(self, party: str) -> float:
        """The virtual time at which the party's next work begins."""
        return max(self.times.get(party, self.now), self.now)

    def charge(self, party: str, work: float) -> VirtualTimes:
        """Give a party `work`, divided by its weight."""
        return replace(self, times={**self.times, party: self.start(party) + work})

    # --- models that share workers by slices of time ---

    def next(self, weights: Mapping[str, int], *, own: str = "", slice_s: float) -> str:
        """The model that a worker serves next, of those that have work; "" if there is none.

        Args:
            weights: model -> weight of the runs that have work for it.
            own: the model that the worker has loaded, or "".
            slice_s: how long a slice of that one is.
        """
        if not weights:
            return ""
        # Of two that are as far behind, the one that is new: the other was served before.
        first = min(weights, key=lambda model: (self.start(model), model in self.times, model))
        if own in weights and self.start(own) - self.start(first) <= STAY * slice_s / weights[own]:
            return own
        return first

    def begin(self, model: str, weights: Mapping[str, int], *, slice_s: float) -> VirtualTimes:
        """Charge a slice when it begins, so that workers that choose at the same time choose different models.

        Args:
            weights: model -> weight, of all that have work: the one furthest behind sets `now`.
        """
        now = min(self.start(name) for name in weights)
        times = self.charge(model, slice_s / weights[model]).times
        return VirtualTimes(now=now, times={name: time for name, time in times.items() if time >= now})

    def correct(self, model: str, *, weight: int, seconds: float) -> VirtualTimes:
        """Charge `seconds` more than `begin` did, or less."""
        return replace(self, times={**self.times, model: self.times.get(model, self.now) + seconds / weight})

    def to_json(self, nonce: str) -> str:
        """The text that the broker holds; `nonce` tells this text from the same that another worker writes."""
        return json.dumps({"now": self.now, "times": dict(self.times), "nonce": nonce})

    @classmethod
    def from_json(cls, text: str | bytes) -> VirtualTimes:
        """The inverse of `to_json`; all parties are even where the text cannot be understood."""
        if not text:
            return cls()
        try:
            return wire.read(cls, text, what="turns")
        except MalformedError as error:
            wire.skipped("turns", "embq:turns", error)
            return cls()
