"""Deduplication over an index: groups, the row that is kept, and the ways to leave the others out."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.app.cli.entry_point import run
from embq.core.errors import Exit, InputError
from embq.core.formats.duplicate_groups import duplicate_ids
from embq.core.rows.spec import RowSpec
from embq.index.change.deletes import delete
from embq.index.dedup.stages import connect, spanning
from embq.index.index_files.version import read_current
from embq.index.searcher import Searcher
from tests.indexer.indexes_that_grow import add_part, copy_of, grown, litter, make_index, rows
from tests.support.outputs.build import build, write_jsonl

THRESHOLD = 0.98


def near(matrix: np.ndarray, seed: int) -> np.ndarray:
    """The rows, each moved a little: cosines of about 0.995."""
    moved = matrix + 0.017 * np.random.default_rng(seed).standard_normal(matrix.shape, np.float32)
    return (moved / np.linalg.norm(moved, axis=1, keepdims=True)).astype(np.float16)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of 3 parts, to which near duplicates and 700 copies of one row were added."""
    folder = tmp_path_factory.mktemp("dedup")
    index = make_index(folder, parts=3)
    first = rows(400, 0)
    add_part(folder / "data", "q", np.concatenate([near(first[:150], 9), np.repeat(first[5:6], 700, axis=0)]))
    grown(index)
    return index


def truth(index: Path, gone: tuple[int, ...] = ()) -> dict[int, int]:
    """Row -> the lowest row of its group, of the rows that are in one: by all cosines."""
    data = sorted((index.parent / "data").glob("*.npy"))
    vectors = np.concatenate([np.load(path).astype(np.float32) for path in data])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    close = vectors @ vectors.T >= THRESHOLD
    close[list(gone)] = close[:, list(gone)] = False
    labels = np.arange(len(vectors))
    pairs = np.argwhere(np.triu(close, 1))
    connect(labels, lambda: [pairs])
    sizes = np.bincount(labels, minlength=len(labels))
    return {row: int(label) for row, label in enumerate(labels) if sizes[label] > 1}


def dedup(index: Path, *words: object) -> int:
    """Call the verb."""
    return run(["index", "dedup", str(index), "--threshold", str(THRESHOLD), "--quiet", *map(str, words)])


def groups_of(index: Path) -> Path:
    """The file that it writes for the current version."""
    return index / f"dedup-{THRESHOLD:g}-{read_current(index).name}" / "groups.parquet"


def test_groups_are_those_of_all_pairs_and_the_lowest_id_is_kept(base: Path, tmp_path: Path) -> None:
    index = copy_of(base, tmp_path)
    assert dedup(index, "--nprobe", 16) == Exit.DONE
    table = pq.read_table(groups_of(index)).to_pydict()
    wanted = truth(index)
    assert dict(zip(table["id"], table["group"], strict=True)) == wanted
    assert table["kept"] == [id_ == group for id_, group in zip(table["id"], table["group"], strict=True)]
    assert table["key"][:1] == [f"p0.npy:{table['id'][0]}"]
    assert min(table["cosine"]) > 0.9
    report = json.loads((groups_of(index).parent / "report.json").read_text())
    assert report["rows"] == 2050
    assert report["near"] == len(wanted) == report["duplicates"] + report["groups"]
    assert 0 < report["saturated"] < 700  # the copies, more than are looked at, are searched for once
    assert report["largest_group"] >= 701
    assert litter(index) == [groups_of(index).parent.name]


def test_duplicates_that_are_deleted_are_found_no_more(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = copy_of(base, tmp_path)
    assert dedup(index) == Exit.DONE
    gone = duplicate_ids(groups_of(index))
    capsys.readouterr()
    assert run(["index", "delete", str(index), "--from", str(first := groups_of(index)), "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["deleted"] == len(gone)
    found = Searcher.open(index).search(near(rows(400, 0)[:50], 3).astype(np.float32), 20, nprobe=16)
    assert not np.isin(found.ids, gone).any()
    assert dedup(index) == Exit.DONE
    assert not pq.read_table(groups_of(index)).num_rows
    assert np.array_equal(duplicate_ids(first), gone)  # of the version before, for an export
    assert run(["index", "delete", str(index), "--from", str(groups_of(index))]) == Exit.DONE  # nothing is to be done
    add_part(index.parent / "data", "r", near(rows(400, 0)[20:21], 4))
    grown(index)
    assert dedup(index) == Exit.DONE
    assert pq.read_table(groups_of(index))["group"].to_pylist() == [20, 20]


def test_nothing_is_written_through_links_in_the_folder_of_the_index(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index, elsewhere = copy_of(base, tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "notes").write_text("mine")
    folder = groups_of(index).parent
    for link, target in ((folder, elsewhere), (index / "_work", elsewhere), (index / "_lock", elsewhere / "notes")):
        shutil.rmtree(index / "_work", ignore_errors=True)
        (index / "_lock").unlink(missing_ok=True)
        link.symlink_to(target)
        assert dedup(index) == Exit.OUTPUT
        assert "is a symbolic link" in capsys.readouterr().err
        link.unlink()
    assert [(one.name, one.read_text()) for one in elsewhere.iterdir()] == [("notes", "mine")]
    folder.mkdir()
    (folder / "report.json").symlink_to(elsewhere / "notes")
    assert dedup(index) == Exit.DONE
    assert (elsewhere / "notes").read_text() == "mine"


def test_rows_that_were_deleted_before_connect_nothing(base: Path, tmp_path: Path) -> None:
    index = copy_of(base, tmp_path)
    gone = (5, *range(40, 60))
    delete(index, [f"p0.npy:{row}" for row in gone])
    assert dedup(index, "--nprobe", 16) == Exit.DONE
    table = pq.read_table(groups_of(index))
    assert dict(zip(table["id"].to_pylist(), table["group"].to_pylist(), strict=True)) == truth(index, gone)


@pytest.mark.slow
def test_an_index_without_vectors_reads_them_from_its_rows(tmp_path: Path) -> None:
    index = make_index(tmp_path, key="IVF16,RaBitQ6", refine="none", parts=1)
    add_part(tmp_path / "data", "q", near(rows(400, 0)[:50], 9))
    grown(index)
    assert dedup(index, "--nprobe", 16, "--workers", 2) == Exit.DONE
    table = pq.read_table(groups_of(index))
    assert dict(zip(table["id"].to_pylist(), table["group"].to_pylist(), strict=True)) == truth(index)


def test_the_plan_is_printed_and_nothing_done(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(base.rglob("*"))
    assert dedup(base, "--dry-run") == Exit.DONE
    assert "2,050 rows" in capsys.readouterr().out
    assert sorted(base.rglob("*")) == before


def test_vectors_of_other_lengths_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "a.npy", 3 * rows(400, 0))
    assert run(["index", str(tmp_path), "--quiet"]) == Exit.DONE
    assert dedup(tmp_path) == Exit.BAD_INPUT
    assert "no_cosine" in capsys.readouterr().err


def test_a_file_of_groups_is_for_its_own_rows_only(base: Path, tmp_path: Path) -> None:
    index = copy_of(base, tmp_path)
    assert dedup(index) == Exit.DONE
    assert len(duplicate_ids(groups_of(index), build=read_current(index).build))
    for other in ({"build": "another"}, {"run": "0123456789abcdef"}):
        with pytest.raises(InputError, match="another"):
            duplicate_ids(groups_of(index), **other)
    (tmp_path / "cut.parquet").write_bytes(groups_of(index).read_bytes()[:500])
    with pytest.raises(InputError, match="cannot be read"):
        duplicate_ids(tmp_path / "cut.parquet")
    whole = pq.read_table(groups_of(index))
    unknown = pa.array([None] * len(whole), pa.int64())
    for wrong in (whole.drop(["cosine"]), whole.set_column(0, "id", unknown)):
        pq.write_table(wrong, tmp_path / "wrong.parquet")
        with pytest.raises(InputError, match="columns"):
            duplicate_ids(tmp_path / "wrong.parquet")


KILLED = """
import os, signal, sys
from pathlib import Path
from embq.index.dedup import stages
from embq.app.cli.entry_point import run
original, count = stages.near_pairs, [0]
def near_pairs(*given):
    count[0] += 1
    if count[0] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*given)
stages.near_pairs = near_pairs
from embq.index.dedup import dedup
dedup.UNIT_ROWS = 700
run(["index", "dedup", sys.argv[1], "--threshold", sys.argv[2], "--quiet"])
"""


@pytest.mark.slow
def test_a_killed_deduplication_goes_on(base: Path, tmp_path: Path) -> None:
    index, other = copy_of(base, tmp_path / "killed"), copy_of(base, tmp_path / "whole")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(index), str(THRESHOLD)], env=os.environ, check=False)
    assert ended.returncode == -signal.SIGKILL
    (done,) = (index / "_work").glob("dedup-*/dedup-000000-*.json")
    stamp = done.stat().st_mtime_ns
    ended = subprocess.run([sys.executable, "-c", KILLED, str(index), str(THRESHOLD)], env=os.environ, check=False)
    assert ended.returncode == -signal.SIGKILL  # in the third unit: the first is not done again
    assert done.stat().st_mtime_ns == stamp
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embq.index.dedup.dedup.UNIT_ROWS", 700)
        assert dedup(index) == dedup(other) == Exit.DONE
    assert pq.read_table(groups_of(index)) == pq.read_table(groups_of(other))
    assert litter(index) == [groups_of(index).parent.name]


def test_an_export_without_duplicates_holds_the_kept_rows(tmp_path: Path) -> None:
    texts = ["a cat", "a dog", "a cat", "two birds", "a dog", "a cat"]
    build(
        tmp_path / "out",
        [write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])],
        rows=RowSpec(normalize=True),
    )
    assert run(["index", str(tmp_path / "out"), "--recall", "0.5@1", "--quiet"]) in (Exit.DONE, Exit.SOME_FAILED)
    assert dedup(tmp_path / "out") == Exit.DONE
    (groups,) = tmp_path.glob("out/index/*/dedup-*/groups.parquet")
    export = [
        "export",
        str(tmp_path / "out"),
        str(tmp_path / "kept"),
        "--output-format",
        "parquet",
        "--without",
        str(groups),
    ]
    assert run(export) == Exit.DONE
    kept = sorted((tmp_path / "kept").rglob("*.parquet"))
    assert pq.read_table(kept)["id"].to_pylist() == [0, 1, 3]


def test_components_are_those_of_long_chains() -> None:
    random = np.random.default_rng(3)
    order = random.permutation(3_000)
    pairs = np.stack([order[:-1], order[1:]], axis=1)[random.permutation(2_999)]
    pairs = pairs[(pairs != order[1_000]).all(axis=1)]
    labels = np.arange(3_000)
    connect(labels, lambda: np.array_split(pairs, 7))
    assert len(set(labels.tolist())) == 3
    assert (labels[order[:1_000]] == order[:1_000].min()).all()
    again = np.arange(3_000)
    connect(again, lambda: [spanning(pairs)])
    assert np.array_equal(labels, again)
