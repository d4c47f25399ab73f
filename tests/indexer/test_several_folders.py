"""Several folders as one collection: rows in the order of the paths, and nothing mixed or taken twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from embq.app.cli.entry_point import run
from embq.core.errors import Exit, InputError
from embq.index.collection.opening import Collection, open_collection
from embq.index.searcher import Searcher
from embq.retrieval.serving.served_index import collection_rows
from tests.indexer.collections_made import DIM, KINDS, ROWS, run_of, wanted_vectors


def read(collection: Collection) -> tuple[np.ndarray, list[dict[str, object]]]:
    """(vectors, identities) of all rows."""
    vectors = [rows for _, rows in collection.read_vectors(0, collection.n)]
    tables = list(collection.read_identity(0, collection.n))
    return np.concatenate(vectors), pa.concat_tables(tables).to_pylist()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_several_folders_follow_each_other(tmp_path: Path, kind: str) -> None:
    first = KINDS[kind](tmp_path / "a")
    second = Path(shutil.copytree(first, tmp_path / "b" / "copy"))
    one, both = open_collection(first), open_collection(second, first, second)
    assert (both.n, both.roots) == (2 * one.n, [str(first), str(second)])
    vectors, rows = read(both)
    expected, known = read(one)
    assert np.array_equal(vectors, np.concatenate([expected, expected]), equal_nan=True)
    assert [row["id"] for row in rows] == list(range(both.n))
    for at, row in enumerate(rows):
        for name, value in known[at % one.n].items():
            found = str(row[name]).removeprefix(f"{both.folders[at // one.n]}/") if name in ("key", "source") else None
            assert name == "id" or value in (row[name], found)
    vectors_at = both.read_rows_at(np.array([1, one.n + 1]))
    assert np.array_equal(vectors_at[0], vectors_at[1])


def test_a_folder_that_is_added_gets_the_ids_behind_the_others(tmp_path: Path) -> None:
    for name in ("a", "b", "aa"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "part.npy", wanted_vectors(5, seed=len(name) + ord(name[0])))
    old = open_collection(tmp_path / "b", tmp_path / "a")
    now = open_collection(*(tmp_path / name for name in ("b", "a", "aa"))).continuing(old)
    assert [part.files[0].path for part in now.parts] == ["a/part.npy", "b/part.npy", "aa/part.npy"]
    assert [part.first_id for part in now.parts] == [0, 5, 10]
    with pytest.raises(InputError, match=r"number of folders was 1 .* and is 2"):
        old.continuing(open_collection(tmp_path / "a"))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("a", "b"):
        shutil.move(tmp_path / name, moved / name)
    assert open_collection(moved / "a", moved / "b").digest == old.digest


def test_folders_that_are_not_one_collection_are_refused(tmp_path: Path) -> None:
    folders = {kind: KINDS[kind](tmp_path / kind) for kind in ("run-parquet", "npy", "parquet", "clip-retrieval")}
    other_model = run_of("parquet", model=f"stub:{2 * DIM}")(tmp_path / "other")

    def refused(*names: str | Path) -> str:
        with pytest.raises(InputError) as caught:
            open_collection(*(folders.get(str(name), name) for name in names))
        return caught.value.message

    assert "vectors of stub:16, the other of stub:8" in refused("run-parquet", other_model)
    assert "only the first is one of the outputs of runs" in refused("run-parquet", "npy")
    assert "only the first is one of the folders of clip-retrieval" in refused("clip-retrieval", "npy")
    assert "2 formats" in refused("npy", "parquet")
    assert "indexed twice" in refused("npy", folders["npy"] / "b")
    assert "in no folder or bucket together" in refused("s3://one/out", "gs://other/out")
    (folders["clip-retrieval"] / "more").mkdir()
    without = Path(shutil.copytree(folders["clip-retrieval"], tmp_path / "without"))
    shutil.rmtree(without / "metadata")
    assert "have not the same of" in refused("clip-retrieval", without)


def test_the_verb_makes_one_index_of_several_folders(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        np.save((tmp_path / name).with_suffix(".npy"), wanted_vectors(ROWS, seed=ord(name)))
    inputs = [str(tmp_path / "a.npy"), str(tmp_path / "b.npy")]
    assert run(["index", *inputs]) == Exit.USAGE
    assert "--output" in capfd.readouterr().err
    assert run(["index", *inputs, "--output", str(tmp_path / "index"), "--quiet"]) == Exit.DONE
    searcher = Searcher.open(tmp_path / "index")
    found = searcher.search(wanted_vectors(ROWS, seed=ord("b")).astype(np.float32), 1)
    assert found.ids[:, 0].tolist() == list(range(ROWS, 2 * ROWS))
    assert collection_rows(tmp_path / "index") == 2 * ROWS
    np.save(tmp_path / "c.npy", wanted_vectors(ROWS, seed=3))
    more = [*inputs, str(tmp_path / "c.npy")]
    assert run(["index", "add", *more, "--output", str(tmp_path / "index"), "--quiet"]) == Exit.DONE
    assert collection_rows(tmp_path / "index") == 3 * ROWS
