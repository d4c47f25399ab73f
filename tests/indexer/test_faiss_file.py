"""An index exported as files of faiss: `faiss.read_index` answers from them as a search without re-ranking does."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from embq.app.cli import entry_point
from embq.core.errors import Exit, InputError, OutputError, UsageError
from embq.core.rows.spec import RowSpec
from embq.index.change.deletes import delete
from embq.index.faiss_file import _Source, write_faiss_file
from embq.index.index_files.lists import ListsBytes
from embq.index.index_files.version import read_current
from embq.index.searcher import Searcher
from embq.worker.embedders.stub import stub_vector
from tests.indexer.indexes_that_grow import DIM, add_part, grown, make_index, rows
from tests.support.lazy import lazy
from tests.support.outputs.build import build, go_on, write_jsonl, write_tar
from tests.support.outputs.index import build_index

faiss = lazy("faiss")


QUERIES = rows(50, 99).astype(np.float32)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index with rows that were added, and others that were deleted before and after."""
    index = make_index(tmp_path_factory.mktemp("export"))
    delete(index, ["p0.npy:3", "p1.npy:4"])
    add_part(index.parent / "data", "z", rows(100, 50))
    grown(index)
    delete(index, ["z.npy:7"])
    assert (len(read_current(index).groups), read_current(index).deleted) == (2, 3)
    return index


def answers(path: Path, *, flags: int = 0, k: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Distances and ids that faiss finds by itself."""
    return faiss.read_index(str(path), flags).search(QUERIES, k)


def expected(index: Path, k: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Scores and ids of a search of the same lists."""
    found = Searcher.open(index, memory="mmap").search(QUERIES, k, refine=False)
    return found.scores, found.ids


@pytest.mark.parametrize("flags", [0, faiss.IO_FLAG_MMAP, faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY])
def test_faiss_answers_from_the_file_as_a_search_does(index: Path, tmp_path: Path, flags: int) -> None:
    done = write_faiss_file(index, tmp_path / "knn.index")
    scores, ids = expected(index)
    distances, found = answers(tmp_path / "knn.index", flags=flags)
    assert np.array_equal(found, ids)
    assert np.allclose(1 - distances / 2, scores, atol=1e-6)
    assert [one.path.name for one in done.files] == ["knn.index"]
    assert (done.files[0].rows, done.distance) == (1297, "squared distance")


def test_faiss_re_ranks_as_a_search_does_where_the_vectors_are_in_the_file(index: Path, tmp_path: Path) -> None:
    done = write_faiss_file(index, tmp_path / "knn.index", refine=True)
    found = Searcher.open(index, memory="mmap").search(QUERIES, 10)
    cosines, ids = answers(tmp_path / "knn.index", flags=faiss.IO_FLAG_MMAP)
    assert np.array_equal(ids, found.ids)
    assert np.allclose(cosines, found.scores, atol=1e-6)
    assert (done.refine, done.distance, done.k_factor > 1) == (True, "cosine", True)
    read = faiss.read_index(str(tmp_path / "knn.index"))
    deleted = faiss.downcast_index(read.refine_index).reconstruct(3)
    assert (read.ntotal, float(np.abs(deleted).sum())) == (1300, 0.0)
    with pytest.raises(UsageError, match="in one file"):
        write_faiss_file(index, tmp_path / "more.index", shards=2, refine=True)


@pytest.mark.parametrize(
    "key",
    ["IVF2,Flat", "IVF16,SQ8", "IVF16_HNSW32,SQfp16", "IVF16,RaBitQ", "IVF16,EDEN4", "PCAR16,IVF16(PCA8,Flat),PQ8x4"],
)
def test_every_kind_of_code_is_read_back(tmp_path: Path, key: str) -> None:
    index = make_index(tmp_path, key=key, refine="none", parts=2)
    done = write_faiss_file(index, tmp_path / "knn.index")
    distances, ids = answers(tmp_path / "knn.index")
    scores, wanted = expected(index)
    assert np.array_equal(ids, wanted)
    assert np.allclose(1 - distances / 2, scores, atol=1e-6)
    assert faiss.extract_index_ivf(faiss.read_index(str(tmp_path / "knn.index"))).nprobe == done.nprobe
    assert (done.k_factor, done.read_since) == (1, {"RaBitQ": "1.11.0", "EDEN4": "1.15.1"}.get(key[6:], "1.7.4"))


def test_shards_hold_all_rows_once_and_answer_together_as_the_whole(index: Path, tmp_path: Path) -> None:
    done = write_faiss_file(index, tmp_path / "knn.index", shards=3)
    assert [one.path.name for one in done.files] == ["knn.index0", "knn.index1", "knn.index2"]
    assert sum(one.rows for one in done.files) == 1297
    assert min(one.rows for one in done.files) > 200
    found = [answers(one.path) for one in done.files]
    distances, ids = (np.concatenate(column, axis=1) for column in zip(*found, strict=True))
    best = np.argsort(np.where(ids < 0, np.inf, distances), axis=1, kind="stable")[:, :10]
    assert np.array_equal(np.take_along_axis(ids, best, axis=1), expected(index)[1])


def test_fewer_shards_replace_all_numbered_files_of_an_export(index: Path, tmp_path: Path) -> None:
    path = tmp_path / "knn.index"
    write_faiss_file(index, path, shards=4)
    for other in ("knn.index.json", "knn.indexes", "other.index3"):
        (tmp_path / other).write_text("mine")
    (tmp_path / "knn.index0").rename(tmp_path / "knn.index00")  # as of ten
    with pytest.raises(UsageError, match="index00 exists"):
        write_faiss_file(index, path, shards=2)
    write_faiss_file(index, path, shards=2, overwrite=True)
    left = sorted(one.name for one in tmp_path.iterdir())
    assert left == ["knn.index.json", "knn.index0", "knn.index1", "knn.indexes", "other.index3"]


def test_an_export_removes_what_a_killed_one_left_and_nothing_of_a_running_one(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "knn.index"
    for name in (".knn.index.0123abcd", ".knn.index2.0123abcd", ".other.index.0123abcd", ".knn.index.mine"):
        (tmp_path / name).write_text("half")
    copy = _Source._copy

    def second(source: _Source, *given: Any) -> None:
        monkeypatch.setattr(_Source, "_copy", copy)
        write_faiss_file(index, path, shards=2)
        copy(source, *given)

    monkeypatch.setattr(_Source, "_copy", second)
    write_faiss_file(index, path)
    assert answers(path)[1].shape == (50, 10)
    left = sorted(one.name for one in tmp_path.iterdir())
    assert left == [".knn.index.mine", ".other.index.0123abcd", "knn.index", "knn.index0", "knn.index1"]


def test_there_are_no_more_shards_than_lists_with_rows(tmp_path: Path) -> None:
    index = make_index(tmp_path, key="IVF2,Flat", refine="none", parts=1)
    done = write_faiss_file(index, tmp_path / "knn.index", shards=10)
    assert [one.path.name for one in done.files] == ["knn.index0", "knn.index1"]


def test_lists_are_copied_in_pieces(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_faiss_file(index, tmp_path / "whole.index")
    monkeypatch.setattr("embq.index.faiss_file.COPY_BYTES", 100)
    write_faiss_file(index, tmp_path / "pieces.index")
    assert (tmp_path / "pieces.index").read_bytes() == (tmp_path / "whole.index").read_bytes()


@pytest.mark.parametrize(
    ("form", "numbers"),
    [(b"sprs", [1]), (b"sprs", [7, 1]), (b"full", [2, 2**64 - 1]), (b"full", [2**62, 2**62]), (b"full", [1])],
)
def test_lists_with_impossible_sizes_are_damage(tmp_path: Path, form: bytes, numbers: list[int]) -> None:
    header = struct.pack("<4sQQ4sQ", b"ilar", 2, 4, form, len(numbers))
    (tmp_path / "lists").write_bytes(header + np.array(numbers, np.uint64).tobytes() + bytes(12))
    with pytest.raises(OutputError, match="lists") as refused:
        ListsBytes(tmp_path / "lists", 2)
    assert refused.value.code == "index_damaged"


def test_a_file_is_replaced_only_where_that_is_asked_for(index: Path, tmp_path: Path) -> None:
    path = tmp_path / "knn.index"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        write_faiss_file(index, path)
    assert path.read_text() == "mine"
    write_faiss_file(index, path, overwrite=True)
    assert answers(path)[1].shape == (50, 10)
    assert [one.name for one in tmp_path.iterdir()] == ["knn.index"]


def test_an_export_that_fails_leaves_no_file(index: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(index, copy)
    (copy / read_current(index).groups[1][0].path).write_bytes(b"short")
    with pytest.raises(OutputError, match="bytes"):
        write_faiss_file(copy, tmp_path / "knn.index")
    with pytest.raises(InputError, match="no finished index"):
        write_faiss_file(tmp_path / "nowhere", tmp_path / "knn.index")
    with pytest.raises(OutputError, match="missing"):
        write_faiss_file(index, tmp_path / "missing" / "knn.index")
    assert [one.name for one in tmp_path.iterdir()] == ["copy"]


def embq_index(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """The answer of `embq index ... --json`."""
    status = entry_point.run(["index", *map(str, words), "--json"])
    told = capsys.readouterr()
    assert status == Exit.DONE, told.err
    return dict(json.loads(told.out))


def test_the_verb_builds_an_index_and_its_files_and_exports_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, knn = tmp_path / "data", tmp_path / "knn.index"
    add_part(data, "p", rows(300, 1))
    key = ("--index-key", "IVF4,SQ8", "--recall", "0.5@10")
    built = embq_index(capsys, data, *key, "--index-path", knn, "--nb-indices-to-keep", "2")
    assert [one["path"] for one in built["export"]["files"]] == [f"{knn}0", f"{knn}1"]
    done = embq_index(capsys, "export", data, "--output-format", "faiss")
    assert [Path(one["path"]).name for one in done["indexes"][0]["files"]] == ["embedding.index"]
    assert np.array_equal(answers(data / "index" / "embedding.index")[1], expected(data / "index" / "embedding")[1])
    assert entry_point.run(["index", str(data), *key, "--index-path", str(knn), "--nb-indices-to-keep", "2"]) == 2
    assert "knn.index0 exists" in capsys.readouterr().err
    assert entry_point.run(["index", "export", str(data)]) == Exit.USAGE
    assert "--overwrite" in capsys.readouterr().err
    assert entry_point.run(["index", "export", str(data), "s3://bucket/knn.index"]) == Exit.USAGE
    assert "on this machine" in capsys.readouterr().err


def test_rows_of_a_run_that_are_not_in_the_index_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"id": f"k{row}", "text": f"text {row}"} for row in range(60)]
    inputs = [write_jsonl(tmp_path / "a.jsonl", lines)]
    root = build(tmp_path / "out", inputs, model=f"stub:{DIM}", unit_samples=30, only=1)
    build_index(root, output="text")
    go_on(root)
    assert entry_point.run(["index", "export", str(root), str(tmp_path / "knn.index")]) == Exit.DONE
    told = capsys.readouterr()
    assert f"30 rows of {root} are not in the index yet" in told.err
    assert "30 rows" in told.out


def test_a_folder_for_the_back_end_of_clip_retrieval_has_a_row_of_metadata_for_each_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = [(f"s{i:02d}.{end}", f"{end} {i}".encode()) for i in range(20) for end in ("jpg", "txt")]
    inputs = [write_tar(tmp_path / "a.tar", members)]
    root = build(
        tmp_path / "out", inputs, model=f"stub:{DIM}", modalities=("image", "text"), rows=RowSpec(normalize=True)
    )
    for output in ("image", "text"):
        build_index(root, output=output)
    delete(root / "index" / "image", ["s04"])
    done = embq_index(capsys, "export", root, tmp_path / "served", "--output-format", "clip-back")
    assert [(one["rows"], one["distance"]) for one in done["indexes"]] == [(19, "cosine"), (20, "cosine")]
    folder = tmp_path / "served"
    assert sorted(one.name for one in folder.iterdir()) == [
        "image.index",
        "indices_paths.json",
        "metadata",
        "text.index",
    ]
    rows = pq.read_table(folder / "metadata")
    assert rows.column_names[:2] == ["image_path", "caption"]
    assert rows["id"].to_pylist() == list(range(20))
    assert rows["caption"].to_pylist() == [f"txt {i}" for i in range(20)]
    options = json.loads((folder / "indices_paths.json").read_text())["out"]
    assert (options["indice_folder"], options["columns_to_return"][:2]) == (str(folder), ["image_path", "caption"])
    query = stub_vector(b"txt 7", DIM)[None].astype(np.float32)
    cosines, ids = faiss.read_index(str(folder / "text.index")).search(query / np.linalg.norm(query), 1)
    assert (ids[0, 0], round(float(cosines[0, 0]), 3)) == (7, 1.0)
    assert (
        entry_point.run(["index", "export", str(root), str(folder), "--output-format", "clip-back"]) == Exit.BAD_INPUT
    )
