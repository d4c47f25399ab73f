"""Runs as collections: ids, vectors and sources are those of the commit log, however little of the run there is."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from embq.core.errors import InputError, UsageError
from embq.core.rows.spec import DTYPES, RowSpec
from embq.core.rows.vectors import restored
from embq.core.run.commit_log import CommitLog
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.storage import object_clients
from embq.core.storage.paths import place
from embq.index.collection.opening import Collection, open_collection
from tests.indexer.collections_made import DIM, ROWS, run_of, stored_rows, stored_vectors, write_inputs
from tests.support.outputs.build import build, go_on, write_jsonl, write_tar

PAIRS = [
    member
    for row in range(6)
    for member in ((f"{row}.jpg", b"\xff\xd8 picture %d" % row), (f"{row}.txt", b"caption %d" % row))
]


def read(collection: Collection, column: str | None = None) -> np.ndarray:
    return np.concatenate([rows for _, rows in collection.read_vectors(0, collection.n, column=column)])


def both(collection: Collection) -> None:
    read(collection)
    identity(collection)


def identity(collection: Collection) -> pa.Table:
    return pa.concat_tables(collection.read_identity(0, collection.n))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["parquet", "hdf5", "arrow"])
def test_what_is_stored_is_restored(tmp_path: Path, format: str, dtype: str) -> None:
    out = run_of(format, dtype)(tmp_path)
    collection = open_collection(out)
    assert collection.dim == DIM
    assert collection.unit_length == (dtype == "int8")  # which implies it; the stub's are of any length
    assert (read(collection) == restored(stored_vectors(out), RowSpec(dtype=dtype))).all()
    assert collection.rows_spec["dtype"] == dtype


@pytest.mark.parametrize("rows", [{"normalize": True}, {"truncate_dim": 8}])
@pytest.mark.parametrize(("dtype", "unit"), [("float16", True), ("binary", False)])
def test_vectors_of_length_1_are_known(tmp_path: Path, rows: dict[str, object], dtype: str, unit: bool) -> None:
    spec = RowSpec(dtype=dtype, **rows)  # type: ignore[arg-type]
    collection = open_collection(build(tmp_path / "out", write_inputs(tmp_path / "in"), model="stub:16", rows=spec))
    assert collection.dim == spec.kept_dim(16)
    assert collection.unit_length == unit
    lengths = np.linalg.norm(read(collection), axis=1)
    assert (np.abs(lengths - (1.0 if unit else collection.dim**0.5)) < 1e-2).all()


def test_identity_says_what_the_run_knows_of_a_row(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "in")
    out = build(tmp_path / "out", inputs, unit_samples=7)
    collection = open_collection(out)
    rows, found = stored_rows(out), identity(collection)
    for name in ("id", "key", "caption", "unit_id", *collection.id_columns):
        assert found[name].to_pylist() == rows[name].to_pylist(), name
    assert {"rank", "tag", "metadata"} <= set(collection.id_columns)
    units = {unit.unit_id: unit.source for unit in Manifest(Layout(out))}
    assert found["source"].to_pylist() == [units[unit] for unit in rows["unit_id"].to_pylist()]
    assert set(found["source"].to_pylist()) == {str(path) for path in inputs}


def test_the_collection_says_which_model_made_the_vectors(tmp_path: Path) -> None:
    out = run_of("parquet")(tmp_path)
    collection = open_collection(out)
    records = list(CommitLog(Layout(out)).read())
    assert collection.fingerprint == records[1].fingerprint
    assert collection.run == records[0].run
    assert collection.model is not None
    assert collection.model["output"] == {"name": "text", "spec": f"stub:{DIM}", "modality": "text"}
    assert (collection.output, collection.column, collection.query_columns) == ("text", "embedding", {})
    assert [file.sha256 for part in collection.parts for file in part.files] == [
        file.sha256 for record in records for file in record.files if file.of_rows
    ]


@pytest.mark.parametrize("format", ["parquet", "npy"])
def test_of_images_and_texts_the_images_are_indexed_and_the_texts_are_queries(tmp_path: Path, format: str) -> None:
    shard = write_tar(tmp_path / "shard.tar", PAIRS)
    out = build(tmp_path / "out", [shard], modalities=("image", "text"), format=format)
    images, texts = open_collection(out), open_collection(out, output="text")
    assert (images.output, images.column) == ("image", "image_embedding")
    assert images.query_columns == {"text": "text_embedding"}
    assert texts.query_columns == {"image": "image_embedding"}
    assert open_collection(out, column="text_embedding") == texts
    assert (read(images) == stored_vectors(out, "image_embedding")).all()
    assert (read(images, "text_embedding") == read(texts)).all()
    assert (images.read_rows_at(np.array([1, 4]), column="text_embedding") == read(texts)[[1, 4]]).all()
    assert images.digest != texts.digest
    with pytest.raises(ValueError, match="caption"):
        read(images, "caption")


def test_of_several_models_one_must_be_chosen(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "shard.tar", PAIRS)
    out = build(tmp_path / "out", [shard], model=("small=stub:4", "large=stub:16"), modalities=("image", "text"))
    for wrong in ({}, {"output": "image"}, {"column": "embedding"}, {"output": "small_text", "column": "x"}):
        with pytest.raises(InputError, match=r"large_image|large_text|in column") as caught:
            open_collection(out, **wrong)
        assert caught.value.code == "which_output"
    chosen = open_collection(out, output="large_image")
    assert (chosen.dim, chosen.query_columns) == (16, {"text": "large_text_embedding"})
    assert chosen.model is not None
    assert chosen.model["output"] == {"name": "large_image", "spec": "stub:16", "modality": "image"}


@pytest.mark.parametrize("format", ["parquet", "hdf5", "npy", "arrow"])
def test_a_run_that_is_under_way_is_indexed_as_far_as_it_is_and_grows(tmp_path: Path, format: str) -> None:
    out = build(tmp_path / "out", write_inputs(tmp_path / "in"), format=format, unit_samples=4, only=3)
    some = open_collection(out)
    assert (some.n, some.complete) == (12, False)
    before = read(some)
    go_on(out)
    whole = open_collection(out)
    assert (whole.n, whole.complete) == (ROWS, True)
    assert whole.digest != some.digest
    added = whole.grown_from(some)
    assert added == list(whole.parts[len(some.parts) :])
    assert whole.continuing(some) == whole
    assert (read(whole)[:12] == before).all()
    assert (read(some) == before).all()
    assert some.grown_from(some) == []


def test_what_was_indexed_and_is_no_part_of_the_run_is_told(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "in")
    one = open_collection(build(tmp_path / "one", inputs, unit_samples=4))
    other = open_collection(build(tmp_path / "other", inputs, model="stub:16", unit_samples=4))
    with pytest.raises(InputError, match="dim was 8") as caught:
        other.grown_from(one)
    assert caught.value.code == "other_embeddings"
    less = open_collection(build(tmp_path / "less", inputs, unit_samples=4, only=2))
    with pytest.raises(InputError) as caught:
        less.grown_from(one)
    assert caught.value.code in ("part_missing", "part_changed")


def test_a_run_without_rows_has_no_embeddings(tmp_path: Path) -> None:
    none = build(tmp_path / "none", write_inputs(tmp_path / "in"), only=0)
    with pytest.raises(InputError, match="holds no rows: 0 of its") as caught:
        open_collection(none)
    assert caught.value.code == "no_embeddings"
    failed = build(tmp_path / "failed", [write_jsonl(tmp_path / "bad.jsonl", [{"id": "a", "text": ""}])])
    with pytest.raises(InputError, match="1 failures"):
        open_collection(failed)


def test_a_run_says_itself_what_its_columns_are(tmp_path: Path) -> None:
    out = run_of("parquet")(tmp_path)
    with pytest.raises(UsageError):
        open_collection(out, file_format="parquet")
    with pytest.raises(UsageError):
        open_collection(out, id_columns=["key"])


@pytest.mark.parametrize("format", ["parquet", "hdf5", "npy", "arrow"])
def test_damage_that_leaves_the_size_as_it_was_is_an_error(tmp_path: Path, format: str) -> None:
    collection = open_collection(out := run_of(format)(tmp_path))
    for file in collection.parts[-1].files:
        path = out / file.path
        content = path.read_bytes()
        path.write_bytes(bytes(len(content)))
        with pytest.raises(InputError, match=file.path) as caught:
            both(collection)
        assert caught.value.code == "part_damaged"
        path.write_bytes(content)
    read(collection)


@pytest.mark.slow
def test_a_run_on_an_object_store_is_read_there(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    object_clients.connect.cache_clear()
    out = run_of("parquet")(tmp_path)
    prefix, other = f"{tmp_path.name}/run", f"{tmp_path.name}/second"
    bucket = boto3.resource("s3").Bucket("bucket")
    for path in out.rglob("*"):
        if path.is_file():
            bucket.upload_file(str(path), f"{prefix}/{path.relative_to(out)}")
            bucket.upload_file(str(path), f"{other}/{path.relative_to(out)}")
    near, far = open_collection(out), open_collection(f"s3://bucket/{prefix}")
    assert far.root == f"s3://bucket/{prefix}"
    assert far.digest == near.digest
    assert (read(far) == read(near)).all()
    assert identity(far).equals(identity(near))
    two = open_collection(f"s3://bucket/{other}", far.root)
    assert (two.root, two.folders) == (f"s3://bucket/{tmp_path.name}", ("run", "second"))
    assert (read(two) == np.concatenate([read(near), read(near)])).all()
    assert identity(two)["source"].to_pylist() == 2 * identity(near)["source"].to_pylist()
    gone = far.parts[0].files[0].path
    bucket.Object(f"{prefix}/{gone}").delete()
    with pytest.raises(InputError, match=os.path.basename(gone)) as caught:
        read(far)
    assert caught.value.code == "part_missing"
    with pytest.raises(InputError, match="is not there"):
        open_collection(place("s3://bucket/elsewhere"))
    object_clients.connect.cache_clear()
