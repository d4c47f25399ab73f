"""Passes that are formed from requests, and what happens to requests where one fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embq.core.errors import DeviceError
from embq.core.models import ModelConfig
from embq.retrieval.serving.embeddings.loading import Loaded
from embq.retrieval.serving.embeddings.model import ServedModel
from embq.retrieval.serving.embeddings.passes import TURN_TEXTS, Passes
from embq.retrieval.serving.metrics import Metrics
from embq.worker.embedders.base import padded_tokens
from embq.worker.embedders.stub import Ready, StubEmbedder, stub_vector

DIM = 8


def passes(*, batch_size: int = 64, token_budget: int = 0) -> Passes[str]:
    embedder: Any = SimpleNamespace(
        batch_size=batch_size, token_budget=token_budget, cost=padded_tokens, length=lambda prepared: prepared
    )
    return Passes(embedder)


def lengths(batch: Sequence[Any]) -> list[int]:
    return [entry.tokens for entry in batch]


def test_a_sweep_takes_up_what_comes_and_is_not_longer() -> None:
    waiting = passes(token_budget=20)
    waiting.add("a", [9, 4, 10, 4])
    assert lengths(waiting.next()) == [10, 9]
    waiting.add("b", [12, 4])
    assert lengths(waiting.next()) == [4, 4, 4], "what is longer waits for the next sweep"
    assert lengths(waiting.next()) == [12]
    assert len(waiting) == 0


def test_short_texts_are_not_padded_to_long_ones_where_a_pass_of_their_own_costs_less() -> None:
    waiting = passes(token_budget=320)
    waiting.add("a", [5, 40, 5, 39, 5, 5])
    assert lengths(waiting.next()) == [40, 39]
    waiting.add("b", [4, 4])
    assert lengths(waiting.next()) == [5, 5, 5, 5, 4, 4]


@pytest.mark.parametrize(("rare", "many"), [(50, 1), (1, 50), (5, 5)])
def test_no_text_is_left_behind_by_others_that_go_on_coming(rare: int, many: int) -> None:
    waiting = passes(batch_size=2)
    waiting.add("many", [many] * 4)
    waiting.next()
    waiting.add("rare", [rare])
    owners = []
    for _ in range(4):
        waiting.add("many", [many] * 2)
        owners += [entry.owner for entry in waiting.next()]
    assert "rare" in owners


def test_a_small_request_does_not_wait_for_a_large_one() -> None:
    waiting = passes(batch_size=TURN_TEXTS)
    waiting.add("large", [5] * 10 * TURN_TEXTS)
    waiting.add("small", [5])
    assert "small" in [entry.owner for _ in range(3) for entry in waiting.next()]


class Faulty(StubEmbedder):
    """Gives no finite vector of "big" in a usual pass, and ends with its device at "break"."""

    def embed(self, batch: Sequence[Ready]) -> dict[str, np.ndarray]:
        vectors = super().embed(batch)["text"]
        for row, vector in enumerate(vectors):
            if np.array_equal(vector, stub_vector(b"big", DIM)):
                vectors[row] = np.inf
            if np.array_equal(vector, stub_vector(b"break", DIM)):
                raise DeviceError("an illegal memory access")
            if np.array_equal(vector, stub_vector(b"odd", DIM)):
                raise IndexError(row)
        return {"text": vectors}


@pytest.fixture
def served() -> Iterator[tuple[ServedModel, list[DeviceError]]]:
    config = ModelConfig(spec=f"stub:{DIM}", modalities=("text",), precision="fp32")
    times: Mapping[str, float] = {"s_per_sample": 0.0, "s_per_token": 0.0, "s_per_batch": 0.0}
    embedder = Faulty(config, dim=DIM, batch_size=4, **times)
    broken: list[DeviceError] = []
    model = ServedModel(Loaded(name="m", config=config, embedder=embedder), Metrics(), broken.append)
    model.start()
    yield model, broken
    model.stop()


def test_a_vector_that_is_not_finite_is_computed_once_more(served: tuple[ServedModel, list[DeviceError]]) -> None:
    vectors = served[0].submit(["small", "big"]).future.result(60)
    assert np.array_equal(vectors, [stub_vector(b"small", DIM), stub_vector(b"big", DIM)])


def test_a_bug_fails_one_pass_and_a_broken_device_all(served: tuple[ServedModel, list[DeviceError]]) -> None:
    model, broken = served
    error = model.submit(["odd"]).future.exception(60)
    assert "embq has a bug" in str(error)
    assert model.submit(["a"]).future.result(60).shape == (1, DIM)
    assert isinstance(model.submit(["break"]).future.exception(60), DeviceError)
    model._thread.join(60)
    assert [error.message for error in broken] == ["an illegal memory access"]
    with pytest.raises(DeviceError):
        model.submit(["a"])
