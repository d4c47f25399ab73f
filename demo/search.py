"""The nearest rows to a question, by comparing it with every row. Enough for thousands; an index stage comes later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from core.models import ModelConfig
from core.reader import row_tables
from core.units import Sample
from worker.embedders.registry import load


def nearest(output: Path, questions: Sequence[str], *, count: int) -> list[list[tuple[float, str, str]]]:
    """The `count` best (score, key, caption) for each question, best first; the score is the cosine."""
    run = json.loads((output / "run.json").read_text())["model"]
    model = load(ModelConfig(spec=run["spec"], modalities=("text",), precision=run["precision"]), "cpu")
    asked = model.prepare([Sample(ordinal=i, key="", text=question) for i, question in enumerate(questions)])
    queries = model.embed(asked)["text"]
    best: list[list[tuple[float, str, str]]] = [[] for _ in questions]
    for table in row_tables(output):
        flat = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.float32)
        rows = flat.reshape(table.num_rows, -1)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        scores = queries @ rows.T / np.linalg.norm(queries, axis=1, keepdims=True)
        for found, row_scores in zip(best, scores, strict=True):
            for i in np.argsort(-row_scores)[:count].tolist():
                found.append((float(row_scores[i]), table["key"][i].as_py(), table["caption"][i].as_py() or ""))
            found.sort(reverse=True)
            del found[count:]
    return best
