"""Plain folders as collections: the order of their files decides the ids, and what does not belong there is refused."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.app.export.export import ExportOptions, export
from embq.core.errors import InputError, UsageError
from embq.core.rows.spec import RowSpec
from embq.index.collection.opening import Collection, open_collection
from tests.indexer.collections_made import (
    DIM,
    ROWS,
    clip_retrieval_files,
    hdf5_files,
    npy_files,
    parquet_files,
    wanted_vectors,
    write_inputs,
)
from tests.support.outputs.build import build


def read(collection: Collection, column: str | None = None) -> np.ndarray:
    return np.concatenate([rows for _, rows in collection.read_vectors(0, collection.n, column=column)])


def rows_of(collection: Collection) -> list[dict[str, object]]:
    return [dict(row) for row in pa.concat_tables(collection.read_identity(0, collection.n)).to_pylist()]


def refused(path: Path, code: str, *names: str, **more: object) -> InputError:
    """Opening and reading everything fails, and says these names."""
    with pytest.raises(InputError) as caught:
        read(open_collection(path, **more))  # type: ignore[arg-type]
    assert caught.value.code == code
    for name in names:
        assert name in caught.value.message
    return caught.value


# --- npy ---


def test_npy_files_are_taken_in_the_order_of_their_paths(tmp_path: Path) -> None:
    root = npy_files(tmp_path)
    collection = open_collection(root)
    assert [part.files[0].path for part in collection.parts] == ["a.npy", "b/part0.npy", "c.npy"]
    assert collection.empty == ("d.npy",)
    assert (read(collection) == wanted_vectors()).all()
    assert [row["key"] for row in rows_of(collection)][9:12] == ["a.npy:9", "b/part0.npy:0", "c.npy:0"]
    assert rows_of(collection)[10]["source"] == "b/part0.npy"
    assert collection.unit_length
    assert (collection.model, collection.fingerprint, collection.run) == (None, None, None)


def test_one_file_is_a_collection(tmp_path: Path) -> None:
    collection = open_collection(npy_files(tmp_path) / "c.npy")
    assert (collection.n, collection.parts[0].files[0].path) == (29, "c.npy")
    assert (read(collection) == wanted_vectors()[11:]).all()


def test_hidden_files_and_folders_with_an_index_are_passed_over(tmp_path: Path) -> None:
    root = npy_files(tmp_path)
    for name in (".hidden", "_work", "index"):
        (root / name).mkdir()
        np.save(root / name / "x.npy", np.ones((3, DIM), np.float16))
    (root / "index/CURRENT").write_text("v0001")
    np.save(root / ".x.npy", np.ones((3, DIM), np.float16))
    assert open_collection(root).n == ROWS


@pytest.mark.parametrize(
    "other", [np.ones((2, DIM + 1), np.float16), np.ones((2, DIM), np.float32)], ids=["length", "type"]
)
def test_vectors_of_two_kinds_are_refused_with_both_files(tmp_path: Path, other: np.ndarray) -> None:
    root = npy_files(tmp_path)
    np.save(root / "z.npy", other)
    refused(root, "mixed_embeddings", "a.npy", "z.npy", str(other.shape[1]), str(other.dtype))


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.asfortranarray(np.ones((4, DIM), np.float16)), "Fortran"),
        (np.ones(DIM, np.float16), "(8,)"),
        (np.ones((2, 2, 2), np.float16), "(2, 2, 2)"),
        (np.ones((4, DIM), np.int8), "int8"),
        (np.ones((4, 0), np.float16), "no numbers"),
    ],
    ids=["fortran", "1-d", "3-d", "whole numbers", "no numbers"],
)
def test_what_is_no_list_of_vectors_is_refused_by_its_name(tmp_path: Path, array: np.ndarray, why: str) -> None:
    np.save(tmp_path / "odd.npy", array)
    refused(tmp_path, "not_vectors", "odd.npy", why)


class Trap:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(Path(os.environ["TRAP"])),)


def test_nothing_in_a_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    np.save(tmp_path / "a.npy", np.array([Trap()], object), allow_pickle=True)
    refused(tmp_path, "part_damaged", "a.npy")
    (tmp_path / "a.npy").write_bytes(pickle.dumps(Trap()))
    refused(tmp_path, "part_damaged", "a.npy")
    assert not (tmp_path / "sprung").exists()


def damaged_files() -> dict[str, Callable[[bytes], bytes]]:
    return {
        "no header": lambda data: b"nothing of that kind" * 20,
        "cut off": lambda data: data[:-3],
        "cut in the header": lambda data: data[:40],
        "damaged header": lambda data: data[:10] + b"{" * 40 + data[50:],
    }


@pytest.mark.parametrize("how", damaged_files())
def test_a_damaged_npy_file_is_refused_by_its_name(tmp_path: Path, how: str) -> None:
    root = npy_files(tmp_path)
    path = root / "b/part0.npy"
    path.write_bytes(damaged_files()[how](path.read_bytes()))
    refused(root, "part_damaged", "part0.npy")


def test_where_there_are_no_embeddings_that_is_said(tmp_path: Path) -> None:
    refused(tmp_path, "no_embeddings", str(tmp_path), ".npy", ".parquet", ".h5")
    refused(tmp_path / "nowhere", "no_embeddings", "nowhere")
    (tmp_path / "a.npy").write_bytes(b"")
    np.save(tmp_path / "b.npy", np.ones((0, DIM), np.float16))
    refused(tmp_path, "no_embeddings", "2 .npy files are empty")
    refused(tmp_path, "no_embeddings", ".parquet", file_format="parquet")
    with pytest.raises(UsageError):
        open_collection(tmp_path, file_format="csv")
    with pytest.raises(UsageError):
        open_collection(tmp_path, id_columns=["key"])


def test_files_of_two_formats_are_refused_unless_one_is_chosen(tmp_path: Path) -> None:
    root = parquet_files(tmp_path)
    np.save(root / "x.npy", wanted_vectors())
    refused(root, "mixed_embeddings", ".parquet", "x.npy")
    assert open_collection(root, file_format="npy").kind == "npy"
    assert open_collection(root, file_format="parquet").kind == "parquet"
    shutil.rmtree(root / "deep")
    pq.write_table(pa.table({"url": ["x"]}), root / "a.parquet")
    assert open_collection(root).kind == "npy"


@pytest.mark.parametrize(("format", "suffix"), [("parquet", ".parquet"), ("hdf5", ".h5"), ("npy", ".parquet")])
def test_exports_of_two_models_are_refused_with_both(tmp_path: Path, format: str, suffix: str) -> None:
    inputs = write_inputs(tmp_path / "in")
    eight = build(tmp_path / "eight", inputs, model="stub:8", rows=RowSpec(normalize=True))
    sixteen = build(tmp_path / "sixteen", inputs, model="stub:16", rows=RowSpec(truncate_dim=8))
    for out in (eight, sixteen):
        export(out, tmp_path / "to" / out.name, ExportOptions(format=format, rows_per_file=30))
    one = open_collection(tmp_path / "to/eight")
    run = open_collection(eight)
    assert (one.fingerprint, one.dim, one.n) == (run.fingerprint, 8, ROWS)
    assert (read(one) == read(run)).all()
    assert [row["key"] for row in rows_of(one)] == [row["key"] for row in rows_of(run)]
    for path in sorted((tmp_path / "to/sixteen").rglob("*.*")):  # behind the others, in the same folders
        if path.suffix in (suffix, ".npy"):
            name = re.sub(r"0(?=[.]|\d[.])", "9", path.name, count=1)
            path.rename(tmp_path / "to/eight" / path.relative_to(tmp_path / "to/sixteen").parent / name)
    refused(tmp_path / "to/eight", "mixed_embeddings", "stub:8", "stub:16")


# --- changes ---


@pytest.mark.parametrize("make", [npy_files, parquet_files, hdf5_files, clip_retrieval_files])
def test_a_file_that_was_written_again_is_another_one(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    root = make(tmp_path)
    before = open_collection(root)
    path = root / before.parts[0].files[-1].path
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(InputError, match=str(path)) as caught:
        read(before)
    assert caught.value.code == "part_changed"
    assert open_collection(root).digest != before.digest
    with pytest.raises(InputError, match=str(path)) as caught:
        open_collection(root).grown_from(before)
    assert caught.value.code == "part_changed"


def test_new_files_get_ids_behind_the_old_ones_wherever_they_sort(tmp_path: Path) -> None:
    root = npy_files(tmp_path)
    old = open_collection(root)
    more = wanted_vectors(5, seed=9)
    np.save(root / "aa.npy", more[:2])
    np.save(root / "z.npy", more[2:])
    new = open_collection(root)
    assert [(part.files[0].path, part.first_id) for part in new.grown_from(old)] == [("aa.npy", 40), ("z.npy", 42)]
    continued = new.continuing(old)
    assert (read(continued) == np.concatenate([wanted_vectors(), more])).all()
    assert continued.blocks(1000, old.n)[0].first_id == old.n
    (root / "a.npy").unlink()
    with pytest.raises(InputError, match=r"a[.]npy") as caught:
        open_collection(root).grown_from(old)
    assert caught.value.code == "part_missing"


def test_metadata_of_new_files_fit_the_columns_that_the_index_has(tmp_path: Path) -> None:
    root = clip_retrieval_files(tmp_path)
    old = open_collection(root)

    def add(metadata: dict[str, list[object]]) -> Collection:
        for name in ("img_emb", "text_emb"):
            np.save(root / name / f"{name}_2.npy", wanted_vectors(1))
        pq.write_table(pa.table({"caption": ["c"], **metadata}), root / "metadata/metadata_2.parquet")
        return open_collection(root)

    now = add({"width": [3], "image_path": [5], "new": [1]}).continuing(old)
    assert now.id_columns == old.id_columns
    row = {"key": "5", "image_path": "5", "width": 3.0, "input_id": None, "caption": "c"}
    assert row.items() <= rows_of(now)[ROWS].items()
    assert rows_of(now)[:ROWS] == rows_of(old)
    with pytest.raises(InputError, match=r"'width' was float64 .* and is string") as caught:
        add({"width": ["wide"]}).grown_from(old)
    assert caught.value.code == "other_embeddings"


def test_the_digest_does_not_go_by_the_place(tmp_path: Path) -> None:
    root = npy_files(tmp_path)
    shutil.copytree(root, tmp_path / "copy")  # with the times of the files
    assert open_collection(tmp_path / "copy").digest == open_collection(root).digest


# --- parquet ---


def test_parquet_files_are_read_with_what_names_their_rows(tmp_path: Path) -> None:
    root = parquet_files(tmp_path)
    collection = open_collection(root)
    assert collection.empty == ("deep/b.parquet",)
    assert (read(collection) == wanted_vectors()).all()
    assert collection.id_columns == ()
    assert rows_of(collection)[20] == {
        "id": 20,
        "key": "http://x/20",
        "caption": "caption 20",
        "source": "deep/c.parquet",
        "unit_id": None,
    }
    chosen = open_collection(root, id_columns=["width", "url"])
    assert chosen.id_types == {"width": "int64", "url": "string"}
    row = rows_of(chosen)[20]
    assert (row["key"], row["caption"], row["width"], row["url"]) == ("http://x/20", None, 20, "http://x/20")
    assert rows_of(open_collection(root, id_columns=["width"]))[20]["key"] == "deep/c.parquet:3"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_lists_of_any_float_become_float32(tmp_path: Path, dtype: str) -> None:
    matrix = wanted_vectors().astype(dtype)
    type_ = pa.large_list(pa.from_numpy_dtype(dtype))
    lists = pa.array(list(matrix), type_)
    pq.write_table(pa.table({"vectors": lists, "other": pa.array(range(ROWS))}), tmp_path / "a.parquet")
    collection = open_collection(tmp_path)
    assert (collection.column, collection.output) == ("vectors", "vectors")
    assert (read(collection) == matrix.astype(np.float32)).all()


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("value", [pa.float16(), pa.float32()], ids=str)
def test_a_row_without_a_vector_is_nan(tmp_path: Path, fixed: bool, value: pa.DataType) -> None:
    one, nan = [np.float16(0.5)] * 3, [np.float16(0.5), None, np.float16(0.5)]
    lists = pa.array([one, None, nan, one], pa.list_(value, 3) if fixed else pa.list_(value))
    pq.write_table(pa.table({"embedding": lists}), tmp_path / "a.parquet")
    found = np.isnan(read(open_collection(tmp_path)))
    assert found.tolist() == [[False] * 3, [True] * 3, [False, True, False], [False] * 3]


def test_a_vector_of_another_length_is_refused_with_its_row(tmp_path: Path) -> None:
    lists = [[1.0, 0.0]] * 20_000
    pq.write_table(pa.table({"embedding": [*lists, [1.0], *lists]}), tmp_path / "a.parquet")
    refused(tmp_path, "mixed_embeddings", "a.parquet", "20,000", "1 numbers, not 2")


def test_columns_that_are_none_of_vectors_are_refused(tmp_path: Path) -> None:
    table = {"a": [[1.0, 2.0]], "b": [[1.0]], "text": ["x"], "n": [[1]]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    refused(tmp_path, "which_output", "a, b")
    refused(tmp_path, "no_column", "'c'", column="c")
    refused(tmp_path, "not_vectors", "'text'", column="text")
    refused(tmp_path, "not_vectors", "'n'", column="n")
    refused(tmp_path, "no_column", "'c'", column="a", id_columns=["c"])
    assert open_collection(tmp_path, column="b").dim == 1
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    refused(tmp_path, "no_embeddings", "a.parquet", "text")


def test_columns_of_metadata_have_one_type_in_all_files(tmp_path: Path) -> None:
    vectors = {"embedding": [[1.0, 0.0]]}
    first = {"id": [7], "n": [1], "x": pa.array([None]), "mixed": [1], "tags": [["a", "b"]], "b": [b"\xff"]}
    second = {"id": ["u"], "n": [0.5], "x": [True], "mixed": ["m"], "tags": [None], "b": [b"ok"]}
    pq.write_table(pa.table({**vectors, **first}), tmp_path / "a.parquet")
    pq.write_table(pa.table({**vectors, **second}), tmp_path / "b.parquet")
    collection = open_collection(tmp_path, id_columns=["id", "n", "x", "mixed", "tags", "b"])
    one, two = (dict(list(row.items())[5:]) for row in rows_of(collection))
    assert one == {"input_id": "7", "n": 1.0, "x": None, "mixed": "1", "tags": '["a", "b"]', "b": "\\xff"}
    assert two == {"input_id": "u", "n": 0.5, "x": True, "mixed": "m", "tags": None, "b": "ok"}
    assert [row["key"] for row in rows_of(collection)] == ["7", "u"]


def test_only_the_groups_of_rows_that_are_wanted_are_read(tmp_path: Path) -> None:
    matrix = wanted_vectors(3_000).astype(np.float32)
    table = pa.table({"embedding": pa.array(list(matrix), pa.list_(pa.float32(), DIM))})
    pq.write_table(table, path := tmp_path / "a.parquet", row_group_size=1_000, compression="zstd")
    group = pq.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = group.dictionary_page_offset or group.data_page_offset
    content[start : start + group.total_compressed_size] = bytes(group.total_compressed_size)
    path.write_bytes(content)
    collection = open_collection(path)
    for first, stop in ((0, 1_000), (2_000, 3_000), (2_500, 2_501)):
        ((start, found),) = collection.read_vectors(first, stop)
        assert (start, found.tolist()) == (first, matrix[first:stop].tolist())
    with pytest.raises(InputError) as caught:
        list(collection.read_vectors(999, 1_001))
    assert caught.value.code == "part_damaged"


@pytest.mark.parametrize(("make", "name"), [(parquet_files, "a.parquet"), (hdf5_files, "parts/part-00000001.h5")])
def test_a_damaged_file_is_refused_by_its_name(tmp_path: Path, make: Callable[[Path], Path], name: str) -> None:
    root = make(tmp_path)
    (root / name).write_bytes((root / name).read_bytes()[:-200])
    refused(root, "part_damaged", name)
    (root / name).write_bytes(b"")
    refused(root, "part_damaged", name)


# --- HDF5 ---


def test_an_export_in_hdf5_is_read_with_its_metadata(tmp_path: Path) -> None:
    root = hdf5_files(tmp_path)
    run = open_collection(tmp_path / "out")
    collection = open_collection(root, id_columns=["key", "rank"])
    assert collection.empty == ("dataset.h5",)
    assert (read(collection) == read(run)).all()
    assert collection.id_types == {"rank": "int64"}
    row = rows_of(collection)[33]
    assert (row["key"], row["rank"], row["source"]) == ("a33", 33, "parts/part-00000002.h5")
    refused(root, "no_column", "'other'", id_columns=["other"])
    refused(root, "no_column", "'other'", column="other")
    refused(root, "not_vectors", "'rank'", column="rank")
    refused(root / "dataset.h5", "not_vectors", "rows of other files")


@pytest.mark.parametrize("name", ["a.h5", "a.hdf5", "dataset.h5"])
def test_hdf5_files_that_embq_did_not_write_are_refused(tmp_path: Path, name: str) -> None:
    with h5py.File(tmp_path / name, "w") as file:
        file["embedding"] = wanted_vectors()
    assert ".parquet" in refused(tmp_path, "not_vectors", name, "was not written by embq").next_step


# --- clip-retrieval ---


def test_a_clip_retrieval_folder_pairs_its_files_by_number(tmp_path: Path) -> None:
    root = clip_retrieval_files(tmp_path)
    images, texts = open_collection(root), open_collection(root, output="text")
    assert (images.output, images.query_columns) == ("image", {"text": "text_emb"})
    assert (texts.output, texts.query_columns) == ("text", {"image": "img_emb"})
    assert (read(images) == wanted_vectors()).all()
    assert (read(images, "text_emb") == wanted_vectors(seed=4)).all()
    assert (read(texts) == wanted_vectors(seed=4)).all()
    assert images.id_types == {"image_path": "string", "width": "float64", "input_id": "int64"}
    assert rows_of(images)[30] == {
        "id": 30,
        "key": "00030",
        "caption": "caption 30",
        "source": "img_emb/img_emb_3.npy",
        "unit_id": None,
        "image_path": "00030",
        "width": 30.0,
        "input_id": 30,
    }
    assert open_collection(root, id_columns=["width"]).id_columns == ("width",)


def test_a_clip_retrieval_folder_needs_no_metadata_and_no_texts(tmp_path: Path) -> None:
    root = clip_retrieval_files(tmp_path)
    shutil.rmtree(root / "metadata")
    shutil.rmtree(root / "text_emb")
    collection = open_collection(root)
    assert (read(collection) == wanted_vectors()).all()
    assert rows_of(collection)[9]["key"] == "img_emb/img_emb_1.npy:0"
    assert collection.query_columns == {}
    refused(root, "which_output", "'text'", output="text")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda root: (root / "metadata/metadata_1.parquet").unlink(), ["img_emb_1.npy", "metadata"]),
        (lambda root: (root / "img_emb/img_emb_1.npy").unlink(), ["metadata_1.parquet", "img_emb"]),
        (lambda root: (root / "text_emb/text_emb_3.npy").unlink(), ["img_emb_3.npy", "text_emb"]),
        (
            lambda root: shutil.copy(root / "img_emb/img_emb_3.npy", root / "img_emb/img_emb_03.npy"),
            ["img_emb_3.npy", "img_emb_03.npy"],
        ),
        (
            lambda root: np.save(root / "img_emb/img_emb_0.npy", np.ones((8, DIM), np.float16)),
            ["img_emb_0.npy", "8", "text_emb_0.npy", "9"],
        ),
        (
            lambda root: pq.write_table(pa.table({"caption": ["a"]}), root / "metadata/metadata_3.parquet"),
            ["img_emb_3.npy", "metadata_3.parquet", "10", "1"],
        ),
    ],
    ids=["metadata missing", "images missing", "texts missing", "twice", "other images", "other metadata"],
)
def test_files_that_do_not_belong_together_are_refused(
    tmp_path: Path, change: Callable[[Path], object], names: list[str]
) -> None:
    root = clip_retrieval_files(tmp_path)
    change(root)
    refused(root, "misaligned", *names)
