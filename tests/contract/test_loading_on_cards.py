"""A worker process loads a model onto simulated cards: too small, full for a moment, without code in torch."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from embq.core.errors import ConfigError, ModelError
from embq.core.models import ModelConfig
from embq.worker import model_service
from tests.support.fakes import cuda as fake_cuda
from tests.support.lazy import lazy
from tests.support.models.text import save_trunk

torch = lazy("torch")


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there are real cards")
SMALL = 30_000
"""Bytes: less than the tiny model."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = save_trunk(tmp_path_factory.mktemp("models") / "bert", "bert")
    return ModelConfig(spec=f"hf:{folder}", modalities=("text",), precision="fp32")


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices on which models were loaded; a device that is full is tried again at once."""
    seen: list[str] = []
    load = model_service.load
    monkeypatch.setattr(model_service, "FULL_PAUSE_S", 0.0)
    monkeypatch.setattr(model_service, "load", lambda config, device: (seen.append(device), load(config, device))[1])
    return seen


def place() -> Any:
    """A process whose card is the machine's fourth."""
    return SimpleNamespace(
        options=SimpleNamespace(torch_device="cuda:0", device="cuda:3", batch_size=0),
        settings=SimpleNamespace(compile_s=0.0),
        board=SimpleNamespace(expect=lambda stage, seconds: None),
        stopped=lambda: False,
    )


def test_a_model_that_does_not_fit_is_refused_after_three_attempts_and_leaves_nothing(
    model: ModelConfig, loads: list[str]
) -> None:
    with fake_cuda.installed([{"bytes": SMALL}]) as cards:
        with pytest.raises(ModelError, match="does not fit on the device") as caught:
            model_service.load_model(model, place())
        assert loads == ["cuda:0"] * model_service.FULL_ATTEMPTS
        assert "--workers" in caught.value.next_step
        caught.value.__cause__ = caught.value.__traceback__ = None
        del caught
        gc.collect()
        assert cards.cards[0].used == 0


def test_a_card_that_becomes_free_meanwhile_serves(
    model: ModelConfig, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_cuda.installed([{}]) as cards:
        (card,) = cards.cards
        card.used = card.bytes  # by another process

        def other_leaves(device: str) -> None:
            card.used = 0

        monkeypatch.setattr(model_service, "free_memory", other_leaves)
        assert model_service.load_model(model, place()).dims == {"text": 32}
        assert loads == ["cuda:0", "cuda:0"]


def test_a_card_that_torch_has_no_code_for_is_refused_before_anything_is_loaded(
    model: ModelConfig, loads: list[str]
) -> None:
    cards = [{"name": "NVIDIA GeForce GTX 1070", "capability": (6, 1)}]
    with (
        fake_cuda.installed(cards),
        pytest.raises(ConfigError, match=r"NVIDIA GeForce GTX 1070 has compute capability 6\.1") as caught,
    ):
        model_service.load_model(model, place())
    assert "whl/cu126" in caught.value.next_step
    assert loads == []


def test_a_process_that_sees_two_cards_computes_on_neither(model: ModelConfig, loads: list[str]) -> None:
    with fake_cuda.installed([{}, {}]), pytest.raises(ConfigError, match="sees 2 devices"):
        model_service.load_model(model, place())
    assert loads == []
