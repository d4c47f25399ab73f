"""Text models that embq does not take, or not as their files say, and what it says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from embq.core.errors import ModelError, SampleError
from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.base import Embedder, Truncated
from embq.worker.embedders.registry import load
from tests.support.lazy import lazy
from tests.support.models.text import POSITIONS, WIDTH, save_sentence_model, save_trunk

st = lazy("sentence_transformers.sentence_transformer.modules")
torch = lazy("torch")


def loaded(spec: str) -> Embedder:
    return load(ModelConfig(spec=spec, modalities=("text",), precision="fp32"), "cpu")


def refusal(spec: str) -> str:
    with pytest.raises(ModelError) as caught:
        loaded(spec)
    assert "\n" not in caught.value.message
    assert caught.value.next_step
    return f"{caught.value.message} -> {caught.value.next_step}"


@pytest.fixture
def trunk(tmp_path: Path) -> Path:
    return save_trunk(tmp_path / "trunk", "bert")


@pytest.fixture
def model(trunk: Path, tmp_path: Path) -> Path:
    return save_sentence_model(tmp_path / "model", [st.Transformer(str(trunk)), st.Pooling(WIDTH), st.Normalize()])


def test_a_folder_that_lacks_the_configuration_of_a_module_is_refused(model: Path) -> None:
    (model / "1_Pooling" / "config.json").unlink()
    said = refusal(f"st:{model}")
    assert "cannot be loaded" in said
    assert "whole model" in said


def test_weights_that_the_checkpoint_lacks_are_not_made_up(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    gone = [name for name in weights if name.endswith("attention.self.query.weight")]
    assert len(gone) == 2
    save_file(
        {n: w for n, w in weights.items() if n not in gone}, model / "model.safetensors", metadata={"format": "pt"}
    )
    for kind in ("st", "hf"):
        assert "weights of the model, such as encoder.layer." in refusal(f"{kind}:{model}")


def test_a_checkpoint_without_the_pooler_that_nothing_reads_is_whole(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    rest = {name: tensor for name, tensor in weights.items() if not name.startswith("pooler.")}
    assert len(rest) == len(weights) - 2
    save_file(rest, model / "model.safetensors", metadata={"format": "pt"})
    for kind in ("st", "hf"):
        assert loaded(f"{kind}:{model}").dims == {"text": WIDTH}


def test_a_length_for_a_model_that_counts_no_tokens_is_refused(tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import BoW

    folder = save_sentence_model(tmp_path / "model", [BoW(["fox", "dog"])])
    assert "no limit that could be set" in refusal(f"st:{folder}?max_length=12")


def test_parameters_that_are_none_are_refused(model: Path) -> None:
    assert "whole number" in refusal(f"st:{model}?max_length=many")
    assert "known parameters" in refusal(f"st:{model}?promt=query")
    assert "known parameters" in refusal(f"hf:{model}?prompt_name=query")
    assert "unknown pooling 'first'" in refusal(f"hf:{model}?pooling=mean+first")


@pytest.mark.parametrize("kind", ["st", "hf"])
def test_a_text_of_ten_megabytes_is_a_row_of_its_beginning(kind: str, trunk: Path) -> None:
    embedder = loaded(f"{kind}:{trunk}")
    long = "the quick brown fox jumps over the lazy dog " * 230_000
    assert len(long) > 10_000_000
    whole, beginning, empty, surrogate, nothing = embedder.prepare(
        [Sample(ordinal=n, key=str(n), text=text) for n, text in enumerate((long, long[:9_000], " ", "a \udc80", "\0"))]
    )
    assert isinstance(whole, Truncated)
    assert len(whole["input_ids"]) == POSITIONS
    assert whole["input_ids"].tolist() == beginning["input_ids"].tolist()
    codes = [error.code for error in (empty, surrogate) if isinstance(error, SampleError)]
    assert codes == ["empty_text", "text_not_utf8"]
    # BERT's tokeniser drops a NUL, and [CLS] [SEP] remain, as in sentence-transformers.
    assert len(nothing["input_ids"]) == 2
