"""Watchdog board: the step and units of each thread of a worker process, in memory shared with its supervisor.

The memory remains readable when the process hangs, even in a call that holds the interpreter's lock, and after it died.
A step that does not advance for too long is a hang, however long its whole unit takes. Of a process that died, only
the units in hand are charged.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from embq.core.errors import DeviceFullError, InputError, OutputError

THREADS = 128
"""Threads of one process with a place of their own; further ones share the last place, and are seen less exactly."""
PLACE_BYTES = 16 * 1024
"""Room of one thread: about 200 units, as many as one batch of very small ones holds."""
_HEAD = struct.Struct("<ddI12s")
"""Monotonic seconds of the last advance (0: nothing in hand), longest step of the stage so far in seconds, length of
the text that follows, stage."""
PATIENCE = 5
"""A step is not a hang before it has taken this factor longer than the longest one before it: a batch of a large model
on a slow device may take minutes."""
PULSE, PULSE_S, FROZEN_S = "pulse", 1.0, 5.0
"""A pulse that is late by so much is that of a process which does not run at all."""
_LINE = re.compile(r"(\S+) (\d+) (-?\d+) (-?\d+)")


class Span(NamedTuple):
    """Samples of one unit. A tuple, because one is made for each unit of each batch.

    Attributes:
        token: lease of the unit.
        u: index of the unit.
        first, last: ordinals, or -1 if none is known.
    """

    token: str
    u: int
    first: int = -1
    last: int = -1


@dataclass(frozen=True, slots=True)
class InHand:
    """The step of one thread.

    Attributes:
        since: monotonic seconds at which the step began or last advanced.
        longest_s: what the longest step of its stage took before.
        stage: "read", "prepare", "embed", "publish" or "pulse".
        units: of each unit, its lease and where in it the step is.
    """

    since: float
    longest_s: float
    stage: str
    units: tuple[Span, ...]


class ProgressBoard:
    """The shared memory of one worker process.

    Args:
        descriptor: of the memory that the supervisor made; -1 for private memory.
    """

    def __init__(self, descriptor: int = -1) -> None:
        self._memory = mmap.mmap(descriptor, THREADS * PLACE_BYTES)
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._places = 0
        self._longest_s: dict[str, float] = {}

    @staticmethod
    def allocate() -> int:
        """The descriptor of empty memory for one process, to be inherited by it. Close it when the process is gone."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("embq-progress")
        else:  # macOS
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, THREADS * PLACE_BYTES)
        return descriptor

    # --- the worker process ---

    def reset(self) -> None:
        """Forget all threads and their times; called where another model is loaded, whose threads are others."""
        with self._lock:
            self._mine, self._places, self._longest_s = threading.local(), 0, {}
            self._memory[:] = bytes(len(self._memory))

    def expect(self, stage: str, seconds: float) -> None:
        """Set how long a step of a stage may take, before there has been one."""
        self._longest_s[stage] = max(seconds, self._longest_s.get(stage, 0.0))

    @contextmanager
    def step(self, stage: str, units: Iterable[Span] = ()) -> Iterator[None]:
        """Show that this thread has `units` in hand until the block ends.

        After an error that ends the process, the step remains, so that the supervisor can charge the units in hand.
        """
        place = self._place()
        text = "\n".join(f"{token} {u} {first} {last}" for token, u, first, last in units).encode()
        if len(text) > PLACE_BYTES - _HEAD.size:
            text = text[: PLACE_BYTES - _HEAD.size].rpartition(b"\n")[0]
        start = place + _HEAD.size
        self._memory[start : start + len(text)] = text
        # Last, so that a reader sees nothing in hand rather than half of it.
        _HEAD.pack_into(
            self._memory, place, time.monotonic(), self._longest_s.get(stage, 0.0), len(text), stage.encode()
        )
        try:
            yield
        except (InputError, OutputError, DeviceFullError):  # an answer, not an accident
            self._clear(place)
            raise
        except BaseException:
            self._mine.place = None  # the process ends with it soon; until then this thread writes elsewhere
            raise
        since = _HEAD.unpack_from(self._memory, place)[0]
        self._clear(place)
        self.expect(stage, time.monotonic() - since)

    @contextmanager
    def pulse(self) -> Iterator[None]:
        """Advance a step of its own every second, so that a process that stands still with nothing in hand is seen."""
        over = threading.Event()

        def beat() -> None:
            with self.step(PULSE):
                while not over.wait(PULSE_S):
                    self.advance()

        thread = threading.Thread(target=beat, name="pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def advance(self) -> None:
        """Show that this thread's step advances; does nothing outside of one."""
        place = self._place()
        since, *rest = _HEAD.unpack_from(self._memory, place)
        if since:
            _HEAD.pack_into(self._memory, place, time.monotonic(), *rest)

    def _clear(self, place: int) -> None:
        _HEAD.pack_into(self._memory, place, 0.0, 0.0, 0, b"")

    def _place(self) -> int:
        place: int | None = getattr(self._mine, "place", None)
        if place is None:
            with self._lock:
                place = min(self._places, THREADS - 1) * PLACE_BYTES
                self._places += 1
            self._mine.place = place
        return place

    # --- the supervisor, and the heartbeat ---

    def in_hand(self) -> list[InHand]:
        """The steps of all threads now, or when the process died."""
        steps = []
        for place in range(0, THREADS * PLACE_BYTES, PLACE_BYTES):
            since, longest_s, length, stage = _HEAD.unpack_from(self._memory, place)
            if not since:
                continue
            text = self._memory[place + _HEAD.size : place + _HEAD.size + min(length, PLACE_BYTES - _HEAD.size)]
            steps.append(InHand(since, longest_s, stage.rstrip(b"\0").decode("ascii", "replace"), tuple(_units(text))))
        return steps

    def stuck(self, limit_s: float) -> list[InHand]:
        """The steps that stand still, oldest first, if one has for over `limit_s` seconds and far more than usual.

        All of them where the pulse stands still too: the process is stopped, or one step keeps all others from running,
        and which one is unknown.
        """
        now = time.monotonic()
        steps = sorted(self.in_hand(), key=lambda step: step.since)
        late = [step for step in steps if now - step.since > max(limit_s, PATIENCE * step.longest_s)]
        frozen = any(step.stage == PULSE and now - step.since > min(FROZEN_S, limit_s / 2) for step in steps)
        return steps if late and frozen else late

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()


def _units(text: bytes) -> Iterator[Span]:
    for line in text.decode("utf-8", "replace").splitlines():
        # What is being written at this moment may not fit.
        if match := _LINE.fullmatch(line):
            token, u, first, last = match.groups()
            yield Span(token, int(u), int(first), int(last))
