"""Shards are read to their ends, and what is wrong with them is told: each fault by its code and its place."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from embq.training.shards.processes import each
from embq.training.shards.sizes import sizes_beside
from embq.training.shards.verification import ShardsReport, verify
from tests.support.archives import members_of
from tests.support.outputs.build import write_tar
from tests.training.pictures_converted import class_tree, classed, convert, plan_of, report, shards


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of 4, 4 and 2 photographs of two classes."""
    root = tmp_path_factory.mktemp("whole")
    convert(plan_of(classed(class_tree(root / "tree", 10, ("cat", "dog"))), root / "shards", per_shard=4))
    return root / "shards"


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of them that a test may harm."""
    return Path(shutil.copytree(whole, tmp_path / "shards"))


def looked(folder: Path, *, processes: int = 1, **options: bool) -> ShardsReport:
    return verify([str(folder)], processes=processes, **options)


def rewrite(path: Path, change: Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]]) -> None:
    """Write a shard again with other members."""
    write_tar(path, change(members_of(path)))


def test_what_was_converted_is_as_it_has_to_be(whole: Path) -> None:
    found = looked(whole, decode=True, processes=2)
    assert found.ok, found.violations
    assert (found.shards, found.samples, found.counted) == (3, 10, True)
    assert found.members == {"cls": 10, "jpeg": 10, "json": 10}


FAULTS = {
    "missing_member": lambda members: [one for one in members if one[0] != "00000005.jpeg"],
    "duplicate_key": lambda members: [*members, members[-1]],
    "scattered_key": lambda members: [*members[1:], members[0]],
    "no_key": lambda members: [*members, ("README", b"hello")],
    "bad_label": lambda members: [(n, b"2" if n == "00000005.cls" else data) for n, data in members],
    "text_not_utf8": lambda members: [
        one
        for name, data in members
        for one in ((name, data), (name[:8] + ".txt", b"\xe9"))[: 1 + name.endswith("cls")]
    ],
    "bad_metadata": lambda members: [(n, b"[1]" if n == "00000005.json" else data) for n, data in members],
}


@pytest.mark.parametrize("code", list(FAULTS))
def test_each_fault_of_a_sample_is_told_by_its_code_and_its_place(folder: Path, code: str) -> None:
    rewrite(folder / "train-000001.tar", FAULTS[code])
    found = looked(folder)
    assert not found.ok
    assert code in {one.code for one in found.violations}
    assert any(one.where.startswith(str(folder / "train-000001.tar")) for one in found.violations if one.code == code)


@pytest.mark.parametrize(("written", "good"), [(b"1\n", True), (b"9" * 5000, False)], ids=["line end", "digits"])
def test_a_class_is_read_as_a_training_reads_it(folder: Path, written: bytes, good: bool) -> None:
    rewrite(
        folder / "train-000001.tar",
        lambda members: [(name, written if name == "00000005.cls" else data) for name, data in members],
    )
    assert looked(folder).ok == good


@pytest.mark.parametrize("cut", [100, 512 * 3, -1024], ids=["in a header", "in a member", "the end"])
def test_a_shard_that_is_cut_is_one_violation_and_the_others_are_read(folder: Path, cut: int) -> None:
    path = folder / "train-000001.tar"
    data = path.read_bytes()
    last = len(data.rstrip(b"\0")) // 512 * 512 + 512
    path.write_bytes(data[:cut] if cut > 0 else data[:last])
    found = looked(folder)
    assert found.samples == 6
    (violation,) = found.violations
    assert violation.code in ("shard_truncated", "shard_no_end_marker")
    assert "byte" in violation.message


def test_a_picture_that_cannot_be_decoded_is_found_with_decode_only(folder: Path) -> None:
    rewrite(
        folder / "train-000001.tar",
        lambda members: [(name, data[:700] if name == "00000006.jpeg" else data) for name, data in members],
    )
    assert looked(folder).ok
    (violation,) = looked(folder, decode=True).violations
    assert (violation.code, violation.where) == ("truncated", f"{folder}/train-000001.tar 00000006.jpeg")


def test_a_class_that_some_samples_lack_is_a_violation_unless_it_is_allowed(folder: Path) -> None:
    rewrite(folder / "train-000002.tar", lambda members: [one for one in members if not one[0].endswith("cls")])
    (violation,) = looked(folder).violations
    assert violation.code == "missing_member"
    assert violation.message == "2 samples have no cls, as others have; the first is '00000008'"
    assert looked(folder, allow_missing=True).ok


def test_keys_of_one_shard_in_another_are_a_violation_and_those_of_validation_are_not(folder: Path) -> None:
    shutil.copy(folder / "train-000000.tar", folder / "val-000000.tar")
    looked(folder, write_sizes=True)
    assert looked(folder).ok
    shutil.copy(folder / "train-000000.tar", folder / "train-000001.tar")
    (violation,) = looked(folder).violations
    assert violation.code == "duplicate_key"
    assert "4 keys are in other shards too, the first is '00000000' of train-000000.tar" in violation.message


def test_sizes_are_compared_both_ways_and_can_be_counted_again(folder: Path) -> None:
    sizes = json.loads((folder / "sizes.json").read_text())
    (folder / "sizes.json").write_text(json.dumps({"train-000000.tar": 5, "train-000001.tar": 4, "old.tar": 3}))
    assert {(Path(one.where).name, one.code) for one in looked(folder).violations} == {
        ("old.tar", "sizes_differ"),
        ("train-000000.tar", "sizes_differ"),
        ("train-000002.tar", "sizes_differ"),
    }
    found = looked(folder, write_sizes=True)
    assert (found.ok, found.written) == (True, True)
    assert sizes_beside(str(folder)) == sizes
    (folder / "train-000002.tar").write_bytes(b"cut")
    (folder / "sizes.json").unlink()
    found = looked(folder, write_sizes=True)
    assert (found.ok, found.written) == (False, False)
    assert not (folder / "sizes.json").exists()


def test_the_verb_says_what_is_wrong_and_ends_with_65(folder: Path) -> None:
    rewrite(folder / "train-000001.tar", FAULTS["bad_label"])
    done = shards("verify", folder / "train-{000000..000002}.tar", "--workers", 1)
    assert done.returncode == 65
    assert "bad_label" in done.stdout
    assert ".cls is 2, and there are 2 classes" in done.stdout
    assert done.stdout.splitlines()[-1] == "not ok: 1 violations"
    done = shards("verify", folder, "--json")
    assert done.returncode == 65
    said = report(done)
    assert (said["ok"], said["samples"], said["violations"][0]["code"]) == (False, 10, "bad_label")


def test_processes_that_connect_begin_anew_and_others_with_what_is_here() -> None:
    sys.modules["known_here"] = sys
    try:
        asked = ["(__import__('os').getpid(), 'known_here' in __import__('sys').modules)"] * 3
        forked, begun = (list(each(eval, asked, 2, connects=connects)) for connects in (False, True))
    finally:
        del sys.modules["known_here"]
    assert [known for _, known in forked] == [True] * 3
    assert [known for _, known in begun] == [False] * 3
    assert os.getpid() not in {pid for pid, _ in (*forked, *begun)}
