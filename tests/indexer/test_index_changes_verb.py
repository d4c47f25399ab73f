"""`embq index` on an index that is there: it adds, deletes, compacts, and says so."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from embq.app.cli.entry_point import run
from embq.core.errors import Exit
from embq.indexer.index_files.version import read_current
from embq.indexer.searcher import Searcher
from tests.indexer.indexes_that_grow import add_part, rows


@dataclass(frozen=True)
class Told:
    """Output of a command."""

    exit_code: int
    stdout: str
    stderr: str


def embq_index(*words: object) -> Told:
    """Call the verb."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = run(["index", *map(str, words)])
    return Told(status, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of vectors with its index, grown once."""
    data = tmp_path_factory.mktemp("verb") / "data"
    for number in range(2):
        add_part(data, f"p{number}", rows(400, number))
    built = embq_index(data, "--index-key", "IVF16,SQ8", "--recall", "0.8", "--quiet")
    assert built.exit_code == Exit.DONE, built.stderr
    return data


def index_of(data: Path) -> Path:
    """Folder of the index."""
    return data / "index" / "embedding"


def test_the_same_command_adds_what_is_new(data: Path) -> None:
    add_part(data, "q", rows(50, 60))
    told = embq_index(data, "--index-key", "IVF16,SQ8", "--recall", "0.8")
    assert told.exit_code == Exit.DONE, told.stderr
    assert "adding 50 new rows to its 800" in told.stderr
    assert "added 50 rows" in told.stderr
    assert "850 vectors" in told.stdout
    again = embq_index(data, "--index-key", "IVF16,SQ8", "--recall", "0.8", "--json")
    assert json.loads(again.stdout)["fresh"] is False
    assert json.loads(again.stdout)["infos"]["growth"]["rows_added"] == 50


def test_keys_are_deleted_by_name_and_from_a_file(data: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("p0.npy:1\n\np0.npy:2\r\n")
    told = embq_index(data, "--delete", "p0.npy:0", "--delete-from", tmp_path / "keys.txt", "--json")
    assert told.exit_code == Exit.DONE, told.stderr
    assert json.loads(told.stdout)["deleted"] == 3
    found = Searcher.open(index_of(data)).search(rows(5, 1).astype(np.float32), 800, nprobe=16)
    assert not np.isin(found.ids, [0, 1, 2]).any()


def test_keys_from_a_pipe_are_deleted_all(data: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"p0.npy:3\np0.npy:4\n")
    os.close(write)
    told = embq_index(data, "--delete-from", f"/dev/fd/{read}", "--json")
    os.close(read)
    assert json.loads(told.stdout)["deleted"] == 2


def test_a_key_that_nobody_has_is_told_by_the_status(data: Path) -> None:
    told = embq_index(data, "--delete", "p1.npy:0", "--delete", "nobody")
    assert told.exit_code == Exit.SOME_FAILED
    assert "nobody" in told.stderr
    before = read_current(index_of(data))
    assert embq_index(data, "--delete", "nobody").exit_code == Exit.BAD_INPUT
    assert read_current(index_of(data)).name == before.name


def test_an_index_is_compacted_by_its_own_folder_as_well(data: Path) -> None:
    assert embq_index(data, "--delete", "p1.npy:9").exit_code == Exit.DONE
    told = embq_index(index_of(data), "--compact")
    assert told.exit_code == Exit.DONE, told.stderr
    assert "compacted" in told.stdout
    assert "nothing to compact" in embq_index(data, "--compact", "--quiet").stdout


def test_a_file_of_keys_that_is_none_is_refused(data: Path, tmp_path: Path) -> None:
    assert "bad_keys" in embq_index(data, "--delete-from", tmp_path / "nothing").stderr
    (tmp_path / "empty").write_text("\n")
    assert "bad_keys" in embq_index(data, "--delete-from", tmp_path / "empty").stderr


def test_deleting_and_compacting_are_two_steps(data: Path) -> None:
    assert embq_index(data, "--delete", "p0.npy:9", "--compact").exit_code == Exit.USAGE


def test_an_index_that_is_not_there_cannot_forget(tmp_path: Path) -> None:
    assert "no_index" in embq_index(tmp_path, "--delete", "k").stderr
