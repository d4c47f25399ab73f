"""Which of some ways to compute the same is the fastest on this device: found by trying them when a model is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from worker.embedders.device import foreign_faults, is_device_fault
from worker.embedders.flat_path import LEAST_COSINE, least_cosine

Encode = Callable[[torch.Tensor], torch.Tensor]
"""One forward pass: vectors of shape (rows, dim) of a batch of numbers."""

ROUNDS, PASSES = 3, 3
"""Each way is timed so often, over so many passes one behind the other, and its fastest round counts."""

TRIAL_S = 3.0
"""No further way is tried where its passes would end later: whoever computes that slowly gains little from any."""

GAIN = 1.03
"""What is not faster by more than noise is not taken."""


def nothing() -> None:
    """What has to be undone of a way that changes nothing."""


@dataclass(frozen=True, slots=True)
class Way:
    """Another way to compute what the fastest so far computes.

    Attributes:
        make: gives it, of the fastest so far. Whatever it raises, the way is not taken.
        undo: what `make` changed, where the way is not taken.
        is_bounded: whether `TRIAL_S` holds for it; where it does not, `make` has a bound of its own.
    """

    name: str
    make: Callable[[Encode], Encode]
    undo: Callable[[], None] = nothing
    is_bounded: bool = True


@dataclass(slots=True)
class Found:
    """What a trial found.

    Attributes:
        encode: the fastest.
        path: names of the ways that were taken, joined by "+"; "eager" where none was.
        rows_per_s: way -> rows per second, that of the usual one first.
        refused: way -> why it was not taken, where it was not for its speed.
    """

    encode: Encode
    path: str = "eager"
    rows_per_s: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def fastest(
    usual: Encode,
    ways: Sequence[Way],
    batch: torch.Tensor,
    *,
    wait: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> Found:
    """Try each way on top of those that were taken before it.

    Args:
        usual: what is used where nothing is faster, and what the others' vectors are compared with.
        wait: returns when the device is done with what it was given.

    Raises DeviceError where the usual way does not work any more, and DeviceFullError where there is no room for it.
    """
    began = clock()
    speed = partial(_speed, batch=batch, wait=wait, clock=clock)
    with foreign_faults():
        expected = usual(batch)
        wait()
        found = Found(usual, rows_per_s={"eager": speed(usual)})
    best = found.rows_per_s["eager"]
    for way in ways:
        if way.is_bounded and clock() - began + ROUNDS * PASSES * len(batch) / best > TRIAL_S:
            found.refused[way.name] = "no time"
            continue
        why = ""
        try:
            encode = way.make(found.encode)
            cosine = least_cosine(encode(batch), expected)
            if cosine < LEAST_COSINE:
                why = f"cosine {cosine:.6f}"
            else:
                rate = found.rows_per_s[way.name] = speed(encode)
        except Exception as error:  # noqa: BLE001 - whatever an optional way raises, the usual one is there
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]
            _check_device(usual, batch, wait, error)
        if why:
            found.refused[way.name] = why
        if not why and rate > GAIN * best:
            found.encode, best = encode, rate
            found.path = way.name if found.path == "eager" else f"{found.path}+{way.name}"
        else:
            way.undo()
    return found


def _speed(encode: Encode, *, batch: torch.Tensor, wait: Callable[[], object], clock: Callable[[], float]) -> float:
    """Rows per second of the fastest round."""
    shortest = float("inf")
    for _ in range(ROUNDS):
        start = clock()
        for _ in range(PASSES):
            encode(batch)
        wait()
        shortest = min(shortest, clock() - start)
    return PASSES * len(batch) / max(shortest, 1e-9)


def _check_device(usual: Encode, batch: torch.Tensor, wait: Callable[[], object], error: Exception) -> None:
    """Raise DeviceError where a way that failed left a device on which nothing works any more."""
    if not is_device_fault(error):
        return
    with foreign_faults():
        usual(batch)
        wait()
