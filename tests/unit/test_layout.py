"""The output folder and run.json."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from embq.core.errors import InputError, OutputError, TryLaterError
from embq.core.models import ModelConfig
from embq.core.rows.spec import RowSpec
from embq.core.run.layout import Layout, record_number
from embq.core.run.run_info import RunInfo, load_run, run_id

INFO = RunInfo(
    run="0123456789abcdef",
    inputs=("/data/{0..9}.tar",),
    options=(("id_column", ""), ("unit_samples", "1000")),
    model=ModelConfig(spec="stub:4", modalities=("image", "text"), precision="fp32"),
    rows=RowSpec(),
    format="parquet",
    part_rows=1000,
    units=10,
    samples=None,
    manifest_digest="d" * 32,
    version="0.1.0",
    created="2026-01-01T00:00:00+00:00",
)


@pytest.mark.parametrize("info", [INFO, replace(INFO, samples=7)])
def test_a_run_survives_its_file(layout: Layout, info: RunInfo) -> None:
    info.publish(layout)
    assert load_run(layout.root) == info
    assert list(layout.temporary.iterdir()) == []


def test_run_json_is_byte_for_byte_what_earlier_versions_wrote(layout: Layout) -> None:
    replace(INFO, segments=("00000.parquet",)).publish(layout)
    digest = hashlib.sha256(layout.run_json.read_bytes()).hexdigest()
    assert digest == "276dd99a68a1a110bf7530d86a87b9a0d86a9c5e5be5d9ad394fc15af9cbb863"


def test_making_the_folders_again_changes_nothing(layout: Layout) -> None:
    before = sorted(layout.root.rglob("*"))
    layout.make()
    assert sorted(layout.root.rglob("*")) == before


def test_a_run_is_written_once(layout: Layout) -> None:
    INFO.publish(layout)
    with pytest.raises(TryLaterError, match="at the same time"):
        replace(INFO, rows=RowSpec(dtype="float32")).publish(layout)
    assert load_run(layout.root) == INFO


def test_a_temporary_file_of_a_killed_process_does_not_stop_the_next_one(layout: Layout) -> None:
    (layout.temporary / f"run-{INFO.run}.json").write_bytes(b"{")
    INFO.publish(layout)
    assert load_run(layout.root) == INFO


def test_a_folder_without_a_run_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(InputError, match="is not an embq output folder") as caught:
            load_run(root)
        assert "--output" in caught.value.next_step


@pytest.mark.parametrize("text", ["", "{", "[1", "\xff"])
def test_a_damaged_run_is_not_taken_for_a_missing_one(layout: Layout, text: str) -> None:
    layout.run_json.write_bytes(text.encode("latin-1"))
    with pytest.raises(OutputError, match="cannot be read"):
        load_run(layout.root)


def test_a_run_of_another_version_names_both(layout: Layout) -> None:
    INFO.publish(layout)
    data = json.loads(layout.run_json.read_text())
    layout.run_json.write_text(json.dumps({**data, "schema": 2}))
    with pytest.raises(OutputError, match="schema 2, this embq reads 1"):
        load_run(layout.root)


def test_a_folder_that_cannot_be_made_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(OutputError):
        Layout(tmp_path / "out").make()


def test_the_same_run_in_the_same_place_has_the_same_id() -> None:
    first = run_id(INFO.identity(), Path("/a"))
    assert first == run_id(INFO.identity(), Path("/a"))
    assert len(first) == 16
    others = {
        run_id(INFO.identity(), Path("/b")),
        run_id(replace(INFO, rows=RowSpec(dtype="float32")).identity(), Path("/a")),
        run_id(replace(INFO, manifest_digest="e" * 32).identity(), Path("/a")),
        run_id(replace(INFO, model=replace(INFO.model, precision="bf16")).identity(), Path("/a")),
    }
    assert len({first, *others}) == 5
    assert run_id(replace(INFO, created="2027", inputs=("x",), part_rows=9).identity(), Path("/a")) == first


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("part-00000007.parquet", 7),
        ("part-00000007.2.parquet", 7),
        ("failures-12345678.parquet", 12345678),
        ("commit-00000003.0123456789abcdef.json", 3),
        ("run-1234567890123456.0123abcd.json", 0),
        ("manifest-00002.parquet", 0),
        ("part-x.parquet", 0),
        ("readme", 0),
    ],
)
def test_a_file_says_by_its_name_which_record_it_is_for(name: str, number: int) -> None:
    assert record_number(name) == number
