"""Every kind of collection has the same rows under the same ids, however they are read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from embq.core.errors import InputError
from embq.index.collection.opening import Collection, open_collection
from embq.index.index_files.files import from_json, to_json
from tests.indexer.collections_made import DIM, KINDS, ROWS


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture
def collection(made: Path) -> Collection:
    return open_collection(made)


def everything(collection: Collection) -> np.ndarray:
    return np.concatenate([rows for _, rows in collection.read_vectors(0, collection.n)])


def test_all_rows_are_there_as_float32(collection: Collection) -> None:
    assert (collection.n, collection.dim, collection.complete) == (ROWS, DIM, True)
    found = everything(collection)
    assert found.shape == (ROWS, DIM)
    assert found.dtype == np.float32
    assert len(np.unique(found, axis=0)) == ROWS


@pytest.mark.parametrize(("first", "stop"), [(0, ROWS), (0, 1), (9, 12), (ROWS - 1, ROWS), (5, 5), (13, 29)])
@pytest.mark.parametrize("batch_rows", [1, 4, 1000])
def test_any_range_is_a_slice_of_all_rows(collection: Collection, first: int, stop: int, batch_rows: int) -> None:
    wanted = everything(collection)
    at = first
    for start, rows in collection.read_vectors(first, stop, batch_rows=batch_rows):
        assert start == at
        assert len(rows) == min(batch_rows, stop - start)
        assert (rows == wanted[start : start + len(rows)]).all()
        at += len(rows)
    assert at == stop


def test_rows_at_ids_are_those_rows(collection: Collection) -> None:
    wanted = everything(collection)
    for ids in ([], [0], [3, 4, 17, 39], list(range(ROWS))):
        assert (collection.read_rows_at(np.array(ids, np.int64)) == wanted[ids]).all()


def test_identity_goes_with_the_vectors(collection: Collection) -> None:
    tables = list(collection.read_identity(0, ROWS))
    whole = pa.concat_tables(tables)
    assert {table.schema for table in tables} == {whole.schema}
    assert whole.column_names[:5] == ["id", "key", "caption", "source", "unit_id"]
    assert whole.column_names[5:] == list(collection.id_columns)
    assert whole["id"].to_pylist() == list(range(ROWS))
    assert len(set(whole["key"].to_pylist())) == ROWS
    assert None not in whole["source"].to_pylist()
    part = pa.concat_tables(collection.read_identity(8, 23))
    assert part.to_pylist() == whole.slice(8, 15).to_pylist()


def test_a_description_is_json_and_gives_the_collection_back(collection: Collection) -> None:
    again = from_json(Collection, json.loads(json.dumps(to_json(collection))), "collection")
    assert again == collection
    assert again.digest == collection.digest


@pytest.mark.parametrize("block_rows", [1, 3, 7, 16, 39, 40, 1000])
def test_blocks_cover_all_rows_once(collection: Collection, block_rows: int) -> None:
    at = 0
    for block in collection.blocks(block_rows):
        assert block.first_id == at
        assert 0 < block.rows <= block_rows
        at = block.stop_id
    assert at == ROWS


def test_a_part_that_is_gone_or_changed_is_named(made: Path, collection: Collection) -> None:
    path = made / collection.parts[0].files[0].path
    content, status = path.read_bytes(), path.stat()
    path.unlink()
    with pytest.raises(InputError, match=str(path)) as caught:
        list(collection.read_vectors(0, 1))
    assert caught.value.code == "part_missing"
    path.write_bytes(content + b"more")
    with pytest.raises(InputError, match=str(path)) as caught:
        list(collection.read_identity(0, 1))
    assert caught.value.code == "part_changed"
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    collection.check()
