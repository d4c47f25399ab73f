"""What a model costs at its first batch only is not what a later batch may take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from core.units import Sample
from worker.embedders.warm_up import warm_up


class SlowAtFirst:
    """A model whose first call takes long, as on a device that has yet to load its kernels."""

    dims = {"text": 4}  # noqa: RUF012
    batch_size = 8
    fingerprint = "f"

    def __init__(self) -> None:
        self.calls = 0

    def prepare(self, samples: Sequence[Sample]) -> list[Any]:
        return [sample.text for sample in samples]

    def embed(self, batch: Sequence[Any]) -> dict[str, np.ndarray]:
        self.calls += 1
        if self.calls == 1:
            time.sleep(0.3)
        return {"text": np.zeros((len(batch), 4), dtype=np.float32)}


def test_the_time_of_the_first_batch_is_not_what_is_expected_of_later_ones() -> None:
    assert warm_up(SlowAtFirst(), ("text",)) < 0.15
