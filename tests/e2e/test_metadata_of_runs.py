"""Metadata whose fields change on the way: one schema for the run, and every value where the documentation says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e.session import picture, succeed, write_tar

from core.run.reader import row_tables
from core.run.run_info import load_run
from tests.support.outputs.build import build

LINES = 240
COLUMNS = {"n": "int64", "score": "float64", "kind": "string", "size.w": "int64", "tags": "json"}


def metadata(number: int) -> dict[str, Any]:
    """What the first hundred lines agree on, and later ones do not."""
    one: dict[str, Any] = {"n": number, "score": number / 4, "kind": "a", "size": {"w": 3}, "tags": ["x", number]}
    if number >= 100:
        one |= [
            {"n": str(number)},
            {"n": number + 0.5, "score": 2**60 + number},
            {"kind": None, "size": {"w": 2**70, "h": 1}},
            {"kind": {"deep": number}, "new": number, "tags": "x"},
            {"score": number, "size": 5, "tags": {"y": 1}},
        ][number % 5]
    return one


def fields(row: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a row, put together again by the columns' names."""
    out: dict[str, Any] = json.loads(row["metadata"] or "{}")
    for name, type_ in COLUMNS.items():
        if (value := row[name]) is not None:
            *outer, last = name.split(".")
            place = out
            for step in outer:
                place = place.setdefault(step, {})
            assert last not in place
            place[last] = json.loads(value) if type_ == "json" else value
    return out


def rows_of(root: Path) -> dict[str, dict[str, Any]]:
    rows = [row for table in row_tables(root) for row in table.to_pylist()]
    return {row["key"]: {name: value for name, value in row.items() if name != "id"} for row in rows}


def test_fields_that_change_their_type_keep_the_schema_and_lose_nothing(short_tmp: Path) -> None:
    source = short_tmp / "in.jsonl"
    lines = [{"id": f"k{number}", "text": f"text {number}", **metadata(number)} for number in range(LINES)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--unit-size", "10", "--write-batch-size", "50", "--devices", "cpu", "--quiet"]
    common = ["run", source, "-m", "stub:8", *options]

    succeed(*common, "-o", short_tmp / "two", "--workers-per-device", "2")
    build(short_tmp / "one", [source], format="hdf5", unit_samples=10, units_per_commit=5)

    columns = load_run(short_tmp / "two").rows.columns
    assert {column.name: column.type for column in columns} == COLUMNS
    found = rows_of(short_tmp / "two")
    assert found == rows_of(short_tmp / "one"), "whoever made them, in whatever order and format"
    for number in range(LINES):
        wanted = {name: value for name, value in metadata(number).items() if value is not None}
        assert fields(found[f"k{number}"]) == wanted
    assert sum(row["metadata"] is not None for row in found.values()) == LINES - 100
    for name in ("two", "one"):
        said = json.loads(succeed("verify", short_tmp / name, "--json"))
        assert said["ok"], said
        assert any("140 rows hold metadata that fit no column" in note for note in said["notes"])


def test_the_json_members_of_a_shard_become_columns(short_tmp: Path) -> None:
    members = [
        (f"{number}.{extension}", content)
        for number in range(20)
        for extension, content in (
            ("jpg", picture(str(number))),
            ("txt", b"a caption"),
            ("json", json.dumps({"url": f"u{number}", "key": number, "similarity": 0.25, "error": None}).encode()),
        )
    ]
    write_tar(short_tmp / "in.tar", members)
    root = build(short_tmp / "out", [short_tmp / "in.tar"], unit_samples=20)
    (table,) = row_tables(root)
    assert table["url"].to_pylist() == [f"u{number}" for number in range(20)]
    assert table["json_key"].to_pylist() == list(range(20))
    assert table["json_similarity"].to_pylist() == [0.25] * 20
    assert table["metadata"].null_count == 20
    assert "error" not in table.column_names
    assert json.loads(succeed("verify", root, "--json"))["ok"]
