"""`embq index` add, delete and compact, and builds where an index is there."""

from __future__ import annotations

import io
import json
import os
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import embq
from embq.app.cli.entry_point import run
from embq.core.errors import Exit
from embq.index.index_files.version import read_current
from embq.index.searcher import Searcher
from tests.indexer.indexes_that_grow import add_part, rows


@dataclass(frozen=True)
class Told:
    """Output of a command."""

    exit_code: int
    stdout: str
    stderr: str


def embq_index(*words: object) -> Told:
    """Call `embq index`."""
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


def test_new_rows_are_added_without_naming_the_options_of_the_build(data: Path) -> None:
    add_part(data, "q", rows(50, 60))
    told = embq_index("add", data)
    assert told.exit_code == Exit.DONE, told.stderr
    assert "adding 50 new rows to the 800 of the index" in told.stderr
    assert "added 50 rows" in told.stderr
    assert "850 vectors" in told.stdout
    again = embq_index("add", index_of(data), "--json")
    assert json.loads(again.stdout)["fresh"] is False
    assert json.loads(again.stdout)["infos"]["growth"]["rows_added"] == 50
    assert "nothing to add" in embq_index("add", data).stderr


def test_the_short_form_builds_and_keeps_an_index_that_is_as_requested(data: Path) -> None:
    for words in ([data], ["build", data]):
        told = embq_index(*words, "--index-key", "IVF16,SQ8", "--recall", "0.8", "--json")
        assert (told.exit_code, json.loads(told.stdout)["fresh"]) == (Exit.DONE, False), told.stderr


def test_each_verb_has_the_options_that_mean_something_for_it(data: Path) -> None:
    for words in (["--delete", "k"], ["--compact"], ["--rebuild"]):
        assert "No such option" in embq_index(data, *words).stderr
    assert "No such option '--recall'" in embq_index("add", data, "--recall", "0.9").stderr
    assert "No such option '--broker'" in embq_index("delete", data, "k", "--broker", "redis://nowhere").stderr
    listed = re.findall(r"^  (\w+) +\w", embq_index("--help").stdout.partition("Commands:")[2], re.MULTILINE)
    assert listed == ["build", "add", "delete", "compact", "dedup", "export"]


def test_a_build_brings_deleted_rows_back_only_where_it_is_told_to(tmp_path: Path) -> None:
    add_part(tmp_path, "p", rows(60, 1))
    assert embq_index(tmp_path, "-q").exit_code == Exit.DONE
    assert embq_index("delete", tmp_path, "p.npy:7").exit_code == Exit.DONE
    assert "is as requested" in embq_index(tmp_path, "-q").stderr
    add_part(tmp_path, "r", rows(60, 2))
    refused = embq_index(tmp_path, "-q")
    assert (refused.exit_code, "1 rows were deleted" in refused.stderr) == (Exit.USAGE, True)
    assert embq_index("add", tmp_path, "-q").exit_code == Exit.DONE
    assert read_current(index_of(tmp_path)).n == 119
    assert embq_index(tmp_path, "-q", "--overwrite").exit_code == Exit.DONE
    assert read_current(index_of(tmp_path)).n == 120


def test_rows_are_added_from_a_program(tmp_path: Path) -> None:
    add_part(tmp_path / "data", "p", rows(60, 1))
    embq.build_index(tmp_path / "data", tmp_path / "index", recall=0.8).close()
    add_part(tmp_path / "data", "r", rows(60, 2))
    with embq.add_to_index(tmp_path / "index") as index:
        assert len(index) == 120
    moved = tmp_path / "data2"
    (tmp_path / "data").rename(moved)
    add_part(moved, "s", rows(60, 3))
    with embq.add_to_index(moved, tmp_path / "index") as index:
        assert len(index) == 180


def test_an_index_is_built_anew_of_more_rows_with_a_hint_to_add_them(tmp_path: Path) -> None:
    add_part(tmp_path, "p", rows(60, 1))
    assert embq_index(tmp_path, "-q").exit_code == Exit.DONE
    add_part(tmp_path, "r", rows(60, 2))
    again = embq_index(tmp_path, "-q")
    assert (again.exit_code, "`embq index add`" in again.stderr) == (Exit.DONE, True)
    assert len(read_current(index_of(tmp_path)).groups) == 1


def test_keys_are_deleted_by_name_and_from_a_file(data: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("p0.npy:1\n\np0.npy:2\r\n")
    told = embq_index("delete", data, "p0.npy:0", "--from", tmp_path / "keys.txt", "--json")
    assert told.exit_code == Exit.DONE, told.stderr
    assert json.loads(told.stdout)["deleted"] == 3
    found = Searcher.open(index_of(data)).search(rows(5, 1).astype(np.float32), 800, nprobe=16)
    assert not np.isin(found.ids, [0, 1, 2]).any()
    assert "no rows are named" in embq_index("delete", data).stderr


def test_keys_from_a_pipe_are_deleted_all(data: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"p0.npy:3\np0.npy:4\n")
    os.close(write)
    told = embq_index("delete", data, "--from", f"/dev/fd/{read}", "--json")
    os.close(read)
    assert json.loads(told.stdout)["deleted"] == 2


def test_a_key_that_nobody_has_is_told_by_the_status(data: Path) -> None:
    told = embq_index("delete", data, "p1.npy:0", "nobody")
    assert told.exit_code == Exit.SOME_FAILED
    assert "nobody" in told.stderr
    before = read_current(index_of(data))
    assert embq_index("delete", data, "nobody").exit_code == Exit.BAD_INPUT
    assert read_current(index_of(data)).name == before.name


def test_an_index_is_compacted_by_its_own_folder_as_well(data: Path) -> None:
    assert embq_index("delete", data, "p1.npy:9").exit_code == Exit.DONE
    told = embq_index("compact", index_of(data))
    assert told.exit_code == Exit.DONE, told.stderr
    assert "compacted" in told.stdout
    assert "nothing to compact" in embq_index("compact", data, "--quiet").stdout
    assert json.loads(embq_index("compact", data, "--json").stdout)["fresh"] is False


def test_a_file_of_keys_that_is_none_is_refused(data: Path, tmp_path: Path) -> None:
    assert "bad_keys" in embq_index("delete", data, "--from", tmp_path / "nothing").stderr
    (tmp_path / "empty").write_text("\n")
    assert "bad_keys" in embq_index("delete", data, "--from", tmp_path / "empty").stderr


def test_an_index_that_is_not_there_cannot_forget(tmp_path: Path) -> None:
    assert "no_index" in embq_index("delete", tmp_path, "k").stderr
