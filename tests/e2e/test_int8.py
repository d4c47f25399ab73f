"""Texts in int8 by a worker process: the same vectors, and the same fingerprint, as in another process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.registry import load
from examples.demo.collect import docstrings
from tests.contract.test_int8_trunks import int8_cpu, make
from tests.e2e.session import succeed
from tests.e2e.test_golden import in_order, rows_of

pytestmark = int8_cpu

TEXTS = 60


@pytest.mark.slow  # test_int8_trunks compares vectors and fingerprints of two loads in one process
@pytest.mark.timeout(600)
def test_two_processes_give_one_fingerprint_and_the_same_vectors_in_int8(tmp_path: Path) -> None:
    texts = dict(docstrings(TEXTS))
    spec = f"hf:{make(tmp_path / 'model', 'Roberta')}?max_length=128&normalize=true"
    source, root = tmp_path / "docstrings.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in texts.items()))
    succeed(
        *("run", source, "-o", root, "-m", spec, "--precision", "int8", "--dtype", "float32", "--quiet"),
        deadline_s=400.0,
    )
    rows = in_order(rows_of(root, "embedding"), list(texts))
    assert json.loads(succeed("verify", root, "--json"))["ok"]

    again = load(ModelConfig(spec=spec, modalities=("text",), precision="int8"), "cpu")
    prepared = again.prepare([Sample(ordinal=i, key=str(i), text=text) for i, text in enumerate(texts.values())])
    found = np.concatenate([again.embed(prepared[start : start + 4])["text"] for start in range(0, TEXTS, 4)])
    # Padding is not the same in other batches, and moves what lies half-way between two steps.
    assert (rows * found).sum(1).min() > 0.999
    records = [json.loads(path.read_bytes()) for path in sorted((root / "commits").glob("*.json"))]
    assert {record["fingerprint"] for record in records if record.get("fingerprint")} == {again.fingerprint}
