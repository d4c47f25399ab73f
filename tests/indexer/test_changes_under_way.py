"""Changes of an index that are killed, and readers that open it while it changes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embq.core.errors import OutputError, TryLaterError
from embq.index import searcher
from embq.index.change.compaction import compact
from embq.index.change.deletes import delete
from embq.index.index_files.files import index_lock
from embq.index.index_files.version import current_name, read_current
from embq.index.searcher import Searcher
from tests.indexer.indexes_that_grow import Quiet, add_part, copy_of, grown, litter, make_index, rows, runner

CHANGES = Path(__file__).with_name("killed_changes.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index that no test changes."""
    return make_index(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def changed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The index with an addition, and with deleted rows."""
    index = copy_of(built, tmp_path_factory.mktemp("changed"))
    add_part(index.parent / "data", "q", rows(100, 60))
    grown(index)
    delete(index, [f"p1.npy:{row}" for row in range(50)])
    return index


def queries() -> np.ndarray:
    """Some queries, always the same."""
    return rows(20, 99).astype(np.float32)


# All moments of each: `python tests/indexer/killed_changes.py CHANGE INDEX FOLDER 1`.
@pytest.mark.parametrize(
    ("change", "every", "least"),
    [
        ("delete", 1, 8),
        ("compact", 9, 24),
        ("grow", 27, 60),
        pytest.param("compact", 3, 24, marks=pytest.mark.slow),
        pytest.param("grow", 9, 60, marks=pytest.mark.slow),
    ],
)
def test_a_change_killed_at_any_moment_leaves_a_whole_version_and_finishes_when_it_is_done_again(
    built: Path, changed: Path, tmp_path: Path, change: str, every: int, least: int
) -> None:
    index = changed if change == "compact" else built
    told = subprocess.run(
        [sys.executable, str(CHANGES), change, str(index), str(tmp_path), str(every)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert int(told.stdout) >= least


def test_readers_open_and_search_while_versions_come_and_go(built: Path, tmp_path: Path) -> None:
    index = copy_of(built, tmp_path)
    wrong: list[Exception] = []
    seen: set[str] = set()
    over = threading.Event()

    def read(memory: str) -> None:
        try:
            while not over.is_set():
                opened = Searcher.open(index, memory=memory)
                found = opened.search(queries(), 5, nprobe=16, k_factor=2)
                assert (found.ids >= 0).all()
                assert opened.rows(found.ids[0]).num_rows == 5
                seen.add(opened.version.name)
        except Exception as error:  # noqa: BLE001 - told at the end of the test
            wrong.append(error)

    readers = [threading.Thread(target=read, args=(memory,)) for memory in ("ram", "mmap")]
    for one in readers:
        one.start()
    try:
        for number in range(30):
            delete(index, [f"p2.npy:{number}"])
            if number % 10 == 9:
                compact(index, runner(), Quiet())
    finally:
        over.set()
        for one in readers:
            one.join()
    assert not wrong
    assert len(seen) > 1
    assert read_current(index).n == 1170
    assert not litter(index)


@pytest.mark.parametrize("memory", ["ram", "mmap"])
def test_who_has_an_older_version_open_goes_on_with_it_after_its_files_are_gone(
    built: Path, tmp_path: Path, memory: str
) -> None:
    index = copy_of(built, tmp_path)
    old = Searcher.open(index, memory=memory)
    before = old.search(queries(), 10, nprobe=16, k_factor=4)
    for number in range(2):
        delete(index, [f"p2.npy:{number}"])
        compact(index, runner(), Quiet())
    assert not old.version.path.exists()
    with pytest.raises(OutputError):
        old.version.groups[0][0].check(index)
    after = old.search(queries(), 10, nprobe=16, k_factor=4)
    assert np.array_equal(before.ids, after.ids)
    assert np.array_equal(before.scores, after.scores)
    assert old.rows(after.ids).column("key").to_pylist()[:1] != []
    assert old.vectors(after.ids[0]).shape == (10, 32)


def test_a_version_that_is_swept_away_while_it_is_opened_gives_way_to_the_current_one(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = copy_of(built, tmp_path)
    read = searcher.read_lists

    def read_lists(path: Path, *, mapped: bool) -> object:
        if current_name(index) == "v0001":  # between reading its record and opening its files
            delete(index, ["p0.npy:1"])
            compact(index, runner(), Quiet())
            delete(index, ["p0.npy:2"])
        return read(path, mapped=mapped)

    monkeypatch.setattr(searcher, "read_lists", read_lists)
    opened = Searcher.open(index)
    assert opened.version.name == current_name(index) == "v0004"


def test_damage_that_no_publication_explains_is_told_at_once(built: Path, tmp_path: Path) -> None:
    index = copy_of(built, tmp_path)
    (index / read_current(index).trained.path).unlink()
    with pytest.raises(OutputError) as caught:
        Searcher.open(index)
    assert caught.value.code == "index_damaged"


@pytest.mark.parametrize(
    "change",
    [
        lambda index: delete(index, ["p0.npy:1"]),
        lambda index: compact(index, runner(), Quiet()),
        grown,
    ],
)
def test_one_change_at_a_time(built: Path, change: Callable[[Path], object]) -> None:
    with index_lock(built), pytest.raises(TryLaterError):
        change(built)
