"""The map of an index that changes, and of rows without captions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from embq.index.atlas.map_file import MapOptions, make_map, map_path
from embq.index.atlas.projection import reduce
from embq.index.change.deletes import delete
from tests.indexer.indexes_that_grow import add_part, grown, make_index, rows


def test_a_map_follows_its_index_and_holds_no_deleted_row(tmp_path: Path) -> None:
    index = make_index(tmp_path, parts=2)
    info, made = make_map(index, MapOptions())
    assert made
    assert info.rows == info.of == 800
    assert {one.label for one in info.clusters} == {""}
    leftover = index / ".map.parquet.0123abcd"
    leftover.write_bytes(b"of a killed process")
    delete(index, [], np.arange(10, 30))
    assert not leftover.exists()
    add_part(tmp_path / "data", "q", rows(100, 5))
    grown(index)
    info, made = make_map(index, MapOptions())
    assert made
    assert info.rows == info.of == 880
    ids = pq.read_table(map_path(index), columns=["id"])["id"].to_numpy()
    assert np.array_equal(ids, np.r_[0:10, 30:900])
    assert not make_map(index, MapOptions())[1]


def test_principal_axes_are_those_of_all_rows_at_once_and_leave_faults_out() -> None:
    matrix = 3.0 + np.random.default_rng(2).standard_normal((5_000, 64)) * np.linspace(3, 0.1, 64)
    data = matrix.astype(np.float32)
    data[[7, 4_000]] = 0.0
    data[9, 3] = np.nan
    found = reduce(lambda ids: data[ids], np.arange(5_000), 64)
    good = np.delete(np.arange(5_000), [7, 9, 4_000])
    assert np.array_equal(found.ids, good)
    centred = matrix[good] - matrix[good].mean(axis=0)
    _, singular, axes = np.linalg.svd(centred, full_matrices=False)
    expected = np.abs(centred @ axes[:2].T)
    assert np.abs(np.abs(found.points[:, :2]) - expected).max() < 1e-3
    assert np.allclose(found.shares[:2], singular[:2] ** 2 / (singular**2).sum(), atol=1e-5)
