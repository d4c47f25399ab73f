"""Trial of variants of a forward pass when a model is loaded: the fastest that is accurate is used.

Its vectors must be as near to fp32 as those of the usual pass. Two variants in half precision round differently, and
neither is right: with all-MiniLM-L6-v2 in bf16 their vectors differ by as much as each differs from fp32. So each is
compared with fp32 of the same weights and inputs. The error of a vector is 1 - cosine with its fp32 vector.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch.nn.functional import cosine_similarity

from embq.core.errors import DeviceError
from embq.worker.embedders.device.errors import is_device_fault, translated_device_errors
from embq.worker.embedders.device.tuning import PATHS

Encode = Callable[[torch.Tensor], torch.Tensor]
"""One forward pass: vectors of shape (rows, dim) of a batch of numbers."""
T = TypeVar("T")

ROUNDS, PASSES = 3, 3
"""Each variant is timed this often, over this many passes one behind the other, and its fastest round counts."""

TRIAL_S = 3.0
"""No further variant is tried if its passes would end later: a device that computes so slowly gains little from any."""

GAIN = 1.03
"""A variant has to be faster by more than noise, or if a tie is enough, must not be slower by more than noise."""

PROBES = 32
"""Samples that are compared."""

RATIO = 1.5
"""A variant is refused if its errors are greater than those of the usual way by more than half: by the geometric mean
of their ratios, sample by sample. The error of one sample is chance, and a few great ones decide an arithmetic mean. Of
32 random BERTs in bf16 (6 and 12 layers, width 32 and 128) the geometric mean for texts without padding, of 32 texts,
was 0.70 to 1.32, the ratio of arithmetic means 0.35 to 1.54, of medians 0.68 to 1.60, of greatest errors 0.09 to 4.8.
"""

WORST_RATIO = 10.0
"""The same of the greatest errors. A fault in few samples, such as the last or the longest, hardly moves the mean."""

LEAST_ERROR = 1e-8
"""An error below this counts as this. Sums in another order in fp32 make 1e-12, TF32 makes 5e-7, and storing vectors as
float16 gives 4e-8. So it is the bar in fp32, where the usual way has no error, and if there is no room for weights
in fp32: there a variant has to give the vectors of the usual one."""


def places(rows: int) -> torch.Tensor:
    """Rows of a batch that are compared: the first, the last, and others between them."""
    return torch.linspace(0, rows - 1, min(rows, PROBES)).long()


class AccuracyCheck:
    """Reference vectors for the check of a variant.

    Args:
        usual: vectors of the usual way, of shape (rows, dim).
        exact: those of the same rows in fp32. Rows without a finite vector in the usual way are left out.
    """

    def __init__(self, usual: torch.Tensor, exact: torch.Tensor) -> None:
        self._exact = exact
        errors = _errors(usual, exact)
        self._finite = errors.isfinite()
        self._usual = errors[self._finite]

    def ratio(self, vectors: torch.Tensor) -> float:
        """Error of a variant with these vectors, as a multiple of the usual variant's error, see `RATIO`."""
        return float((self._kept_errors(vectors) / self._usual).log().mean().exp())

    def refusal(self, vectors: torch.Tensor) -> str:
        """Why a variant with these vectors is refused; "" if it is not."""
        if not len(self._usual):
            return "the usual way gives no finite vector"
        ratio, worst = self.ratio(vectors), float(self._kept_errors(vectors).max() / self._usual.max())
        if ratio <= RATIO and worst <= WORST_RATIO:
            return ""
        return f"its error is {ratio:.2g} times that of the usual way, and {worst:.2g} times in the worst sample"

    def _kept_errors(self, vectors: torch.Tensor) -> torch.Tensor:
        return _errors(vectors, self._exact)[self._finite]


def _errors(vectors: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """1 - cosine of each row, infinite if that is no number; float64 on the CPU."""
    cosines = cosine_similarity(vectors.double(), exact.to(vectors.device).double())
    return torch.where(cosines.isfinite(), 1 - cosines, torch.inf).clamp(min=LEAST_ERROR).cpu()


class RefusedError(Exception):
    """Reason for which an optional path is not used."""


def attempt(name: str, path: Callable[[], T], usual: Callable[[], object]) -> T:
    """Result of an optional path. The supervisor is informed before; the caller ends the attempt by `PATHS.settle`.

    Args:
        usual: computes something in the usual way, and waits for it; it shows whether the device still works.

    Raises RefusedError if the path fails or was disabled, DeviceError if it left a device on which nothing works.
    """
    if name in PATHS.without:
        raise RefusedError("the process before this one died with it")
    PATHS.try_out(name)
    try:
        return path()
    except (RefusedError, DeviceError):
        raise
    except Exception as error:
        if is_device_fault(error):
            with translated_device_errors():
                usual()
        first = (str(error).splitlines() or [""])[0]
        raise RefusedError(f"{type(error).__name__}: {first}"[:200]) from error


@dataclass(frozen=True, slots=True)
class Variant:
    """Another way to compute what the fastest variant so far computes.

    Attributes:
        make: makes it from the fastest so far. Whatever it raises, the variant is not used.
        undo: reverts what `make` changed if the variant is not used.
        is_bounded: whether `TRIAL_S` holds for it; if not, `make` has a bound of its own.
        takes_tie: whether it is used if it is as fast as what was used before it.
    """

    name: str
    make: Callable[[Encode], Encode]
    undo: Callable[[], None] = lambda: None
    is_bounded: bool = True
    takes_tie: bool = False


@dataclass(slots=True)
class Fastest:
    """Outcome of a trial.

    Attributes:
        encode: the fastest.
        path: names of the variants in use, joined by "+"; "eager" if there is none.
        rows_per_s: variant -> rows per second, that of the usual pass first.
        refused: variant -> why it is not used, unless for its speed.
    """

    encode: Encode
    path: str = "eager"
    rows_per_s: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def fastest(
    usual: Encode,
    variants: Sequence[Variant],
    batch: torch.Tensor,
    *,
    exact: torch.Tensor | None,
    wait: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> Fastest:
    """Try each variant on top of those that are used already.

    Args:
        usual: used if nothing is faster.
        exact: vectors in fp32 of the rows at `places`, for `AccuracyCheck`; None if there are none, and a variant has
            to give the vectors of the usual pass.
        wait: returns when the device has computed everything.

    Raises DeviceError if the usual pass does not work any more, and DeviceFullError if there is no room for it.
    """
    began = clock()
    speed = partial(_speed, batch=batch, wait=wait, clock=clock)
    with translated_device_errors():
        compared = places(len(batch))
        expected = usual(batch)[compared]
        check = AccuracyCheck(expected, expected if exact is None else exact)
        outcome = Fastest(usual, rows_per_s={"eager": speed(usual)})
    best = outcome.rows_per_s["eager"]

    def tried(variant: Variant) -> tuple[Encode, float]:
        encode = variant.make(outcome.encode)
        if why := check.refusal(encode(batch)[compared]):
            raise RefusedError(why)
        return encode, speed(encode)

    for variant in variants:
        name = variant.name
        if variant.is_bounded and clock() - began + ROUNDS * PASSES * len(batch) / best > TRIAL_S:
            outcome.refused[name] = "no time"
            continue
        is_used = False
        try:
            encode, rate = attempt(name, partial(tried, variant), lambda: (usual(batch), wait()))
            outcome.rows_per_s[name] = rate
            is_used = rate > (best / GAIN if variant.takes_tie else best * GAIN)
        except RefusedError as refusal:
            outcome.refused[name] = str(refusal)
        if is_used:
            outcome.encode, best = encode, rate
            outcome.path = name if outcome.path == "eager" else f"{outcome.path}+{name}"
        else:
            variant.undo()
        PATHS.settle(name, is_taken=is_used)
    return outcome


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
