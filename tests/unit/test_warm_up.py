"""The cost of a model's first batch is not the time that a later one may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from embq.core.units import Sample
from embq.worker.embedders.base import padded_tokens
from embq.worker.embedders.device import warm_up as module
from tests.support.fakes.clock import FakeClock


class SlowAtFirst:
    """A model whose first call takes long, as on a device that has yet to load its kernels."""

    dims = {"text": 4}  # noqa: RUF012
    batch_size = window = 8
    token_budget = 0
    cost = staticmethod(padded_tokens)
    fingerprint = "f"

    def __init__(self, clock: FakeClock) -> None:
        self.calls = 0
        self.clock = clock

    def prepare(self, samples: Sequence[Sample]) -> list[Any]:
        return [sample.text for sample in samples]

    def length(self, prepared: Any) -> int:
        return 1

    def embed_in_fp32(self, batch: Sequence[Any]) -> dict[str, np.ndarray]:
        return self.embed(batch)

    def embed(self, batch: Sequence[Any]) -> dict[str, np.ndarray]:
        self.calls += 1
        self.clock.now += 30.0 if self.calls == 1 else 0.5
        return {"text": np.zeros((len(batch), 4), dtype=np.float32)}


def test_the_time_of_the_first_batch_is_not_what_is_expected_of_later_ones(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.time, "monotonic", clock)
    assert module.warm_up(SlowAtFirst(clock), ("text",)) == 0.5
