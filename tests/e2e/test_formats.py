"""Each format through `embq run`, read back by the plain library alone and compared with the input, value by value."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from e2e.plain import READERS, Columns, read_joined_hdf5
from e2e.session import ended

from core.rows.spec import FORMATS
from worker.embedders.stub import stub_digest, stub_vectors

ROWS, DIM = 20_000, 64


def write_input(path: Path) -> list[dict[str, object]]:
    """Lines with an id, a text and metadata, which some of them lack."""
    lines = [
        {"id": f"k{i:05d}-\u00e5", "text": f"text {i} \u2603", "n": i * 3, "lang": None if i % 7 == 0 else f"l{i % 5}"}
        for i in range(ROWS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return lines


def compare(found: Columns, lines: list[dict[str, object]], dim: int = DIM) -> None:
    """Every line is a row, under its key, with its own vector and values; ids count rows in order."""
    assert found["id"] == list(range(len(lines)))
    place = {line["id"]: i for i, line in enumerate(lines)}
    order = [place[key] for key in found["key"]]
    assert sorted(order) == list(range(len(lines)))
    assert found["caption"] == [lines[i]["text"] for i in order]
    assert found["n"] == [lines[i]["n"] for i in order]
    assert found["lang"] == [lines[i]["lang"] for i in order]
    assert found["metadata"] == [None] * len(lines)
    texts = [str(lines[i]["text"]).encode() for i in order]
    wanted = stub_vectors([stub_digest(text, dim) for text in texts], dim).astype(np.float16)
    assert found["embedding"].dtype == np.float16
    assert np.array_equal(found["embedding"], wanted)


def _often(format: str) -> object:
    """npy and Arrow seldom: tests/contract/test_stores.py reads all four back by their libraries, if not whole runs."""
    return pytest.param(format, marks=pytest.mark.slow if format in ("npy", "arrow") else ())


@pytest.mark.parametrize("format", [_often(format) for format in FORMATS])
def test_twenty_thousand_rows_come_back_by_the_plain_library_alone(tmp_path: Path, format: str) -> None:
    root, texts = tmp_path / "out", tmp_path / "texts.jsonl"
    lines = write_input(texts)
    options = ["--unit-size", "1000", "--write-batch-size", "6000", "--output-format", format, "--quiet"]
    status, stdout, stderr = ended("run", texts, "-o", root, "-m", f"stub:{DIM}", *options)
    assert status == 0, stdout + stderr
    compare(READERS[format](root), lines)
    if format == "hdf5":
        compare(read_joined_hdf5(root), lines)
