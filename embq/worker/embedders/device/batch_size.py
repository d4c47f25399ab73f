"""Measures the batch size of a forward pass on this device: tokens of text models, or images."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from embq.core.errors import DeviceFullError, SampleError
from embq.core.models import ModelConfig, ModelSpec
from embq.core.units import Sample
from embq.worker.embedders.base import Embedder, ImageEmbedder, Prepared
from embq.worker.embedders.device.warm_up import made_up

TEXT = "some words of a text as they come " * 8
"""About 64 tokens."""

FACTORS = (0.5, 2, 4, 8)
"""Factors on the device's usual budget of tokens, tried in this order."""

IMAGE_FACTORS = (0.5, 2, 4)
"""Factors on the device's usual number of images, tried in this order."""

IMAGES = 32
"""Distinct images of a timed pass, which repeats them, so that they lie in memory as those of a file do."""

ROUNDS = 3
"""Each budget is timed so often, and its fastest pass counts: others may use the device as well."""

PROBE_S = 1.5
"""A device on which that takes longer keeps its usual budget."""

SLOWER_ALONE = 4
"""A sample alone, which tells whether the device is that slow, may have a fraction of the speed of many."""

FEW = 16
"""Samples of a small pass. A GPU takes as long over one sample of a deep model as over this many: nomic-v1.5 on an H100
8 ms, at 540,000 tokens a second in larger passes."""

GAIN, NEARLY = 1.05, 0.98
"""A budget that is not faster than the usual one by more than a hand's breadth of noise is not taken; of those that are
as good as the best, the smallest is."""


def may_probe(model: ModelConfig, embedder: Embedder, *, batch_size: int) -> bool:
    """Whether to choose the budget here: passes are bounded by tokens, and the user named no size.

    Args:
        batch_size: the worker's option; 0 if it was not given.
    """
    return embedder.token_budget > 0 and not _has_size(model, batch_size, "tokens", "batch_size")


def may_probe_images(model: ModelConfig, embedder: Embedder, *, batch_size: int, device: str) -> bool:
    """Whether to choose the number of images of a pass here: on a GPU, which may gain from more of them.

    Args:
        batch_size: the worker's option; 0 if it was not given.
    """
    has_images = "image" in model.modalities and isinstance(embedder, ImageEmbedder)
    return device.startswith("cuda") and has_images and not _has_size(model, batch_size, "batch_size")


def _has_size(model: ModelConfig, batch_size: int, *params: str) -> bool:
    """Whether the size is not chosen here: the user named one, or several models share a pass."""
    if model.members or batch_size:
        return True
    spec = ModelSpec.parse(model.spec)
    return any(spec.param(name, "") for name in params)


def speeds_of_budgets(embedder: Embedder, clock: Callable[[], float] = time.perf_counter) -> dict[int, float]:
    """Budget -> tokens per second, the usual budget first; of no other one if the device is slow or too small."""
    (prepared,) = embedder.prepare([Sample(ordinal=0, key="probe", text=TEXT)])
    if isinstance(prepared, SampleError):
        raise prepared
    length = embedder.length(prepared)
    most = (embedder.batch_size + 1) * length - 1
    speed = partial(_speed, embedder, prepared, clock=clock)
    return _speeds(speed, length, embedder.token_budget, FACTORS, clock, passes=ROUNDS, most=most)


def speeds_of_sizes(
    embedder: Embedder, modalities: Sequence[str], clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """Samples of a pass -> samples per second, the usual number first, or the first that the device has room for.

    Raises DeviceFullError if it has room for none.
    """
    prepared = embedder.prepare([made_up(modalities)] * IMAGES)
    for error in prepared:
        if isinstance(error, SampleError):
            raise error
    speed = partial(_steady_speed, embedder, prepared, clock=clock)
    return _speeds(speed, 1, embedder.batch_size, IMAGE_FACTORS, clock, passes=ROUNDS + 1, may_halve=True)


def _speeds(
    speed: Callable[[int], float],
    sample_size: int,
    usual: int,
    factors: Sequence[float],
    clock: Callable[[], float],
    *,
    passes: int,
    most: int = sys.maxsize,
    may_halve: bool = False,
) -> dict[int, float]:
    """Size of a pass -> its speed, the usual size first.

    Args:
        speed: measures `passes` passes of a size: tokens or images per second.
        sample_size: size of one sample.
        most: largest size to try.
        may_halve: whether a usual size for which there is no room is halved. If not, no other size is tried then: there
            may be no room for now only, and passes are made smaller and larger later (`embq.worker.stages.batching`).
    """
    began = clock()
    base_speed = speed(sample_size)
    is_in_doubt = passes * usual / base_speed > SLOWER_ALONE * PROBE_S
    if is_in_doubt and passes * FEW * sample_size / base_speed <= PROBE_S:
        with suppress(DeviceFullError):
            base_speed = speed(FEW * sample_size)
    if passes * usual / base_speed > SLOWER_ALONE * PROBE_S:
        return {usual: base_speed}
    speeds: dict[int, float] = {}
    while not speeds:
        try:
            speeds[usual] = speed(usual)
        except DeviceFullError:
            if not may_halve:
                return {usual: base_speed}
            if usual == sample_size:
                raise
            usual = most = usual // 2
    for size in (int(usual * factor) for factor in factors):
        # Its passes, and that many of a larger one behind it, must fit into the time.
        if not 0 < size <= most or clock() - began + passes * size / max(speeds.values()) > PROBE_S:
            break
        try:
            speeds[size] = speed(size)
        except DeviceFullError:
            break
        if size > usual and speeds[size] < NEARLY * max(speeds.values()):
            break
    return speeds


def best_budget(speeds: Mapping[int, float]) -> int:
    """The smallest budget that is as good as the best, or the usual one, which is the first, where little is gained."""
    usual, best = next(iter(speeds)), max(speeds.values())
    if best <= GAIN * speeds[usual]:
        return usual
    return min(budget for budget, speed in speeds.items() if speed >= NEARLY * best)


def _steady_speed(embedder: Embedder, samples: Sequence[Prepared], count: int, *, clock: Callable[[], float]) -> float:
    """Samples per second of passes of `count`, each begun before the vectors of the one before are here."""
    batch = [samples[place % len(samples)] for place in range(count)]
    dict(embedder.embed(batch))  # what happens once is not timed
    began = clock()
    pending = embedder.embed(batch)
    for _ in range(ROUNDS - 1):
        after = embedder.embed(batch)
        dict(pending)
        pending = after
    dict(pending)
    return ROUNDS * count / max(clock() - began, 1e-9)


def _speed(embedder: Embedder, prepared: Prepared, budget: int, *, clock: Callable[[], float]) -> float:
    """Tokens per second of the fastest pass of a budget."""
    length = embedder.length(prepared)
    batch = [prepared] * max(1, budget // length)
    shortest = float("inf")
    for _ in range(ROUNDS):
        began = clock()
        dict(embedder.embed(batch))  # its vectors are here
        shortest = min(shortest, clock() - began)
    return len(batch) * length / max(shortest, 1e-9)
