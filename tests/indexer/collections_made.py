"""Collections of every kind with the same rows, for the tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embq.app.export.export import ExportOptions, export
from embq.core.formats.base import vectors
from embq.core.rows.spec import RowSpec
from embq.core.run.reader import row_tables
from embq.core.storage.paths import Place
from tests.support.outputs.build import build, write_jsonl

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


def parquet_files(folder: Path) -> Path:
    """Files of different lengths and small groups of rows, lists of fixed and of any length, one file empty."""
    root = folder / "plain"
    (root / "deep").mkdir(parents=True)
    matrix = wanted_vectors().astype(np.float32)
    fixed = pa.list_(pa.float32(), DIM)
    for name, start, stop, type_ in (
        ("a.parquet", 0, 17, fixed),
        ("deep/b.parquet", 17, 17, fixed),
        ("deep/c.parquet", 17, 40, pa.list_(pa.float32())),
    ):
        table = pa.table(
            {
                "url": [f"http://x/{row}" for row in range(start, stop)],
                "TEXT": [f"caption {row}" for row in range(start, stop)],
                "embedding": pa.array(list(matrix[start:stop]), type_),
                "width": pa.array(range(start, stop), pa.int32()),
            }
        )
        pq.write_table(table, root / name, row_group_size=5)
    return root


def hdf5_files(folder: Path) -> Path:
    """An export in HDF5: three parts, and the file that joins them."""
    root = folder / "plain"
    export(run_of("parquet")(folder), root, ExportOptions(format="hdf5", rows_per_file=15))
    return root


def clip_retrieval_files(folder: Path) -> Path:
    """Images, texts and metadata; a column of numbers has nulls in one file, so that its type is another one there."""
    root = folder / "plain"
    for name in ("img_emb", "text_emb", "metadata"):
        (root / name).mkdir(parents=True)
    images, texts = wanted_vectors(), wanted_vectors(seed=4)
    for number, start, stop in ((0, 0, 9), (1, 9, 30), (3, 30, 40)):
        np.save(root / f"img_emb/img_emb_{number}.npy", images[start:stop])
        np.save(root / f"text_emb/text_emb_{number}.npy", texts[start:stop])
        rows = range(start, stop)
        metadata = {
            "image_path": [f"{row:05d}" for row in rows],
            "caption": [f"caption {row}" for row in rows],
            "width": [None if number and row % 2 else row * (1.0 if number else 1) for row in rows],
            "id": list(rows),
        }
        pq.write_table(pa.table(metadata), root / f"metadata/metadata_{number}.parquet")
    return root


KINDS: dict[str, Made] = {
    "run-parquet": run_of("parquet"),
    "run-hdf5": run_of("hdf5"),
    "run-npy": run_of("npy"),
    "run-arrow": run_of("arrow", "float32"),
    "npy": npy_files,
    "parquet": parquet_files,
    "hdf5": hdf5_files,
    "clip-retrieval": clip_retrieval_files,
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
