"""LoRA adapters: the weights are those that PEFT merges, and nothing else of an adapter is taken."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from embq.core.errors import ModelError
from embq.core.models import ModelConfig
from embq.core.run.layout import INPUTS
from embq.core.units import Sample
from embq.worker.embedders.query.loading import open_query_model
from embq.worker.embedders.registry import load
from tests.support.lazy import lazy
from tests.support.models.text import CORPUS, save_trunk

transformers = lazy("transformers")
torch = lazy("torch")
lazy("sentence_transformers")


SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
LAYERS = ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trunk(tmp_path_factory.mktemp("base") / "qwen2", "qwen2", seed=1)


def save_adapter(folder: Path, base: Path, *, prefix: str = "base_model.model.", **settings: Any) -> dict[str, Any]:
    """An adapter as PEFT saves it; gives layer -> its factors A and B."""
    folder.mkdir()
    trunk = transformers.AutoModel.from_pretrained(base)
    made = {}
    for number, name in enumerate(LAYERS):
        out, into = trunk.get_submodule(name).weight.shape
        made[name] = (torch.randn(4 + number, into) * 0.3, torch.randn(out, 4 + number) * 0.3)
    tensors = {
        f"{prefix}{name}.lora_{kind}.weight": one
        for name, both in made.items()
        for kind, one in zip("AB", both, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({**SETTINGS, "base_model_name_or_path": "some/base", **settings})
    )
    return made


def vectors(spec: str) -> np.ndarray:
    embedder = load(ModelConfig(spec=spec, modalities=("text",), precision="fp32"), "cpu")
    prepared = embedder.prepare([Sample(ordinal=n, key=str(n), text=text) for n, text in enumerate(CORPUS)])
    return embedder.embed(prepared)["text"]


@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.model.model.", ""])
@pytest.mark.parametrize("family", ["hf", "st"])
def test_vectors_are_those_of_the_merged_weights(family: str, prefix: str, base: Path, tmp_path: Path) -> None:
    """Given an adapter of the trunk, of the model with its head, and one as transformers saves it."""
    settings = {"use_rslora": family == "st", "alpha_pattern": {"mlp.down_proj": 3}}
    made = save_adapter(tmp_path / "adapter", base, prefix=prefix, **settings)
    merged = transformers.AutoModel.from_pretrained(base)
    for (name, (down, up)), alpha in zip(made.items(), (8, 3), strict=True):
        rank = len(down)
        with torch.no_grad():
            merged.get_submodule(name).weight += alpha / (math.sqrt(rank) if family == "st" else rank) * (up @ down)
    folder = tmp_path / "merged"
    merged.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / file).write_bytes((base / file).read_bytes())
    found = vectors(f"{family}:{base}?lora={tmp_path / 'adapter'}")
    np.testing.assert_allclose(found, vectors(f"{family}:{folder}"), atol=1e-5)
    assert np.abs(found - vectors(f"{family}:{base}")).max() > 1e-3


def test_the_adapter_is_part_of_the_fingerprint_and_queries_have_it(base: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", base)
    rows = ModelConfig(spec=f"st:{base}?lora={tmp_path / 'adapter'}", modalities=("text",), precision="fp32")
    plain = ModelConfig(spec=f"st:{base}", modalities=("text",), precision="fp32")
    with_it, without = (load(config, "cpu").fingerprint for config in (rows, plain))
    assert with_it != without
    _, fingerprint = open_query_model(rows, rows.outputs[0], "text")
    assert fingerprint == with_it


def config_with(**settings: Any) -> Any:
    return lambda folder: (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, **settings}))


def weights_with(name: str, *shape: int, value: float = 1.0) -> Any:
    return lambda folder: save_file({name: torch.full(shape, value)}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "there is no adapter_config.json"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "cannot be read"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 64), "cannot be read"),
        (config_with(peft_type="IA3"), "'IA3' adapter"),
        (config_with(lora_alpha="8"), "'8' as lora_alpha"),
        (config_with(lora_alpha=float("inf")), "as lora_alpha"),
        (config_with(alpha_pattern=["q_proj"]), "as alpha_pattern"),
        (weights_with("base_model.model.layers.0.self_attn.q_proj.lora_A.weight", 0, 32), "no factor of a layer"),
        (weights_with("base_model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", 32), "no factor of a layer"),
        (weights_with("base_model.model.layers.0.self_attn.q_proj.lora_A.weight", 4, 32), "has one factor"),
        (weights_with("layers.0.self_attn.q_proj.lora_A.weight", 4, 32, value=math.nan), "no factor of a layer"),
    ],
)
def test_what_is_no_plain_adapter_is_refused(change: Any, said: str, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    save_adapter(folder, base)
    change(folder)
    with pytest.raises(ModelError) as caught:
        vectors(f"hf:{base}?lora={folder}")
    assert said in caught.value.message
    assert caught.value.next_step


def test_an_adapter_of_another_model_is_refused_and_so_is_one_that_was_uploaded(base: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", base)
    other = save_trunk(tmp_path / "bert", "bert")
    with pytest.raises(ModelError, match=r"changes layers\.0\.self_attn\.q_proj") as caught:
        vectors(f"hf:{other}?lora={tmp_path / 'adapter'}")
    assert "some/base" in caught.value.next_step
    (tmp_path / INPUTS).mkdir()
    save_adapter(tmp_path / INPUTS / "adapter", base)
    with pytest.raises(ModelError, match="--upload"):
        vectors(f"hf:{base}?lora={tmp_path / INPUTS / 'adapter'}")
