"""Findings of `embq verify` about metadata: the columns, and what stands beside them, against the inputs."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from embq.app.verify.verification import VerificationReport
from embq.core.rows.spec import FORMATS
from embq.core.run.run_info import load_run
from embq.core.units import Unit
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read
from tests.support.outputs.build import build, rewrite, set_column, write_folder, write_jsonl, write_tar
from tests.support.second_reader.checks import verify
from tests.support.second_reader.metadata import leaves
from tests.support.second_reader.samples import reread

LINES: list[dict[str, Any]] = [
    {"id": "a", "text": "one", "n": 1, "size": {"w": 2}, "tags": ["x"], "ok": True, "score": 0.5},
    {"id": "b", "text": "two", "n": 2, "size": None, "tags": [], "ok": False, "score": 1},
    {"id": "c", "text": "three"},
    {"id": "d", "text": "four", "n": "4", "new": {"deep": [1]}, "score": None},
    {"id": "e", "text": "five", "n": 5.0, "size": {"w": 1, "h": 1}, "tags": "x", "score": 2**53 + 1},
]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose columns come from its first two samples."""
    monkeypatch.setattr("embq.producer.plan.LOOK_SAMPLES", 2)
    root = build(tmp_path / "out", [write_jsonl(tmp_path / "in.jsonl", LINES)], unit_samples=5)
    assert {column.name: column.type for column in load_run(root).rows.columns} == {
        "n": "int64",
        "size.w": "int64",
        "tags": "json",
        "ok": "bool",
        "score": "float64",
    }
    return root


def broken(report: VerificationReport) -> set[str]:
    return {violation.invariant for violation in report.violations}


def said(report: VerificationReport) -> str:
    return " ".join(violation.message for violation in report.violations)


def test_columns_and_what_stands_beside_them_are_the_fields_of_the_source(out: Path) -> None:
    report = verify(out)
    assert report.ok, report.violations
    assert [note for note in report.notes if "2 rows hold metadata that fit no column" in note]


ODD: dict[str, list[Any]] = {
    "s": ["", "\0", "a\0b", "ä" * 3000, "\ud800", None, 'x\n"y'],
    "n": [2**63 - 1, -(2**63), 0, None, 7, 8, -9],
    "f": [-0.0, 1e308, 5e-324, 1, 2**53, None, -1e-300],
    "b": [True, False, None, True, None, None, True],
    "j": [[1], "s", None, 2, {"a": 1}, [None, {"q": "\0"}], "\ud800"],
    "a b%'\"\\": [1] * 7,
    "🙂": [None, {"é": 1}, None, None, {"é": 2, "x.y": {"z": 0.5}}, None, None],
}


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_gives_back_the_same_values(tmp_path: Path, format: str) -> None:
    lines = [{"text": f"text {i}", **{name: values[i] for name, values in ODD.items()}} for i in range(7)]
    root = build(tmp_path / "out", [write_jsonl(tmp_path / "in.jsonl", lines)], format=format, unit_samples=4)
    types = {column.name: column.type for column in load_run(root).rows.columns}
    assert [types[name] for name in ("s", "n", "f", "b", "j")] == ["string", "int64", "float64", "bool", "json"]
    report = verify(root)
    assert report.ok, report.violations


def test_lists_that_are_nested_deep_break_nothing(tmp_path: Path) -> None:
    lines = [b'{"text":"t","n":1,"j":' + b"[" * depth + b"]" * depth + b"}\n" for depth in range(1, 1200, 40)]
    report = verify(build(tmp_path / "out", [write_jsonl(tmp_path / "in.jsonl", lines)], unit_samples=50))
    assert report.ok, report.violations
    assert report.rows > 10


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("n", [1, 3, None, None, None], "'n' is 3, in the source 2"),
        ("n", [1, None, None, None, None], "'n' is null, in the source 2"),
        ("n", [1, 2, 3, None, None], "'n' is 3, in the source null"),
        ("n", [1, 2, None, 4, None], "'n' is in its column and in metadata"),
        ("tags", ['["x"]', "[", None, None, '"x"'], "'tags' holds no JSON text"),
        ("tags", ['["x"]', "[]", None, None, '"y"'], "'tags' is \"y\""),
        ("metadata", [None, '{"new":1}', None, '{"n":"4","new":{"deep":[1]}}', None], "'new' is 1"),
        ("metadata", [None, None, "[]", None, None], "no JSON object"),
    ],
)
def test_a_value_that_is_not_the_sources_is_named(out: Path, column: str, values: list[Any], message: str) -> None:
    def change(table: pa.Table) -> pa.Table:
        kept = pa.chunked_array([pa.array(values[: table.num_rows], table.schema.field(column).type)])
        return set_column(table, column, kept)

    rewrite(out, change)
    report = verify(out)
    assert broken(report) == {"metadata"}
    assert message in said(report)


def test_a_value_that_stayed_beside_the_column_it_fits_is_named(out: Path) -> None:
    def change(table: pa.Table) -> pa.Table:
        empty = pa.nulls(table.num_rows, pa.int64())
        texts = [json.dumps({"n": line["n"], **json.loads(text or "{}")}) if "n" in line else text
                 for line, text in zip(LINES, table["metadata"].to_pylist(), strict=True)]  # fmt: skip
        return set_column(set_column(table, "n", empty), "metadata", pa.array(texts))

    rewrite(out, change)
    report = verify(out)
    assert broken(report) == {"metadata"}
    assert "'n' is empty, though 1 fits it" in said(report)


@pytest.mark.parametrize("column", ["n", "metadata", "size.w"])
def test_a_column_of_another_type_is_named(out: Path, column: str) -> None:
    def change(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(column)
        return table.set_column(at, column, pc.cast(table[column], pa.large_string()))

    rewrite(out, change)
    report = verify(out)
    assert broken(report) == {"schema"}
    assert column in said(report)


def test_a_column_that_the_run_has_not_is_named(out: Path) -> None:
    rewrite(out, lambda table: table.append_column("more", pa.nulls(table.num_rows, pa.string())))
    report = verify(out)
    assert broken(report) == {"schema"}
    assert "that the run has not: more" in said(report)


def test_each_chunk_of_a_text_has_its_metadata(tmp_path: Path) -> None:
    from embq.app.verify.metadata import StoredMetadata

    rows = pa.table({"n": pa.array([1, 1, 2]), "metadata": pa.array([None, '{"m":1}', None], pa.string())})
    columns = load_run(build(tmp_path / "o", [write_jsonl(tmp_path / "i.jsonl", [{"text": "t", "n": 1}])])).rows.columns
    stored = StoredMetadata(rows, columns)
    assert [bool(stored.differs(i, '{"n": 1}')) for i in range(3)] == [False, True, True]
    assert stored.beside == 1


# --- the second reading ---


def write_table(path: Path) -> Path:
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5)
    columns = {
        "text": ["one", "two"],
        "when": pa.array([moment, None]),
        "price": pa.array([Decimal("1.50"), None]),
        "deep": [{"a": [1.5, float("nan")]}, {"a": None}],
        "word": pa.array(["x", "y"]).dictionary_encode(),
        "blob": [b"1", b"2"],
        "nan": [float("nan"), 1.0],
    }
    pq.write_table(pa.table(columns), path)
    return path


def write_csv(path: Path) -> Path:
    path.write_text("\ufefftext,n,word\none,1,\ufeffx\ntwo,,y\n", encoding="utf-8")
    return path


INPUTS: dict[str, tuple[str, Callable[[Path], Path], tuple[str, ...]]] = {
    "tar": (
        "tar",
        lambda folder: write_tar(
            folder / "s.tar",
            [("a.jpg", b"i"), ("a.json", b'{"n":NaN,"m":[1]}'), ("b.jpg", b"i"), ("b.json", b"{"), ("a.json", b"{}")],
        ),
        (),
    ),
    "files": (
        "files",
        lambda folder: write_folder(folder / "f", {"a.b.jpg": b"i", "a.b.json": b'{"n":{"m":1}}', "c.png": b"i"}),
        (),
    ),
    "jsonl": ("jsonl", lambda folder: write_jsonl(folder / "l.jsonl", [*LINES, b"{\n", {"id": 7.5, "text": "t"}]), ()),
    "jsonl named": ("jsonl", lambda folder: write_jsonl(folder / "l.jsonl", LINES), ("n", "text")),
    "csv": ("csv", lambda folder: write_csv(folder / "r.csv"), ()),
    "csv named": ("csv", lambda folder: write_csv(folder / "r.csv"), ("n",)),
    "table": ("parquet", lambda folder: write_table(folder / "r.parquet"), ("*",)),
    "table named": ("parquet", lambda folder: write_table(folder / "r.parquet"), ("when", "text")),
    "table bare": ("parquet", lambda folder: write_table(folder / "r.parquet"), ()),
}


@pytest.mark.parametrize(("kind", "write", "named"), INPUTS.values(), ids=INPUTS)
def test_both_readings_find_the_same_metadata(
    tmp_path: Path, kind: str, write: Callable[[Path], Path], named: tuple[str, ...]
) -> None:
    units: list[Unit] = list(SOURCES[kind].split(str(write(tmp_path)), ReadOptions(metadata_columns=named)))
    samples = [sample for unit in units for sample in read(unit, ())]
    again = [found.metadata for unit in units for found in reread(unit, images=False)]
    pairs = list(zip(samples, again, strict=True))
    compared = [
        (dict(leaves(json.loads(s.metadata or "{}"))), dict(leaves(found or {}))) for s, found in pairs if not s.error
    ]
    assert compared
    assert all(first == second for first, second in compared), compared
    assert any(first for first, _ in compared) == (kind != "parquet" or bool(named))
