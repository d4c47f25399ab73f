"""Findings of `embq verify` about vectors and similarities of an output, in each way of storing them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from embq.core.formats.base import vectors
from embq.core.rows.spec import DTYPES, FORMATS, RowSpec
from tests.support.outputs.build import build, rewrite, set_column, write_folder
from tests.support.second_reader.checks import verify

INPUTS = {f"{n}.{kind}": f"{kind} {n}".encode() for n in range(5) for kind in ("jpg", "txt")}
BOTH = ("image", "text")


def output(tmp_path: Path, rows: RowSpec, *, format: str = "parquet", model: str = "stub:16") -> Path:
    """Five rows with two vectors each."""
    folder = write_folder(tmp_path / "in", INPUTS)
    return build(tmp_path / "out", [folder], model=model, modalities=BOTH, rows=rows, format=format)


def change(root: Path, column: str, spoil: Callable[[np.ndarray], None]) -> None:
    """Change the vectors in the first committed file, as whoever would also make its hash right."""

    def changed(table: pa.Table) -> pa.Table:
        matrix = vectors(table, column).copy()
        spoil(matrix)
        type_ = table.schema.field(column).type
        flat = pa.array(matrix.ravel(), type_.value_type)
        return set_column(table, column, pa.FixedSizeListArray.from_arrays(flat, type=type_))

    rewrite(root, changed)


def forget_the_model(root: Path, spec: str = "hf:nowhere") -> None:
    """Now the vectors cannot be computed again."""
    description = json.loads((root / "run.json").read_text())
    description["model"]["spec"] = spec
    (root / "run.json").write_text(json.dumps(description))


def broken(root: Path) -> set[str]:
    return {violation.invariant for violation in verify(root).violations}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more", [{}, {"truncate_dim": 8}, {"normalize": False, "int8_range": 0.7}], ids=str)
def test_an_output_is_ok_however_its_vectors_are_stored(
    tmp_path: Path, format: str, dtype: str, more: dict[str, object]
) -> None:
    if format == "npy" and dtype not in ("float16", "float32"):
        pytest.skip("npy holds floats")
    rows = RowSpec(dtype=dtype, similarity=True, **more)  # type: ignore[arg-type]
    report = verify(output(tmp_path, rows, format=format))
    assert (report.ok, report.rows, report.vectors_recomputed) == (True, 5, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_changed_vector_is_found(tmp_path: Path, dtype: str) -> None:
    root = output(tmp_path, RowSpec(dtype=dtype, normalize=True, int8_range=0.5))

    def spoil(matrix: np.ndarray) -> None:
        matrix[1] = np.roll(matrix[1], 1)  # of the same length

    change(root, "text_embedding", spoil)
    assert broken(root) == {"vectors"}


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_a_vector_of_another_length_is_found_for_any_model(tmp_path: Path, dtype: str) -> None:
    root = output(tmp_path, RowSpec(dtype=dtype, normalize=True, int8_range=0.9))
    forget_the_model(root)
    assert broken(root) == set()

    def spoil(matrix: np.ndarray) -> None:
        matrix[1] = (matrix[1] * 0.8).astype(matrix.dtype)

    change(root, "image_embedding", spoil)
    assert broken(root) == {"norms"}


def test_a_model_that_is_known_for_its_lengths_is_held_to_them(tmp_path: Path) -> None:
    root = output(tmp_path, RowSpec())
    forget_the_model(root, "open_clip:A/b?normalize=false")
    assert broken(root) == set()
    forget_the_model(root, "open_clip:A/b")
    assert broken(root) == {"norms"}


@pytest.mark.parametrize("rows", [RowSpec(similarity=True), RowSpec(dtype="binary", similarity=True)], ids=str)
def test_a_similarity_that_is_not_that_of_its_row_is_found(tmp_path: Path, rows: RowSpec) -> None:
    root = output(tmp_path, rows)
    forget_the_model(root)
    beyond = 2.0 if rows.dtype == "binary" else 0.9

    def changed(table: pa.Table) -> pa.Table:
        cosines = table["image_text_similarity"].to_numpy().copy()
        cosines[1] = beyond
        return set_column(table, "image_text_similarity", pa.array(cosines))

    rewrite(root, changed)
    assert broken(root) == {"similarity"}


@pytest.mark.parametrize(
    "other", [{"dtype": "float32"}, {"dtype": "int8"}, {"truncate_dim": 8}, {"similarity": True}], ids=str
)
def test_columns_that_are_not_what_the_run_stores_are_found(tmp_path: Path, other: dict[str, object]) -> None:
    root = output(tmp_path, RowSpec())
    description = json.loads((root / "run.json").read_text())
    description["rows"] |= other
    (root / "run.json").write_text(json.dumps(description))
    assert "schema" in broken(root)
