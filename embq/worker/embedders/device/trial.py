"""Trial of variants of a forward pass when a model is loaded: the fastest that is accurate is used."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from embq.worker.embedders.device.accuracy import AccuracyCheck, places
from embq.worker.embedders.device.errors import is_device_fault, translated_device_errors
from embq.worker.embedders.device.optional_paths import PATHS

Encode = Callable[[torch.Tensor], torch.Tensor]
"""One forward pass: vectors of shape (rows, dim) of a batch of numbers."""

ROUNDS, PASSES = 3, 3
"""Each way is timed so often, over so many passes one behind the other, and its fastest round counts."""

TRIAL_S = 3.0
"""No further way is tried where its passes would end later: a device that computes so slowly gains little from any."""

GAIN = 1.03
"""A way has to be faster by more than noise, or where a tie is enough, must not be slower by more than noise."""


def nothing() -> None:
    """Undo of a variant that changes nothing."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Another way to compute what the fastest so far computes.

    Attributes:
        make: gives it, of the fastest so far. Whatever it raises, the way is not taken.
        undo: what `make` changed, where the way is not taken.
        is_bounded: whether `TRIAL_S` holds for it; where it does not, `make` has a bound of its own.
        takes_tie: whether it is taken where it is as fast as what was taken before it.
    """

    name: str
    make: Callable[[Encode], Encode]
    undo: Callable[[], None] = nothing
    is_bounded: bool = True
    takes_tie: bool = False


@dataclass(slots=True)
class Fastest:
    """Outcome of a trial.

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
    ways: Sequence[Variant],
    batch: torch.Tensor,
    *,
    exact: torch.Tensor | None,
    wait: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> Fastest:
    """Try each way on top of those that were taken before it.

    Args:
        usual: what is used where nothing is faster.
        exact: vectors in fp32 of the rows at `places`, which say how good those of a way are; None where there are
            none, and a way has to give the vectors of the usual one.
        wait: returns when the device is done with what it was given.

    Raises DeviceError where the usual way does not work any more, and DeviceFullError where there is no room for it.
    """
    began = clock()
    speed = partial(_speed, batch=batch, wait=wait, clock=clock)
    with translated_device_errors():
        compared = places(len(batch))
        expected = usual(batch)[compared]
        nearness = AccuracyCheck(expected, expected if exact is None else exact)
        found = Fastest(usual, rows_per_s={"eager": speed(usual)})
    best = found.rows_per_s["eager"]
    for way in ways:
        if way.name in PATHS.without:
            found.refused[way.name] = "the process before this one died with it"
            continue
        if way.is_bounded and clock() - began + ROUNDS * PASSES * len(batch) / best > TRIAL_S:
            found.refused[way.name] = "no time"
            continue
        why, rate = "", 0.0
        PATHS.try_out(way.name)
        try:
            encode = way.make(found.encode)
            why = nearness.refusal(encode(batch)[compared])
            if not why:
                rate = found.rows_per_s[way.name] = speed(encode)
        except Exception as error:  # noqa: BLE001 - whatever an optional way raises, the usual one is there
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]
            check_device(lambda: (usual(batch), wait()), error)
        if why:
            found.refused[way.name] = why
        is_taken = not why and rate > (best / GAIN if way.takes_tie else best * GAIN)
        if is_taken:
            found.encode, best = encode, rate
            found.path = way.name if found.path == "eager" else f"{found.path}+{way.name}"
        else:
            way.undo()
        PATHS.settle(way.name, is_taken=is_taken)
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


def check_device(usual: Callable[[], object], error: Exception) -> None:
    """Raise DeviceError where a way that failed left a device on which nothing works any more.

    Args:
        usual: computes something in the usual way, and waits for it.
    """
    if is_device_fault(error):
        with translated_device_errors():
            usual()
