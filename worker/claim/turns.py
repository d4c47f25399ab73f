"""Whose turn it is: models share the workers by weight, and what is shared is device seconds.

Start-time fair queueing (Goyal, Vin, Cheng 1996), as between the runs of one queue, with a slice of a worker's time in
the place of a unit. Each model has a virtual time, the device seconds that it was given divided by its weight, and the
model that is furthest behind is next. A slice is booked when it begins, so that workers that choose at the same time
choose different models, and corrected by what was really spent. A model that had no work does not save up for later: it
goes on from where the workers are now, and so is next when it comes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from core import wire
from core.errors import MalformedError

VirtualTime = Annotated[float, Meta(ge=-1e12, le=1e12)]

STAY = 0.5
"""A worker stays with its model where that is ahead of the one furthest behind by no more than so many of its slices.
Otherwise two workers would exchange two models at each end of a slice, for the sake of some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The virtual times, at one moment.

    Attributes:
        now: where the workers are: the least virtual time of a model that had work when a slice was begun last.
        times: model -> virtual time of its next slice; a model that is not named, or is behind `now`, is at `now`.
    """

    now: VirtualTime = 0.0
    times: Mapping[str, VirtualTime] = field(default_factory=dict)

    def start(self, model: str) -> float:
        """The virtual time at which the model's next slice would begin."""
        return max(self.times.get(model, self.now), self.now)

    def next(self, weights: Mapping[str, int], *, own: str = "", slice_s: float) -> str:
        """The model that a worker serves next, of those that have work; "" where there is none.

        Args:
            weights: model -> weight of the runs that have work for it.
            own: the model that the worker has loaded, or "".
            slice_s: how long a slice of that one is.
        """
        if not weights:
            return ""
        # Of two that are as far behind, the one that has just come: the other was served before.
        first = min(weights, key=lambda model: (self.start(model), model in self.times, model))
        if own in weights and self.start(own) - self.start(first) <= STAY * slice_s / weights[own]:
            return own
        return first

    def begin(self, model: str, weights: Mapping[str, int], *, slice_s: float) -> Turns:
        """Book a slice for one of the models that have work.

        Args:
            weights: model -> weight, of all of these: the one furthest behind is where the workers are.
        """
        now = min(self.start(name) for name in weights)
        times = {**self.times, model: self.start(model) + slice_s / weights[model]}
        return Turns(now=now, times={name: time for name, time in times.items() if time >= now})

    def correct(self, model: str, *, weight: int, seconds: float) -> Turns:
        """Book `seconds` more than before, or less."""
        return Turns(now=self.now, times={**self.times, model: self.times.get(model, self.now) + seconds / weight})

    def to_json(self, nonce: str) -> str:
        """As the broker holds them; `nonce` tells this text from the same that another worker writes."""
        return json.dumps({"now": self.now, "times": dict(self.times), "nonce": nonce})

    @classmethod
    def from_json(cls, text: str | bytes) -> Turns:
        """What `to_json` gave; all models even where it is nothing that can be understood."""
        if not text:
            return cls()
        try:
            return wire.read(cls, text, what="turns")
        except MalformedError as error:
            wire.skipped("turns", "embq:turns", error)
            return cls()
