"""`dataset.h5` shows all committed HDF5 parts as one file, is made anew when it is missing, and is never relied on."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from embq.core.errors import OutputError
from embq.core.run.commit_log import CommitLog
from embq.writer.run_writer import RunWriter
from tests.contract.storing import COLUMNS, FINGERPRINT, Output
from tests.support.second_reader.checks import verify


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return Output(tmp_path / "out", "hdf5")


def values(file: h5py.File, column: str) -> list[object]:
    """A column as a user reads it, with nulls and NUL characters where the file says they are."""
    dataset = file[column]
    found = (dataset.asstr() if h5py.check_string_dtype(dataset.dtype) else dataset)[:].tolist()
    for row, position in file[f"nul/{column}"][:] if f"nul/{column}" in file else ():
        found[row] = found[row][:position] + "\0" + found[row][position + 1 :]
    valid = file[f"valid/{column}"][:] if f"valid/{column}" in file else np.ones(len(found), bool)
    return [value if there else None for value, there in zip(found, valid, strict=True)]


def assert_shows_all(output: Output) -> None:
    wanted = output.wanted()
    paths = {"metadata": "metadata_json", **{column.name: f"metadata/{column.name}" for column in COLUMNS}}
    with h5py.File(output.root / "dataset.h5") as file:
        assert file.attrs["embq.rows"] == len(wanted)
        assert file.attrs["embq.fingerprint"] == FINGERPRINT
        assert np.array_equal(file["embedding"][:], np.array(wanted["embedding"].to_pylist(), np.float16))
        for name in wanted.column_names:
            if name != "embedding":
                assert values(file, paths.get(name, name)) == wanted[name].to_pylist(), name


def test_it_shows_every_value_of_every_part(output: Output) -> None:
    output.commit(10, 3)
    output.commit(1)
    output.commit(9)
    output.committer.close({})
    assert_shows_all(output)
    assert verify(output.root, mode="quick").litter == 0


def test_it_moves_with_its_folder(output: Output, tmp_path: Path) -> None:
    output.commit(4)
    output.commit(2)
    output.committer.close({})
    shutil.move(output.root, tmp_path / "elsewhere")
    output.root = tmp_path / "elsewhere"
    assert_shows_all(output)


def test_it_is_renewed_when_the_run_has_grown(output: Output) -> None:
    output.commit(4)
    output.committer.close({})
    output.committer = output.begin("second")
    output.commit(5)
    output.committer.close({})
    assert_shows_all(output)


def test_what_is_no_longer_there_is_made_again(output: Output) -> None:
    output.commit(4)
    output.commit(5)
    output.committer.close({})
    path = output.root / "dataset.h5"
    for harm in (path.unlink, lambda: path.write_bytes(b"cut")):
        harm()
        output.committer.join()
        assert_shows_all(output)


def test_one_that_knows_all_parts_is_left_alone(output: Output) -> None:
    output.commit(4)
    output.committer.close({})
    before = _identity(output.root / "dataset.h5")
    output.committer.join()
    assert _identity(output.root / "dataset.h5") == before


def test_a_log_is_not_closed_over_a_part_that_cannot_be_joined(output: Output) -> None:
    output.commit(4)
    next((output.root / "parts").iterdir()).write_bytes(b"cut")
    with pytest.raises(OutputError) as caught:
        output.committer.close({})
    assert caught.value.code == "part_damaged"
    assert [commit.kind for commit in CommitLog(output.layout).read()] == ["fence", "data"]
    assert not (output.root / "dataset.h5").exists()
    assert list(output.layout.temporary.iterdir()) == []


def test_a_run_without_rows_has_none(output: Output) -> None:
    output.committer.close({})
    assert not (output.root / "dataset.h5").exists()


def test_a_writer_that_opens_a_finished_run_makes_a_missing_one(make_run) -> None:
    run = make_run(2, format="hdf5")
    run.finish(run.writer())
    path = run.layout.root / "dataset.h5"
    path.unlink()
    writer: RunWriter = run.writer()
    assert writer.finished
    with h5py.File(path) as file:
        assert file["key"].asstr()[:].tolist() == ["0:0", "0:1", "0:2", "1:0", "1:1", "1:2"]


def _identity(path: Path) -> tuple[int, int, int]:
    """Fields that change when a file is written again; reading it changes the time of access alone."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
