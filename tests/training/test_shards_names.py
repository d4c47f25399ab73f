"""Names of shards as expressions, and expressions as shards with their counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from braceexpand import braceexpand
from hypothesis import given
from hypothesis import strategies as st

from embq.core.errors import InputError
from embq.training.shards.names import contract
from embq.training.shards.shard_set import named_on, open_shards, summarized

# --- many names as few expressions ---

TEXTS = st.text(alphabet="ab-_.01 é", max_size=4)
NUMBERS = st.one_of(
    st.integers(0, 12).map(str),
    st.tuples(st.integers(0, 120), st.integers(1, 4)).map(lambda one: f"{one[0]:0{one[1]}d}"),
    st.integers(995, 1004).map(str),
    st.integers(995, 1004).map("{:04d}".format),
)
NAMES = st.tuples(
    st.sampled_from(["train-", "val", "", "a/0b-"]) | TEXTS, NUMBERS, st.sampled_from([".tar", ""]) | TEXTS
)


@given(st.lists(NAMES.map("".join).filter(bool), max_size=40))
def test_expanding_the_expressions_gives_each_name_back_once(names: list[str]) -> None:
    runs = contract(names)
    expanded = [name for run in runs for name in braceexpand(run.expression)]
    assert sorted(expanded) == sorted(set(names))
    assert [list(run.names) for run in runs] == [list(braceexpand(run.expression)) for run in runs]


@pytest.mark.parametrize(
    ("names", "expressions"),
    [
        ([f"t-{i:06d}.tar" for i in range(1282)], ["t-{000000..001281}.tar"]),
        (["a-1.tar", "a-0.tar", "a-3.tar"], ["a-{0..1}.tar", "a-3.tar"]),
        (["0998", "0999", "1000", "1001"], ["{0998..1001}"]),
        (["998", "999", "1000", "1001"], ["{998..1001}"]),
        (["9.tar", "09.tar", "10.tar"], ["9.tar", "{09..10}.tar"]),
        ([f"v{i}.tar.bz2" for i in (2, 3)], ["v{2..3}.tar.bz2"]),
        (["readme", "b-1-00.tar", "b-1-01.tar", "b-2-02.tar"], ["b-1-{00..01}.tar", "b-2-02.tar", "readme"]),
    ],
    ids=lambda value: value[0],
)
def test_runs_end_at_gaps_and_where_the_width_changes(names: list[str], expressions: list[str]) -> None:
    assert [run.expression for run in contract(names)] == expressions


@pytest.mark.parametrize("name", ["a{1}.tar", "a,1.tar", "a::1.tar", "a}1.tar", "a\\1.tar"])
def test_a_name_that_no_expression_can_say_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="cannot say a name"):
        contract(["b-0.tar", name])


def test_a_listing_of_the_original_kit_gives_what_its_tool_printed() -> None:
    listing = [f"imagenet-train-{i:06d}.tar\n" for i in range(1282)] + [
        f"imagenet-val-{i:06d}.tar\n" for i in range(50)
    ]
    assert named_on(listing) == ["imagenet-train-{000000..001281}.tar", "imagenet-val-{000000..000049}.tar"]


def test_what_a_conversion_writes_beside_shards_is_no_shard() -> None:
    beside = ["classes.json\n", "sizes.json\n", "train-conversion.json\n", "conversion.json\n", "\n"]
    assert named_on(["t-0.tar\n", *beside, "t-1.tar\n", "other.json\n"]) == ["other.json", "t-{0..1}.tar"]


# --- expressions as shards ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of training, one of validation, and their counts; no one looks into them."""
    sizes = {"train-0.tar": 10, "train-1.tar": 10, "train-2.tar": 4, "val-0.tar": 7}
    for name in sizes:
        (tmp_path / name).write_bytes(b"\0" * 1024)
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    return tmp_path


def test_braces_patterns_folders_and_lists_name_shards_in_order_with_their_counts(folder: Path) -> None:
    train = [f"{folder}/train-{i}.tar" for i in range(3)]
    for expression in (f"{folder}/train-{{0..2}}.tar", f"{folder}/train-*.tar", "::".join(train)):
        shards = open_shards(expression)
        assert shards.urls == tuple(train)
        assert shards.counts == (10, 10, 4)
        assert shards.samples == 24
    assert open_shards(str(folder)).counts == (10, 10, 4, 7)
    assert open_shards(f"{folder}/val-0.tar::{folder}/train-0.tar").counts == (7, 10)


def test_the_digest_is_of_names_and_counts_and_not_of_the_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    moved = tmp_path_factory.mktemp("moved") / "there"
    before = open_shards(str(folder)).digest
    folder.rename(moved)
    assert open_shards(str(moved)).digest == before
    (moved / "sizes.json").write_text((moved / "sizes.json").read_text().replace("7", "8"))
    assert open_shards(str(moved)).digest != before


def test_without_a_file_of_sizes_the_counts_are_unknown(folder: Path) -> None:
    (folder / "sizes.json").unlink()
    shards = open_shards(str(folder))
    assert len(shards.urls) == 4
    assert shards.counts is None
    assert shards.samples is None


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "no shards were named"),
        ("{}/train-0.tar::", "nothing stands before or after"),
        ("{}/train-9.tar", "does not exist"),
        ("{}/other-*.tar", "no file matches"),
        ("{}/train-{{0..2.tar", "cannot be expanded"),
        ("{}/train-0.tar::{}/train-*.tar", "named twice"),
        ("pipe:cat {}/train-0.tar", "not from pipe:"),
        ("gs://bucket/train-{{0..1}}.tar", "not from gs:"),
        ("http://127.0.0.1:9/train-*.tar", "a server lists nothing"),
    ],
)
def test_what_names_no_shards_is_refused_with_what_to_do(folder: Path, expression: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        open_shards(expression.format(folder, folder))
    assert caught.value.next_step


def test_a_file_of_sizes_that_differs_from_its_folder_is_an_error_both_ways(folder: Path) -> None:
    (folder / "val-1.tar").write_bytes(b"\0" * 1024)
    with pytest.raises(InputError, match=r"val-1\.tar: the sizes\.json beside it does not name it"):
        summarized([str(folder)])
    for name in ("val-1.tar", "train-1.tar"):
        (folder / name).unlink()
    with pytest.raises(InputError, match=r"1 shards that its sizes\.json names are not there.*train-1\.tar"):
        summarized([str(folder)])


@pytest.mark.parametrize(
    "content", ["[1]", '{"train-0.tar": "10"}', '{"train-0.tar": -1}', "{", '{"train-0.tar": true}']
)
def test_a_file_of_sizes_that_is_something_else_is_refused(folder: Path, content: str) -> None:
    (folder / "sizes.json").write_text(content)
    with pytest.raises(InputError, match=r"sizes\.json: is not"):
        open_shards(str(folder))


def test_the_verb_prints_expressions_of_names_and_sums_of_folders(folder: Path) -> None:
    names = "".join(f"t-{i:02d}.tar\n" for i in range(3))
    command = [sys.executable, "-m", "embq", "shards", "sum"]
    done = subprocess.run(command, input=names, capture_output=True, text=True, check=True)
    assert done.stdout == "t-{00..02}.tar\n"
    done = subprocess.run([*command, str(folder), "--json"], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert (said["shards"], said["samples"], said["bytes"]) == (4, 31, 4096)
    assert said["expressions"][0]["expression"] == f"{folder}/train-{{0..2}}.tar"
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["in", "all", "4", "shards", "31", "samples", "4.1", "kB"]
