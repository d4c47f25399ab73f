"""A run on two simulated CUDA cards, in real processes with a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.registry import load
from tests.e2e.plain import read_parquet
from tests.e2e.session import await_in, started, write_texts
from tests.faults.kit.cluster import held_after, let_go, sabotaged
from tests.support.lazy import lazy
from tests.support.models.text import save_trunk

lazy("torch")
lazy("transformers")


CARDS = [{"name": "Simulated A", "uuid": "GPU-aaaa"}, {"name": "Simulated B", "uuid": "GPU-bbbb"}]
TEXTS, UNIT = 120, 10


def used(record: Path) -> dict[int, dict[int, set[str]]]:
    """Process id -> card -> kinds of what the process did there."""
    found: dict[int, dict[int, set[str]]] = {}
    for line in record.read_text().splitlines() if record.exists() else []:
        pid, kind, card = line.split()
        found.setdefault(int(pid), {}).setdefault(int(card), set()).add(kind)
    return found


def vectors_of_a_cpu(spec: str, texts: dict[str, bytes]) -> dict[str, np.ndarray]:
    embedder: Any = load(ModelConfig(spec=spec, modalities=("text",), precision="fp32"), "cpu")
    samples = [Sample(ordinal=n, key=key, text=text.decode()) for n, (key, text) in enumerate(texts.items())]
    rows = embedder.embed(embedder.prepare(samples))["text"]
    return dict(zip(texts, rows, strict=True))


@pytest.mark.slow
def test_each_process_of_a_run_uses_its_own_card_only_and_all_rows_are_those_of_a_cpu(short_tmp: Path) -> None:
    root, source, record, gate = (short_tmp / name for name in ("out", "texts.jsonl", "record", "gate"))
    texts = write_texts(source, TEXTS)
    spec = f"hf:{save_trunk(short_tmp / 'bert', 'bert')}"
    environment = sabotaged([{"cards": CARDS, "record": record}, held_after(2, gate)])
    options = ("--devices", "cuda", "--precision", "fp32", "--unit-size", str(UNIT), "--quiet")

    def both_compute() -> bool:
        return sum("kernel" in kinds for cards in used(record).values() for kinds in cards.values()) >= 2

    with started("run", source, "-o", root, "-m", spec, *options, environment=environment) as run:
        await_in(run, both_compute)
        let_go(gate)
        assert run.wait() == 0, run.said
    cards = [list(of_process) for of_process in used(record).values()]
    assert sorted(cards) == [[0], [1]], json.dumps(used(record), default=sorted)
    for of_process in used(record).values():
        assert set.union(*of_process.values()) >= {"kernel", "copy", "event", "pinned", "allocation"}
    expected = vectors_of_a_cpu(spec, texts)
    rows = read_parquet(root)
    assert sorted(rows["key"]) == sorted(texts)
    for key, vector in zip(rows["key"], rows["embedding"], strict=True):
        np.testing.assert_allclose(np.asarray(vector, np.float32), expected[key], atol=2e-2)
