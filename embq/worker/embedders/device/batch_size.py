"""Measures the batch size of a forward pass on this device: tokens of text models, or images."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

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
"""Samples of a small pass. A GPU takes as long over one sample of a deep model as over so many: nomic-v1.5 on an H100
8 ms, at 540,000 tokens a second in larger passes."""

GAIN, NEARLY = 1.05, 0.98
"""A budget that is not faster than the usual one by more than a hand's breadth of noise is not taken; of those that are
as good as the best, the smallest is."""


def may_probe(model: ModelConfig, embedder: Embedder, *, batch_size: int) -> bool:
    """Whether the budget is ours to choose: passes are bounded by tokens, and the user named no size of theirs.

    Args:
        batch_size: the worker's option; 0 where it was not given.
    """
    if not embedder.token_budget or model.members or batch_size:
        return False
    spec = ModelSpec.parse(model.spec)
    return not spec.param("tokens", "") and not spec.param("batch_size", "")


def speeds_of_budgets(embedder: Embedder, clock: Callable[[], float] = time.perf_counter) -> dict[int, float]:
    """Budget -> tokens per second, the usual budget first; of no other one where the device is slow or too small."""
    (prepared,) = embedder.prepare([Sample(ordinal=0, key="probe", text=TEXT)])
    if isinstance(prepared, SampleError):
        raise prepared

    def speed(budget: int) -> float:
        return _speed(embedder, prepared, budget, clock)

    began = clock()
    usual = embedder.token_budget
    alone = _small_speed(speed, embedder.length(prepared), usual, ROUNDS)
    if ROUNDS * usual / alone > SLOWER_ALONE * PROBE_S:
        return {usual: alone}
    try:
        speeds = {usual: speed(usual)}
    except DeviceFullError:
        # Perhaps for now only: passes are made smaller and larger while it works (`embq.worker.stages.batching`).
        return {usual: alone}
    for factor in FACTORS:
        budget = int(usual * factor)
        if budget // embedder.length(prepared) > embedder.batch_size:
            break
        # Its passes, and that many of a larger one behind it, must fit into the time.
        if clock() - began + ROUNDS * budget / max(speeds.values()) > PROBE_S:
            break
        try:
            speeds[budget] = speed(budget)
        except DeviceFullError:
            break
        if factor > 1 and speeds[budget] < NEARLY * max(speeds.values()):
            break
    return speeds


def best_budget(speeds: Mapping[int, float]) -> int:
    """The smallest budget that is as good as the best, or the usual one, which is the first, where little is gained."""
    usual, best = next(iter(speeds)), max(speeds.values())
    if best <= GAIN * speeds[usual]:
        return usual
    return min(budget for budget, speed in speeds.items() if speed >= NEARLY * best)


def may_probe_images(model: ModelConfig, embedder: Embedder, *, batch_size: int, device: str) -> bool:
    """Whether the number of images of a pass is ours to choose: on a GPU, which may gain from more of them.

    Args:
        batch_size: the worker's option; 0 where it was not given.
    """
    if not device.startswith("cuda") or "image" not in model.modalities or model.members or batch_size:
        return False
    return isinstance(embedder, ImageEmbedder) and not ModelSpec.parse(model.spec).param("batch_size", "")


def speeds_of_sizes(
    embedder: Embedder, modalities: Sequence[str], clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """Samples of a pass -> samples per second, the usual number first, or the first that the device has room for.

    Raises DeviceFullError where it has room for none.
    """
    ready = embedder.prepare([made_up(modalities)] * IMAGES)
    for one in ready:
        if isinstance(one, SampleError):
            raise one

    def speed(count: int) -> float:
        return _steady_speed(embedder, [ready[place % IMAGES] for place in range(count)], clock)

    began = clock()
    usual = embedder.batch_size
    alone = _small_speed(speed, 1, usual, ROUNDS + 1)
    if (ROUNDS + 1) * usual / alone > SLOWER_ALONE * PROBE_S:
        return {usual: alone}
    speeds: dict[int, float] = {}
    while not speeds:
        try:
            speeds[usual] = speed(usual)
        except DeviceFullError:
            if usual == 1:
                raise
            usual //= 2
    for factor in IMAGE_FACTORS:
        count = int(usual * factor)
        is_known_not_to_fit = factor > 1 and usual < embedder.batch_size
        if not count or is_known_not_to_fit or clock() - began + (ROUNDS + 1) * count / max(speeds.values()) > PROBE_S:
            break
        try:
            speeds[count] = speed(count)
        except DeviceFullError:
            break
        if factor > 1 and speeds[count] < NEARLY * max(speeds.values()):
            break
    return speeds


def _small_speed(speed: Callable[[int], float], one: int, usual: int, rounds: int) -> float:
    """The speed of a pass of one sample, or of `FEW` where it leaves in doubt whether the device is slow.

    Args:
        one: the size of one sample, in tokens or images.
        usual: the usual size of a pass.
        rounds: how often each pass is made.
    """
    alone = speed(one)
    if rounds * usual / alone <= SLOWER_ALONE * PROBE_S or rounds * FEW * one / alone > PROBE_S:
        return alone
    try:
        return speed(FEW * one)
    except DeviceFullError:
        return alone


def _steady_speed(embedder: Embedder, batch: Sequence[Prepared], clock: Callable[[], float]) -> float:
    """Samples per second where a pass is begun before the vectors of the one before are here."""
    dict(embedder.embed(batch))  # what happens once is not timed
    began = clock()
    before = embedder.embed(batch)
    for _ in range(ROUNDS - 1):
        after = embedder.embed(batch)
        dict(before)
        before = after
    dict(before)
    return ROUNDS * len(batch) / max(clock() - began, 1e-9)


def _speed(embedder: Embedder, prepared: Prepared, budget: int, clock: Callable[[], float]) -> float:
    length = embedder.length(prepared)
    batch: Sequence[Prepared] = [prepared] * max(1, budget // length)
    shortest = float("inf")
    for _ in range(ROUNDS):
        began = clock()
        dict(embedder.embed(batch))  # its vectors are here
        shortest = min(shortest, clock() - began)
    return len(batch) * length / max(shortest, 1e-9)
