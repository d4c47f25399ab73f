"""The number of tokens that suits a forward pass, by the speeds that a device shows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from embq.core.errors import DeviceFullError
from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.device.batch_size import (
    PROBE_S,
    best_budget,
    may_probe,
    may_probe_images,
    speeds_of_budgets,
    speeds_of_sizes,
)
from embq.worker.embedders.device.tuning import tune
from tests.support.fakes.clock import FakeClock


class Timed:
    """A text model on a device of known speed.

    Args:
        speeds: tokens of a pass -> tokens per second; that of the nearest smaller number of tokens counts.
        room: most tokens of a pass.
    """

    batch_size, token_budget = 256, 2048

    def __init__(self, clock: FakeClock, speeds: Mapping[int, float], *, room: int = 1_000_000) -> None:
        self.clock, self.speeds, self.room = clock, speeds, room

    def prepare(self, samples: Sequence[Sample]) -> list[int]:
        return [64 for _ in samples]

    def length(self, prepared: int) -> int:
        return prepared

    def embed(self, batch: Sequence[int]) -> dict[str, np.ndarray]:
        tokens = sum(batch)
        if tokens > self.room:
            raise DeviceFullError("full")
        self.clock.now += tokens / self.speeds[max(at for at in self.speeds if at <= tokens)]
        return {}


FAST = 1e6


@pytest.mark.parametrize(
    ("speeds", "room", "chosen"),
    [
        ({0: FAST}, 10**6, 2048),
        ({0: FAST, 4096: 1.04 * FAST}, 10**6, 2048),
        ({0: FAST, 4096: 1.2 * FAST}, 10**6, 4096),
        ({0: FAST, 4096: 1.2 * FAST, 8192: 1.21 * FAST}, 10**6, 4096),
        ({0: FAST, 4096: 1.2 * FAST, 8192: 1.4 * FAST}, 10**6, 8192),
        ({0: FAST, 4096: 1.2 * FAST, 8192: 1.4 * FAST}, 5000, 4096),
        ({0: FAST, 4096: 1.2 * FAST}, 100, 2048),
        ({0: 1.2 * FAST, 2048: FAST}, 10**6, 1024),
    ],
    ids=["all alike", "noise", "more", "nearly the best", "much more", "no room", "no room at all", "less"],
)
def test_the_smallest_budget_that_is_as_good_as_the_best_is_taken_where_it_gains_enough(
    clock: FakeClock, speeds: dict[int, float], room: int, chosen: int
) -> None:
    embedder: Any = Timed(clock, speeds, room=room)
    assert best_budget(speeds_of_budgets(embedder, clock)) == chosen


def test_a_slow_device_is_not_kept_from_its_work(clock: FakeClock) -> None:
    embedder: Any = Timed(clock, {0: 500.0, 4096: 1e6})
    began = clock.now
    assert list(speeds_of_budgets(embedder, clock)) == [2048]
    assert clock.now - began < PROBE_S


def test_a_fast_device_that_is_as_long_over_one_text_as_over_many_is_not_taken_for_a_slow_one(clock: FakeClock) -> None:
    embedder: Any = Timed(clock, {0: 8_000.0, 1024: FAST})
    embedder.token_budget = 16_384
    assert len(speeds_of_budgets(embedder, clock)) > 1
    pictures: Any = Looks(clock, {0: 125.0, 16: 20_000.0})
    assert len(speeds_of_sizes(pictures, ("image",), clock)) > 1


def test_no_pass_has_more_texts_than_a_batch(clock: FakeClock) -> None:
    embedder: Any = Timed(clock, {0: FAST})
    embedder.batch_size = 64
    assert max(speeds_of_budgets(embedder, clock)) == 64 * 64


@pytest.mark.parametrize(
    ("spec", "batch_size", "may"),
    [
        ("minilm", 0, True),
        ("minilm", 8, False),
        ("minilm?batch_size=8", 0, False),
        ("minilm?tokens=8", 0, False),
        ("minilm?normalize=false", 0, True),
    ],
)
def test_who_names_a_size_is_spared_the_trial(clock: FakeClock, spec: str, batch_size: int, may: bool) -> None:
    model = ModelConfig(spec=spec, modalities=("text",), precision="fp32")
    embedder: Any = Timed(clock, {})
    assert may_probe(model, embedder, batch_size=batch_size) == may
    embedder.token_budget = 0
    assert not may_probe(model, embedder, batch_size=batch_size)


# --- images ---


class Looks(Timed):
    """The same of images."""

    batch_size, token_budget, window, image_bytes = 256, 0, 256, 224 * 224 * 3

    def prepare(self, samples: Sequence[Sample]) -> list[int]:
        assert all(sample.image for sample in samples)
        return [1 for _ in samples]

    images = None

    def with_image(self, sample: Sample, row: Any) -> int:
        return 1

    def embed_in_fp32(self, batch: Sequence[int]) -> dict[str, np.ndarray]:
        return self.embed(batch)

    dims, fingerprint, cost = {}, "f", sum


@pytest.mark.parametrize(
    ("speeds", "room", "tried", "chosen"),
    [
        ({0: 1e4}, 2000, [256, 128, 512, 1024], 256),
        ({0: 1e4, 512: 1.2e4}, 2000, [256, 128, 512, 1024], 512),
        ({0: 1e4, 512: 1.2e4, 1024: 1.3e4}, 2000, [256, 128, 512, 1024], 1024),
        ({0: 1e4, 512: 1.2e4}, 600, [256, 128, 512], 512),
        ({0: 1.2e4, 256: 1e4}, 2000, [256, 128, 512], 128),
        ({0: 1e4}, 100, [64, 32], 64),
        ({0: 1e4}, 1, [1], 1),
        ({0: 100.0, 512: 1e4}, 2000, [256], 256),
    ],
    ids=["all alike", "more", "much more", "no room for the most", "less", "little room", "one alone", "slow"],
)
def test_a_pass_has_as_many_images_as_gain_something_and_fit(
    clock: FakeClock, speeds: dict[int, float], room: int, tried: list[int], chosen: int
) -> None:
    embedder: Any = Looks(clock, speeds, room=room)
    found = speeds_of_sizes(embedder, ("image",), clock)
    assert list(found) == tried
    assert best_budget(found) == chosen


def test_a_device_without_room_for_a_single_image_says_so(clock: FakeClock) -> None:
    embedder: Any = Looks(clock, {0: 1e4}, room=0)
    with pytest.raises(DeviceFullError):
        speeds_of_sizes(embedder, ("image",), clock)


@pytest.mark.parametrize(
    ("spec", "modalities", "device", "batch_size", "may"),
    [
        ("open_clip:ViT-B-32/openai", ("image",), "cuda:0", 0, True),
        ("open_clip:ViT-B-32/openai", ("image", "text"), "cuda", 0, True),
        ("open_clip:ViT-B-32/openai", ("text",), "cuda", 0, False),
        ("open_clip:ViT-B-32/openai", ("image",), "cpu", 0, False),
        ("open_clip:ViT-B-32/openai", ("image",), "cuda", 64, False),
        ("open_clip:ViT-B-32/openai?batch_size=64", ("image",), "cuda", 0, False),
    ],
)
def test_only_a_gpu_tries_how_many_images_and_only_where_nobody_has_said(
    clock: FakeClock, spec: str, modalities: tuple[str, ...], device: str, batch_size: int, may: bool
) -> None:
    model = ModelConfig(spec=spec, modalities=modalities, precision="fp32")
    embedder: Any = Looks(clock, {})
    assert may_probe_images(model, embedder, batch_size=batch_size, device=device) == may
    stub: Any = Timed(clock, {})
    assert not may_probe_images(model, stub, batch_size=batch_size, device=device)


def test_what_was_found_is_what_a_worker_keeps_to(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embq.worker.embedders.device.tuning.lacking", str)  # this machine may have no compiler

    class Instant(Looks):
        """Fast in all sizes but one."""

        def embed(self, batch: Sequence[int]) -> dict[str, np.ndarray]:
            time.sleep(0 if len(batch) in (1, 512) else 0.02)
            return {}

        def choose_variant(self, *, compile_s: float) -> None:
            ways.append((self.batch_size, compile_s))

    ways: list[tuple[int, float]] = []
    embedder: Any = Instant(FakeClock(), {})
    model = ModelConfig(spec="open_clip:ViT-B-32/openai", modalities=("image",), precision="bf16")
    with caplog.at_level("INFO", logger="worker"):
        tune(embedder, model, device="cuda:0", compile_s=7.0)
    assert embedder.batch_size == embedder.window == 512
    assert ways == [(512, 7.0)], "the way is tried with passes of the size that was found"
    assert "batch_size_chosen" in caplog.text
    tune(embedder, model, device="cuda:0", batch_size=512)
    assert caplog.text.count("batch_size_chosen") == 1
    assert ways == [(512, 7.0), (512, 0.0)]
