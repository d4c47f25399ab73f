"""An index that grows, forgets and is compacted: every answer is that of the rows that are there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from embq.core.errors import InputError
from embq.index.change.compaction import compact, due
from embq.index.change.deletes import delete, deleted_bits
from embq.index.change.growth import holds
from embq.index.collection.opening import open_collection
from embq.index.index_files.lists import empty_lists, is_set, read_lists, write_lists
from embq.index.index_files.version import read_current
from embq.index.searcher import Searcher
from tests.indexer.indexes_that_grow import (
    ASKED,
    DIM,
    PART_ROWS,
    Quiet,
    add_part,
    copy_of,
    grown,
    litter,
    make_index,
    rows,
    runner,
)
from tests.support.lazy import lazy

faiss = lazy("faiss")


EVERYWHERE = 16


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index that no test changes."""
    return make_index(tmp_path_factory.mktemp("grows"))


@pytest.fixture
def index(built: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return copy_of(built, tmp_path)


def answers(index: Path, *, memory: str = "ram", count: int = 200, refine: bool | None = None):
    """The answers to the same queries, and the searcher that gave them."""
    searcher = Searcher.open(index, memory=memory)
    return searcher.search(rows(count, 99).astype(np.float32), 10, nprobe=EVERYWHERE, k_factor=8, refine=refine)


def infos(index: Path) -> dict:
    """The report of the current version."""
    return json.loads((read_current(index).path / "infos.json").read_text())


# --- files of lists ---


def test_lists_in_memory_are_freed_with_what_holds_them(tmp_path: Path) -> None:
    lists, codes = empty_lists(1, 1_000), np.ones((20_000, 1_000), np.uint8)
    ids = np.arange(len(codes))
    lists.add_entries(0, len(codes), faiss.swig_ptr(ids), faiss.swig_ptr(codes))
    write_lists(lists, tmp_path / "lists")
    read_lists(tmp_path / "lists", mapped=False)
    before = psutil.Process().memory_info().rss
    for _ in range(5):
        assert read_lists(tmp_path / "lists", mapped=False).list_size(0) == len(codes)
    assert psutil.Process().memory_info().rss - before < 2 * codes.nbytes


# --- growth ---


def test_new_rows_are_found_under_the_ids_behind_the_old_ones_and_nothing_is_trained_again(index: Path) -> None:
    before = read_current(index)
    add_part(index.parent / "data", "a-first-by-name", rows(100, 50))
    came = grown(index)
    after = read_current(index)
    assert (came.rows, after.next_id, after.n) == (100, 1300, 1300)
    assert after.trained == before.trained
    assert after.groups[:1] == before.groups
    found = Searcher.open(index).search(rows(100, 50).astype(np.float32), 1, nprobe=EVERYWHERE, k_factor=8)
    assert found.ids[:, 0].tolist() == list(range(1200, 1300))
    keys = Searcher.open(index).rows(found.ids[:2]).column("key").to_pylist()
    assert keys == ["a-first-by-name.npy:0", "a-first-by-name.npy:1"]
    assert not litter(index)


def test_old_rows_keep_their_ids_and_their_scores(index: Path) -> None:
    queries = rows(20, 99).astype(np.float32)
    old = Searcher.open(index).search(queries, 1200, nprobe=EVERYWHERE, refine=False)
    add_part(index.parent / "data", "a", rows(100, 50))
    grown(index)
    new = Searcher.open(index).search(queries, 1300, nprobe=EVERYWHERE, refine=False)
    kept = new.ids < 1200
    assert np.array_equal(new.ids[kept].reshape(20, 1200), old.ids)
    assert np.array_equal(new.scores[kept].reshape(20, 1200), old.scores)


def test_a_collection_without_new_rows_changes_nothing(index: Path) -> None:
    came = grown(index)
    assert (came.rows, came.version.name) == (0, "v0001")
    assert [one.name for one in index.glob("v*")] == ["v0001"]


def test_lists_in_files_answer_as_those_in_memory_do(index: Path) -> None:
    for number in range(2):
        add_part(index.parent / "data", f"q{number}", rows(50, 60 + number))
        grown(index)
    assert len(read_current(index).groups) == 3
    assert np.array_equal(answers(index).ids, answers(index, memory="mmap").ids)


def test_growth_tells_what_searches_for_new_rows_find(index: Path) -> None:
    add_part(index.parent / "data", "q", rows(100, 60))
    told = grown(index).report
    assert told == infos(index)["growth"]
    assert told["recall_of_new_rows"]["recall@10"] >= 0.85
    assert told["recall_of_new_rows"]["truth"] == "exact search"
    assert told["recall_of_new_rows"]["queries"] == 100
    assert not told["tuned_again"]
    assert not told["warnings"]
    assert abs(told["drift"]["change"]) < 0.1
    assert infos(index)["nb vectors"] == 1300
    assert infos(index)["target_met"] is True


def test_an_index_that_has_grown_by_more_than_a_tenth_is_tuned_again(index: Path) -> None:
    add_part(index.parent / "data", "q", rows(130, 60))
    came = grown(index)
    assert came.report["tuned_again"]
    assert "recall" in infos(index)
    assert infos(index)["search"] == dict(read_current(index).search)
    assert read_current(index).notes["tuned_rows"] == 1330


def test_rows_of_another_kind_are_warned_of(index: Path) -> None:
    strangers = np.random.default_rng(1).standard_normal((100, DIM), np.float32)
    add_part(index.parent / "data", "q", (strangers / np.linalg.norm(strangers, axis=1, keepdims=True)))
    with pytest.raises(InputError):
        grown(index)  # float32 beside float16 are no vectors of one run
    (index.parent / "data" / "q.npy").unlink()
    add_part(index.parent / "data", "q", (strangers / np.linalg.norm(strangers, axis=1, keepdims=True)).astype("f2"))
    came = grown(index)
    assert came.report["drift"]["change"] > 0.1
    assert "unlike those that the index was trained on" in came.report["warnings"][0]


def test_an_old_part_that_was_written_again_is_refused_with_its_name(index: Path) -> None:
    data = index.parent / "data"
    os.utime(data / "p1.npy", ns=(1, 1))
    add_part(data, "q", rows(10, 60))
    with pytest.raises(InputError, match=r"p1\.npy") as caught:
        grown(index)
    assert caught.value.code == "part_changed"
    assert "embq index build" in caught.value.next_step
    assert read_current(index).name == "v0001"


def test_an_old_part_that_is_gone_is_refused_with_its_name(index: Path) -> None:
    (index.parent / "data" / "p1.npy").unlink()
    with pytest.raises(InputError, match=r"p1\.npy") as caught:
        grown(index)
    assert caught.value.code == "part_missing"
    assert "embq index build" in caught.value.next_step


def test_new_vectors_without_a_direction_are_refused_or_counted(index: Path) -> None:
    bad = rows(60, 60)
    bad[7] = np.nan
    bad[9] = 0
    add_part(index.parent / "data", "q", bad)
    with pytest.raises(InputError, match="1207, 1209") as caught:
        grown(index)
    assert caught.value.code == "bad_vectors"
    came = grown(index, drop_invalid=True)
    assert (came.version.excluded, came.version.n) == (2, 1258)
    assert 1207 not in Searcher.open(index).search(rows(5, 1).astype(np.float32), 1300, nprobe=EVERYWHERE).ids


def test_vectors_of_other_lengths_are_refused_where_cosines_are_compared(index: Path) -> None:
    add_part(index.parent / "data", "q", (3 * rows(400, 60)).astype(np.float16))
    with pytest.raises(InputError) as caught:
        grown(index)
    assert caught.value.code == "other_embeddings"


def test_an_index_holds_its_rows_under_its_options_also_when_it_has_grown(index: Path) -> None:
    data = index.parent / "data"
    assert holds(read_current(index), open_collection(data), ASKED)
    assert not holds(read_current(index), open_collection(data), {**ASKED, "recall": "0.99@10"})
    add_part(data, "a", rows(100, 50))
    assert not holds(read_current(index), open_collection(data), ASKED)
    grown(index)
    assert holds(read_current(index), open_collection(data), ASKED)
    (data / "a.npy").unlink()
    assert not holds(read_current(index), open_collection(data), ASKED)


def test_an_index_that_would_take_more_memory_than_it_may_is_not_grown(tmp_path: Path) -> None:
    index = make_index(tmp_path, max_index_memory_usage="120K")
    add_part(index.parent / "data", "q", rows(4000, 60))
    with pytest.raises(InputError, match="4,000 rows more") as caught:
        grown(index)
    assert caught.value.code == "index_memory"
    assert "embq index build" in caught.value.next_step


def test_an_index_that_has_outgrown_its_lists_is_warned_of(index: Path) -> None:
    add_part(index.parent / "data", "q", rows(1300, 60))
    assert "2.1 times the 1,200 rows" in " ".join(grown(index).report["warnings"])


# --- deletes ---


def test_deleted_rows_are_no_answers_any_more(index: Path) -> None:
    gone = answers(index).ids[:, 0]
    keys = Searcher.open(index).rows(np.unique(gone)).column("key").to_pylist()
    came = delete(index, keys)
    assert (came.rows, came.already, came.unknown) == (len(keys), 0, ())
    for memory in ("ram", "mmap"):
        assert not np.isin(answers(index, memory=memory).ids, gone).any()
        assert (answers(index, memory=memory).ids >= 0).all()
    assert Searcher.open(index).n == read_current(index).n == 1200 - len(keys)
    assert infos(index)["nb vectors"] == 1200 - len(keys)
    assert not litter(index)


def test_unknown_keys_are_named_and_known_ones_deleted(index: Path) -> None:
    came = delete(index, ["p0.npy:3", "nobody", "p0.npy:3"])
    assert (came.rows, came.unknown) == (1, ("nobody",))
    with pytest.raises(InputError, match="nobody, nowhere") as caught:
        delete(index, ["nobody", "nowhere"])
    assert caught.value.code == "no_such_key"


def test_what_is_deleted_stays_deleted_and_is_counted_once(index: Path) -> None:
    delete(index, ["p0.npy:3", "p2.npy:399"])
    again = delete(index, ["p2.npy:399", "p1.npy:0"])
    assert (again.rows, again.already, again.version.deleted) == (1, 1, 3)
    assert delete(index, ["p1.npy:0"]).version.name == again.version.name
    bits = deleted_bits(read_current(index))
    assert np.flatnonzero(is_set(bits, np.arange(1200))).tolist() == [3, 400, 1199]
    assert is_set(bits, np.array([[-1, 3]])).tolist() == [[False, True]]


def test_rows_added_after_a_deletion_are_found_and_ids_are_not_used_again(index: Path) -> None:
    delete(index, ["p2.npy:399"])
    add_part(index.parent / "data", "q", rows(40, 60))
    grown(index)
    searcher = Searcher.open(index)
    found = searcher.search(rows(40, 60).astype(np.float32), 1, nprobe=EVERYWHERE, k_factor=8)
    assert found.ids[:, 0].tolist() == list(range(1200, 1240))
    assert 1199 not in searcher.search(rows(3, 1).astype(np.float32), 1240, nprobe=EVERYWHERE).ids
    assert searcher.n == 1239


def test_a_deleted_row_that_was_in_no_list_is_counted_once(index: Path) -> None:
    bad = rows(60, 60)
    bad[7] = np.nan
    add_part(index.parent / "data", "q", bad)
    grown(index, drop_invalid=True)
    came = delete(index, ["q.npy:7", "q.npy:8"])
    assert (came.version.excluded, came.version.deleted, came.version.n) == (0, 2, 1258)


# --- compaction ---


@pytest.mark.parametrize(("key", "refine"), [("IVF16,RaBitQ4", "fp16"), ("IVF16,SQ8", "none")])
def test_compaction_changes_no_answer(tmp_path: Path, key: str, refine: str) -> None:
    index = make_index(tmp_path, key=key, refine=refine)
    add_part(index.parent / "data", "q", rows(PART_ROWS // 4, 60))
    grown(index)
    gone = np.unique(answers(index).ids[:, 0])
    delete(index, Searcher.open(index).rows(gone).column("key").to_pylist())
    before, codes = answers(index), answers(index, refine=False)
    came = compact(index, runner(), Quiet())
    assert (came.groups, came.dropped, came.fresh) == (2, len(gone), True)
    assert len(read_current(index).groups) == 1
    for memory in ("ram", "mmap"):
        after = answers(index, memory=memory)
        assert np.array_equal(before.ids, after.ids)
        assert np.array_equal(before.scores, after.scores)
        assert np.array_equal(codes.scores, answers(index, memory=memory, refine=False).scores)
        assert not np.isin(after.ids, gone).any()
    assert not compact(index, runner(), Quiet()).fresh
    assert not litter(index)


def test_deleting_goes_on_after_compaction(index: Path) -> None:
    delete(index, ["p0.npy:3"])
    compact(index, runner(), Quiet())
    assert delete(index, ["p0.npy:3"]).already == 1
    delete(index, ["p0.npy:4"])
    found = Searcher.open(index).search(rows(3, 1).astype(np.float32), 1200, nprobe=EVERYWHERE)
    assert not np.isin(found.ids, [3, 4]).any()
    assert len(np.unique(found.ids[found.ids >= 0])) == 1198


def test_an_index_whose_additions_are_many_is_compacted_when_it_grows(index: Path) -> None:
    for number in range(2):
        add_part(index.parent / "data", f"q{number}", rows(60, 60 + number))
        came = grown(index)
    assert came.compaction is None
    assert not due(came.version)
    add_part(index.parent / "data", "q2", rows(60, 62))
    came = grown(index)
    assert came.compaction is not None
    assert (came.compaction.groups, len(read_current(index).groups)) == (4, 1)
    assert read_current(index).n == 1380
    assert not litter(index)
