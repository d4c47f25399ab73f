"""Time of each stage of a worker by state: busy, starved (waiting for input) or blocked (the next stage has no room).

Every change of state is timed, so nothing is sampled, and no moment counts twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

Stage = Literal["read", "prepare", "embed", "publish"]
State = Literal["busy", "starved", "blocked", "between"]
Cause = Literal["reading", "preparing", "device", "publishing", "writer", "work"]

STAGES: tuple[Stage, ...] = ("read", "prepare", "embed", "publish")
"""Reading samples, decoding or tokenising them, the device, and handing results over."""
STATES: tuple[State, ...] = ("busy", "starved", "blocked")
"""At work; waiting for input; waiting for the stage behind to have room. The rest of the time goes by in between."""
CAUSES: tuple[Cause, ...] = ("writer", "publishing", "device", "preparing", "reading", "work")
"""Causes of waiting, from the last stage to the first; "work" is that no units are available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Time spent since the first unit was claimed.

    Attributes:
        seconds: all of it.
        stages: stage -> state -> seconds; of `prepare` the mean of its threads.
        causes: what held the worker up -> seconds; they add up to `seconds`.
    """

    seconds: float
    stages: Mapping[Stage, Mapping[State, float]]
    causes: Mapping[Cause, float]

    def since(self, start: Spent) -> Spent:
        """The part of it that was spent after `start`."""
        return Spent(
            seconds=self.seconds - start.seconds,
            stages={
                stage: {state: spent - start.stages[stage][state] for state, spent in states.items()}
                for stage, states in self.stages.items()
            },
            causes={cause: spent - start.causes[cause] for cause, spent in self.causes.items()},
        )

    def shares(self, stage: Stage) -> dict[State, float]:
        """State -> its part of the time of a stage."""
        return {state: spent / self.seconds if self.seconds else 0.0 for state, spent in self.stages[stage].items()}


def cause_of(*, read: State, queued: bool, all_preparing: bool, embed: State, publish: State) -> Cause:
    """The cause that limits a worker in one moment: the device while it computes, else what the device waits for.

    Results that find no room come first: the room is large, so it fills up only if the writer is slower than all
    before it.

    Args:
        queued: samples wait for a thread that decodes or tokenises.
        all_preparing: every such thread is at work.
    """
    if publish == "blocked":
        return "writer"
    if embed == "blocked":
        return "publishing"
    if embed != "starved":
        return "device"
    if queued or read == "blocked":
        return "preparing"
    if read != "starved":
        return "reading"
    return "preparing" if all_preparing else "work"


class _Moment(NamedTuple):
    """What goes on in a worker: the states of three stages, threads that prepare, and whether samples wait for one."""

    read: State
    embed: State
    publish: State
    preparing: int
    queued: bool
    enough: bool


class StageTimes:
    """Keeps the time of each stage of one worker process. Safe to use from any thread.

    Nothing is counted before `begin`. `prepare` has several threads: one that has nothing in hand is blocked while
    the reader is, because the device is behind with what they have prepared, and else waits for input. A reader
    without a unit is blocked, too, while the worker claims none because it has enough in hand.

    Args:
        threads: those that prepare.
        clock: seconds.
    """

    def __init__(self, threads: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self.threads = threads
        self._clock = clock
        self._lock = threading.Lock()
        self._states: dict[Stage, State] = dict.fromkeys(STAGES, "between")
        self._preparing = 0
        self._queued = 0
        self._enough = False
        self._at: float | None = None
        self._passed: dict[_Moment, float] = {}
        self._seconds = 0.0
        self._spent: dict[Stage, dict[State, float]] = {stage: dict.fromkeys(STATES, 0.0) for stage in STAGES}
        self._causes: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)

    def begin(self) -> None:
        """Count from now on; at the first unit. Later calls change nothing."""
        with self._lock:
            if self._at is None:
                self._at = self._clock()

    @contextmanager
    def at(self, stage: Stage, state: State) -> Iterator[None]:
        """A stage of one thread is in a state; afterwards in the one before."""
        previous = self._turn(stage, state)
        try:
            yield
        finally:
            self._turn(stage, previous)

    def enough(self, enough: bool) -> None:
        """Whether no unit is claimed for now because there is enough in hand."""
        with self._lock:
            self._count()
            self._enough = enough

    def submitted(self) -> None:
        """Samples were handed to the threads that prepare, for one call of `preparing`."""
        with self._lock:
            self._count()
            self._queued += 1

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """One of the threads that prepare is at work."""
        with self._lock:
            self._count()
            self._queued -= 1
            self._preparing += 1
        try:
            yield
        finally:
            with self._lock:
                self._count()
                self._preparing -= 1

    def spent(self) -> Spent:
        """Time spent until now."""
        with self._lock:
            self._count()
            for moment, passed in self._passed.items():
                self._add(moment, passed)
            self._passed.clear()
            stages = {stage: dict(states) for stage, states in self._spent.items()}
            return Spent(seconds=self._seconds, stages=stages, causes=dict(self._causes))

    def _turn(self, stage: Stage, state: State) -> State:
        with self._lock:
            self._count()
            previous, self._states[stage] = self._states[stage], state
            return previous

    def _count(self) -> None:
        """Note the time since the last change for what went on in it; every chunk of samples changes it ten times."""
        if self._at is None:
            return
        now, states = self._clock(), self._states
        moment = _Moment(
            states["read"], states["embed"], states["publish"], self._preparing, self._queued > 0, self._enough
        )
        self._passed[moment] = self._passed.get(moment, 0.0) + now - self._at
        self._at = now

    def _add(self, moment: _Moment, passed: float) -> None:
        """Add time to what went on in it."""
        self._seconds += passed
        read: State = "blocked" if moment.read == "starved" and moment.enough else moment.read
        stages: dict[Stage, State] = {"read": read, "embed": moment.embed, "publish": moment.publish}
        for stage, state in stages.items():
            if state != "between":
                self._spent[stage][state] += passed
        at_work = min(1.0, moment.preparing / self.threads)
        self._spent["prepare"]["busy"] += passed * at_work
        idle: State = "blocked" if read == "blocked" else "starved"
        self._spent["prepare"][idle] += passed * (1.0 - at_work)
        cause = cause_of(
            read=moment.read,
            queued=moment.queued,
            all_preparing=moment.preparing >= self.threads,
            embed=moment.embed,
            publish=moment.publish,
        )
        self._causes[cause] += passed
