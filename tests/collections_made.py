"""Collections of every kind with the same rows, for the tests that hold for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from build_output import build, write_jsonl

from core.objects import Place
from core.reader import row_tables, vectors
from core.rows import RowSpec

ROWS = 40
DIM = 8

Made = Callable[[Path], Path]
"""Makes a folder with `ROWS` rows of `DIM` numbers below a folder."""


def write_inputs(folder: Path, rows: int = ROWS, name: str = "a") -> list[Path]:
    """Two files of texts with ids and metadata, `rows` texts in all."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[object] = [
        {"id": f"{name}{row}", "text": f"text {row} of {name}", "rank": row, "tag": None if row % 3 else f"t{row}"}
        for row in range(rows)
    ]
    half = rows // 2
    return [
        write_jsonl(folder / f"{name}0.jsonl", lines[:half]),
        write_jsonl(folder / f"{name}1.jsonl", lines[half:]),
    ]


def run_of(format: str, dtype: str = "float16", **more: object) -> Made:
    """A run of the stub model."""

    def make(folder: Path) -> Path:
        inputs = write_inputs(folder / "in")
        return build(
            folder / "out",
            inputs,
            format=format,
            rows=RowSpec(dtype=dtype),
            unit_samples=7,
            **{"model": f"stub:{DIM}", **more},
        )

    return make


def npy_files(folder: Path) -> Path:
    """Files of different lengths in folders, one of them empty."""
    root = folder / "plain"
    matrix = wanted_vectors()
    for name, start, stop in (("b/part0.npy", 10, 11), ("a.npy", 0, 10), ("c.npy", 11, 40), ("d.npy", 40, 40)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(root / name, matrix[start:stop])
    return root


KINDS: dict[str, Made] = {
    "run-parquet": run_of("parquet"),
    "run-hdf5": run_of("hdf5"),
    "run-npy": run_of("npy"),
    "run-arrow": run_of("arrow", "float32"),
    "npy": npy_files,
}


def wanted_vectors(rows: int = ROWS, dim: int = DIM, seed: int = 3) -> np.ndarray:
    """float16 (rows, dim) of length 1."""
    matrix = np.random.default_rng(seed).standard_normal((rows, dim), np.float32)
    return (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float16)


def stored_rows(root: Place) -> pa.Table:
    """All rows of a run as its own reader gives them."""
    return pa.concat_tables(row_tables(root))


def stored_vectors(root: Place, column: str = "embedding") -> np.ndarray:
    """All vectors of a run as they are stored."""
    return vectors(stored_rows(root), column)


def described(text: str) -> object:
    """What comes back of something that was written as JSON."""
    return json.loads(text)
