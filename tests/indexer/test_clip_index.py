"""Commands of clip-retrieval's README one after the other: what faiss finds is in the copied metadata."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from embq.app.cli.entry_point import run
from embq.core.errors import Exit
from tests.indexer.collections_made import clip_retrieval_files, run_of
from tests.support.lazy import lazy

faiss = lazy("faiss")


def index(embeddings: Path, folder: Path, *options: str) -> int:
    return run(
        [
            "clip-retrieval",
            "index",
            f"--embeddings_folder={embeddings}",
            f"--index_folder={folder}",
            "--quiet",
            *options,
        ]
    )


def assert_found(embeddings: Path, target: Path, name: str, short: str) -> None:
    """The ids that faiss finds are positions in all files, as those of the metadata."""
    parts = [np.load(path) for path in sorted((embeddings / f"{short}_emb").glob("*.npy"))]
    vectors = np.concatenate(parts).astype(np.float32)
    there = faiss.read_index(str(target / f"{name}.index"))
    assert there.metric_type == faiss.METRIC_INNER_PRODUCT
    products, ids = there.search(vectors, 1)
    np.testing.assert_allclose(products[:, 0], (vectors @ vectors.T).max(axis=1), rtol=1e-3)
    np.testing.assert_allclose((vectors * vectors[ids[:, 0]]).sum(axis=1), products[:, 0], rtol=1e-3)
    assert json.loads((target / f"{name}.json").read_text())["nb vectors"] == len(vectors)
    metadata = sorted((target / "metadata").iterdir())
    assert sum(pq.ParquetFile(path).metadata.num_rows for path in metadata) == len(vectors)


def test_the_output_of_clip_retrieval_becomes_two_indexes_and_a_copy_of_the_metadata(tmp_path: Path) -> None:
    embeddings, target = clip_retrieval_files(tmp_path), tmp_path / "index"
    assert index(embeddings, target, "--max_index_memory_usage=16G", "--nb_cores=1") == Exit.DONE
    assert sorted(path.name for path in target.iterdir()) == [
        *("image.index", "image.json", "metadata", "text.index", "text.json")
    ]
    for name, short in (("image", "img"), ("text", "text")):
        assert_found(embeddings, target, name, short)


def test_of_a_run_what_is_committed_is_indexed_and_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embeddings, target = run_of("npy")(tmp_path), tmp_path / "index"
    vectors = next((embeddings / "text_emb").glob("*.npy"))
    for folder, path in (("text_emb", vectors), ("metadata", next((embeddings / "metadata").glob("*.parquet")))):
        shutil.copy(path, embeddings / folder / f"{folder}_99999999{path.suffix}")
    assert index(embeddings, target) == Exit.DONE
    for folder, suffix in (("text_emb", "npy"), ("metadata", "parquet")):
        (embeddings / folder / f"{folder}_99999999.{suffix}").unlink()
    assert_found(embeddings, target, "text", "text")
    capsys.readouterr()
    assert index(embeddings, target) == Exit.USAGE, "metadata is there"
    assert "--copy_metadata=False" in capsys.readouterr().err
    assert index(embeddings, target, "--copy_metadata=False") == Exit.DONE
    assert index(run_of("parquet")(tmp_path / "other"), tmp_path / "none") == Exit.BAD_INPUT
    assert "embq index export" in capsys.readouterr().err


def test_rows_that_do_not_belong_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embeddings = clip_retrieval_files(tmp_path)
    (embeddings / "metadata/metadata_1.parquet").unlink()
    assert index(embeddings, tmp_path / "index") == Exit.BAD_INPUT
    assert "misaligned" in capsys.readouterr().err
    assert not (tmp_path / "index").exists()
