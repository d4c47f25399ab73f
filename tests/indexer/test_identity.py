"""Identity files: rows are found by id, whatever batch and file they are in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from embq.core.errors import InputError
from embq.index.collection.opening import open_collection
from embq.index.collection.parts import NAMES
from embq.index.index_files.identity import BATCH_ROWS, Identity, write_identity
from tests.indexer.collections_made import KINDS, ROWS


def tables(rows: int, first_id: int = 0, at_once: int = 10_000) -> Iterator[pa.Table]:
    """Rows whose every value follows from their id."""
    for start in range(first_id, first_id + rows, at_once):
        ids = list(range(start, min(start + at_once, first_id + rows)))
        yield pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "key": [f"k{row}" for row in ids],
                "caption": [None if row % 2 else f"caption {row}" for row in ids],
                "source": pa.array([f"s{row // 9_000}" for row in ids]).cast(NAMES),
                "unit_id": pa.array([f"u{row // 1_000}" for row in ids]).cast(NAMES),
                "rank": pa.array([row * 2 for row in ids], pa.int64()),
            }
        )


def wanted(row: int) -> dict[str, object]:
    return {
        "id": row,
        "key": f"k{row}",
        "caption": None if row % 2 else f"caption {row}",
        "source": f"s{row // 9_000}",
        "unit_id": f"u{row // 1_000}",
        "rank": row * 2,
    }


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    folder = tmp_path_factory.mktemp("identity")
    sizes = [(0, 2 * BATCH_ROWS + 100), (2 * BATCH_ROWS + 100, BATCH_ROWS), (3 * BATCH_ROWS + 100, 5)]
    for number, (first, rows) in enumerate(sizes):
        write_identity(tables(rows, first), folder / f"{number}.arrow")
    return Identity.open([(folder / f"{number}.arrow", *size) for number, size in enumerate(sizes)])


def test_rows_come_in_the_order_of_their_ids(identity: Identity) -> None:
    last = 3 * BATCH_ROWS + 104
    ids = [5, BATCH_ROWS, BATCH_ROWS - 1, last, -1, 0, 5, 2 * BATCH_ROWS + 100, 2 * BATCH_ROWS + 99, -1]
    assert identity.rows(np.array(ids)).to_pylist() == [wanted(row) for row in ids if row >= 0]
    assert identity.rows(np.array([[1, 2], [3, -1]]), ["key"]).to_pydict() == {"key": ["k1", "k2", "k3"]}
    assert identity.rows(np.array([-1])).to_pylist() == []
    assert identity.rows(np.array([-1])).schema == identity.rows(np.array([1])).schema


@pytest.mark.parametrize("row", [3 * BATCH_ROWS + 105, 10**12])
def test_an_id_that_is_none_is_refused(identity: Identity, row: int) -> None:
    with pytest.raises(InputError, match=str(row)) as caught:
        identity.rows(np.array([0, row]))
    assert caught.value.code == "no_such_id"


def test_all_ids_of_a_key_are_found(identity: Identity, tmp_path: Path) -> None:
    keys = ["k0", "nobody", f"k{3 * BATCH_ROWS + 104}", "k70000"]
    assert identity.ids_of(keys) == {"k0": [0], "nobody": [], keys[2]: [3 * BATCH_ROWS + 104], "k70000": [70000]}
    twice = pa.concat_tables([*tables(3), *tables(3)])
    write_identity([twice], tmp_path / "twice.arrow")
    assert Identity.open([(tmp_path / "twice.arrow", 0, 6)]).ids_of(["k1"]) == {"k1": [1, 1]}


@pytest.mark.parametrize("damage", [b"", b"no arrow at all", None])
def test_a_file_that_is_damaged_is_named(tmp_path: Path, damage: bytes | None) -> None:
    path = tmp_path / "one.arrow"
    write_identity(tables(10), path)
    path.write_bytes(path.read_bytes()[:-20] if damage is None else damage)
    with pytest.raises(InputError, match=str(path)) as caught:
        Identity.open([(path, 0, 10)])
    assert caught.value.code == "index_damaged"


def test_a_compressed_file_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    """A few kB of zstd become gigabytes as soon as a batch is opened, and those of its dictionaries at once."""
    write_identity(tables(5), tmp_path / "plain.arrow")
    with pa.ipc.open_file(tmp_path / "plain.arrow") as reader:
        table = reader.read_all()
    for columns in (table.column_names, ["id", "key"]):  # with and without dictionaries
        chosen, path = table.select(columns), tmp_path / f"{len(columns)}.arrow"
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(str(path), chosen.schema, options=options) as writer:
            writer.write_table(chosen)
        with pytest.raises(InputError, match="is compressed"):
            Identity.open([(path, 0, 5)]).rows(np.array([0]))


def test_a_file_of_another_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.arrow"
    write_identity(tables(10), path)
    with pytest.raises(InputError, match="10 rows"):
        Identity.open([(path, 0, 11)]).rows(np.array([3]))
    with pytest.raises(InputError, match="batches"):
        Identity.open([(path, 0, BATCH_ROWS + 1)])


@pytest.mark.parametrize("kind", KINDS)
def test_every_collection_can_be_written_and_found_again(tmp_path: Path, kind: str) -> None:
    collection = open_collection(KINDS[kind](tmp_path))
    cuts = [(0, 11), (11, 12), (12, ROWS)]
    files = []
    for first, stop in cuts:
        write_identity(collection.read_identity(first, stop), path := tmp_path / f"{first}.arrow")
        files.append((path, first, stop - first))
    ids = np.random.default_rng(1).permutation(ROWS)
    whole = pa.concat_tables(collection.read_identity(0, ROWS)).to_pylist()
    assert Identity.open(files).rows(ids).to_pylist() == [whole[row] for row in ids]
