"""Metadata fields that are named like columns of embq: every such name, in all that reads rows."""

from __future__ import annotations

from pathlib import Path

import pytest

import embq
from embq.app.cli.entry_point import run
from embq.core.errors import Exit
from embq.core.rows.metadata import INDEX_COLUMNS, RESERVED
from embq.core.rows.spec import RowSpec
from embq.core.run.run_info import load_run
from embq.index.atlas.map_file import OWN, MapOptions, make_map, map_path
from embq.integrations.retrieval import fields_of
from embq.retrieval.searching.query import Result
from embq.retrieval.ui.map.data import LoadedMap
from tests.support.outputs.build import build, write_jsonl
from tests.support.outputs.index import build_index

ROWS = 12
GROUP = 3
"""Rows that share the value of a field."""

NAMES = sorted(
    {*RESERVED, *INDEX_COLUMNS, *OWN, *Result.__slots__, "text_embedding", "image_text_similarity", "xmin"}
    | {f"{prefix}_{name}" for prefix in ("input", "input_input") for name in INDEX_COLUMNS}
)


def value(name: str, row: int) -> str:
    return f"{name} {row // GROUP}"


def written(folder: Path, **options: str) -> Path:
    lines = [{"text": f"text {n}"} | {name: value(name, n) for name in NAMES} | {"id": str(n)} for n in range(ROWS)]
    return build(folder / "out", [write_jsonl(folder / "in.jsonl", lines)], rows=RowSpec(normalize=True), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = written(tmp_path_factory.mktemp("own-names"))
    build_index(root, output="text")
    return root


def columns(out: Path) -> dict[str, str]:
    """Field -> its column."""
    named = {column.path[0]: column.name for column in load_run(out).rows.columns}
    assert set(named) == {name for name in NAMES if name != "id"}  # which is the key
    return named


@pytest.mark.parametrize("format_", ["parquet", "hdf5", "npy", "arrow"])
def test_every_field_is_a_column_of_rows_and_of_conditions(tmp_path: Path, format_: str) -> None:
    out = written(tmp_path, format=format_)
    opened = embq.open(out)
    rows = list(opened.rows())
    for field, column in columns(out).items():
        assert [row[column] for row in rows] == [value(field, n) for n in range(ROWS)]
        assert [row["id"] for row in opened.rows(["id"], [(column, "=", value(field, 4))])] == [3, 4, 5]


def test_every_field_is_in_results_and_conditions_of_a_search(out: Path) -> None:
    found = embq.search(out, id=5, k=2)
    for field, column in columns(out).items():
        assert [one.metadata[column] for one in found] == [value(field, one.id) for one in found]
        matching = embq.search(out, id=5, k=ROWS, where=[(column, "=", value(field, 0))])
        assert {one.id for one in matching} == {0, 1, 2}
    assert {one.source for one in found} == {str(out.parent / "in.jsonl")}
    flat = fields_of(found[0])
    assert (flat["key"], flat["source"]) == (found[0].key, found[0].source)
    assert flat["input_source"] == value("source", found[0].id)
    assert flat["input_score"] == value("score", found[0].id)


def test_every_field_gives_colours_to_a_map(out: Path) -> None:
    index = out / "index" / "text"
    info, _ = make_map(index, MapOptions(method="pca"))
    loaded = LoadedMap(map_path(index), info)
    assert len(loaded.columns) >= len(columns(out))
    for column in loaded.columns:
        assert loaded.colours(column)


@pytest.mark.parametrize("how", ["--output-format=parquet", "--output-format=hdf5", "--to=hf", "--to=tsv"])
def test_every_field_is_exported(out: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(out), str(tmp_path / "exported"), how]) == Exit.DONE, capsys.readouterr().err


def test_planning_names_the_fields_that_are_renamed(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(out.parent / "in.jsonl"), "-o", str(out.parent / "new"), "-m", "stub:8", "--dry-run"]
    assert run(command) == Exit.DONE
    told = capsys.readouterr()
    for field, column in columns(out).items():
        assert (f"{field} as {column}" in told.out + told.err) == (field != column)
