"""Text sources: every line is counted, and every odd line has a name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import embq.sources.formats.text_files
from embq.core.errors import InputError, SourceError
from embq.core.units import Sample, Unit
from embq.sources.access.files import PIECE_BYTES, etag
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import ReadOptions
from tests.support.planning import code


def units_of(path: Path, **options: object) -> list[Unit]:
    kind = "jsonl" if path.suffix == ".jsonl" else "lines"
    return list(SOURCES[kind].split(str(path), ReadOptions(**options)))  # type: ignore[arg-type]


def read(folder: Path, name: str, data: bytes, **options: object) -> list[Sample]:
    path = folder / name
    path.write_bytes(data)
    units = units_of(path, **options)
    return [sample for unit in units for sample in SOURCES[unit.kind].read(unit)]


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_lines_are_the_same_with_and_without_a_last_line_end(tmp_path: Path, end: bytes, most: int) -> None:
    samples = read(tmp_path, "t.txt", b"one\ntwo\nthree" + end, unit_samples=most)
    assert [(s.key, s.text) for s in samples] == [("t.txt:1", "one"), ("t.txt:2", "two"), ("t.txt:3", "three")]


def test_windows_line_ends_and_a_byte_order_mark_are_no_text(tmp_path: Path) -> None:
    samples = read(tmp_path, "t.txt", b"\xef\xbb\xbfone\r\ntwo\r\n\r\n")
    assert [(s.text, code(s)) for s in samples] == [("one", None), ("two", None), ("", "empty_text")]
    (sample,) = read(tmp_path, "t.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n')
    assert sample.text == "one"


def test_a_blank_line_is_a_failed_sample_and_keeps_its_number(tmp_path: Path) -> None:
    samples = read(tmp_path, "t.txt", b"one\n\n \t\nfour\n")
    assert [(s.key, s.text, code(s)) for s in samples] == [
        ("t.txt:1", "one", None),
        ("t.txt:2", "", "empty_text"),
        ("t.txt:3", " \t", "empty_text"),
        ("t.txt:4", "four", None),
    ]
    assert [code(s) for s in read(tmp_path, "t.jsonl", b'\n{"text": "x"}\n')] == ["empty_text", None]


def test_a_line_that_is_not_utf8_fails_alone(tmp_path: Path) -> None:
    samples = read(tmp_path, "t.txt", b"caf\xe9\nok\n")
    assert [code(s) for s in samples] == ["text_not_utf8", None]
    samples = read(tmp_path, "t.jsonl", b'{"text": "caf\xe9"}\n{"text": "\\ud800"}\n{"text": "ok"}\n')
    assert [code(s) for s in samples] == ["text_not_utf8", "text_not_utf8", None]


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl"])
def test_a_line_above_the_limit_fails_alone(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embq.sources.formats.text_files, "SAMPLE_MAX_BYTES", 100)
    long, short = b"x" * 5000, b'{"text": "short"}'
    samples = read(tmp_path, name, b"\n".join([short, long, short, long]))
    assert [code(s) for s in samples] == [None, "too_large", None, "too_large"]
    exact = b"x" * 99 + b"\n"
    assert [code(s) for s in read(tmp_path, "u.txt", exact + b"y" + exact)] == [None, "too_large"]


def test_units_cut_at_line_borders_whatever_the_block_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.txt"
    lines = [b"x" * (7 * number % 23) for number in range(500)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    monkeypatch.setattr(embq.sources.formats.text_files, "_STRIDE", 13)
    expected = units_of(path, unit_samples=37)
    for block in (1, 7, 64, 4096):
        monkeypatch.setattr(embq.sources.formats.text_files, "_BLOCK", block)
        assert units_of(path, unit_samples=37) == expected
    assert [u.first for u in expected] == list(range(0, 500, 37))
    assert sum(u.samples or 0 for u in expected) == 500
    assert [u.start for u in expected[1:]] == [u.stop for u in expected[:-1]]


def test_text_and_id_are_found_and_the_rest_becomes_metadata(tmp_path: Path) -> None:
    rows = [
        {"caption": "c", "text": "t", "key": 7, "n": 1},
        {"body": "b", "_id": "x", "id": None},
        {"text": "no id"},
        {"text": "\u00fc", "id": True, "deep": {"a": [1.5, "\u00e4"]}},
    ]
    data = "\n".join(json.dumps(row) for row in rows).encode()
    samples = read(tmp_path, "t.jsonl", data)
    assert [(s.key, s.text, s.metadata) for s in samples] == [
        ("7", "t", '{"caption":"c","n":1}'),
        ("t.jsonl:2", "b", '{"_id":"x","id":null}'),
        ("t.jsonl:3", "no id", None),
        ("t.jsonl:4", "\u00fc", '{"id":true,"deep":{"a":[1.5,"\u00e4"]}}'),
    ]


def test_named_columns_travel_with_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "wrong", "key": "right", "sku": "k"}\n{"key": "y"}\n{"sku": "z"}\n')
    units = units_of(path, text_column="key", id_column="sku")
    assert units[0].options == (("id_column", "sku"), ("text_column", "key"))
    assert units[0].unit_id != units_of(path)[0].unit_id
    first, second, third = SOURCES["jsonl"].read(units[0])
    assert (first.key, first.text, first.metadata) == ("k", "right", '{"text":"wrong"}')
    assert (second.key, code(second)) == ("t.jsonl:2", "missing_id")
    assert (third.key, code(third)) == ("z", "missing_text")


def test_a_text_column_is_never_taken_for_the_id(tmp_path: Path) -> None:
    (sample,) = read(tmp_path, "t.jsonl", b'{"key": "hello"}', text_column="key")
    assert (sample.key, sample.text) == ("t.jsonl:1", "hello")
    (sample,) = read(tmp_path, "t.jsonl", b'{"doc_id": "hello"}', text_column="doc_id")
    assert (sample.key, sample.text, sample.metadata) == ("t.jsonl:1", "hello", None)


def test_a_field_without_a_name_is_metadata_whether_there_is_an_id_or_not(tmp_path: Path) -> None:
    for line, key in ((b'{"":1,"text":"a"}', "t.jsonl:1"), (b'{"":1,"id":"k","text":"a"}', "k")):
        (sample,) = read(tmp_path, "t.jsonl", line)
        assert (sample.key, sample.text, sample.metadata) == (key, "a", '{"":1}')


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{", "bad_json"),
        (b"[1]", "bad_json"),
        (b'"text"', "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b'{"n": ' + b"1" * 5000 + b"}", "bad_json"),
        (b'{"title": "x"}', "missing_text"),
        (b'{"text": null}', "missing_text"),
        (b'{"text": ["x"]}', "missing_text"),
        (b'{"text": ""}', "empty_text"),
    ],
)
def test_an_unusable_line_says_why_and_its_neighbour_is_unharmed(tmp_path: Path, line: bytes, expected: str) -> None:
    bad, good = read(tmp_path, "t.jsonl", line + b'\n{"text": "ok", "id": "i"}\n')
    assert code(bad) == expected
    assert (good.key, good.text, good.error) == ("i", "ok", None)


def test_missing_text_names_the_fields_that_are_there(tmp_path: Path) -> None:
    (sample,) = read(tmp_path, "t.jsonl", b'{"title": "x", "n": 1}')
    assert sample.error is not None
    assert "title (str), n (int)" in sample.error[1]


def test_a_repeated_id_fails_from_the_second_time_on(tmp_path: Path) -> None:
    samples = read(tmp_path, "t.jsonl", b'{"id":"a","text":"1"}\n{"id":"a","text":"2"}\n{"id":"b","text":"3"}\n')
    assert [(s.key, code(s)) for s in samples] == [("a", None), ("a", "duplicate_key"), ("b", None)]


def test_an_empty_file_is_no_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is empty"):
        read(tmp_path, "t.txt", b"")


def test_a_slice_that_does_not_hold_the_planned_lines_fails_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"one\ntwo\n")
    for lines, stop in ((3, 8), (1, 8), (2, 9)):
        unit = Unit(kind="lines", source=str(path), stop=stop, samples=lines, etag=etag(path.stat()))
        with pytest.raises(SourceError) as caught:
            list(SOURCES["lines"].read(unit))
        assert caught.value.code == "source_changed"


def test_a_long_line_tells_of_each_piece_that_comes_in(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 3 * PIECE_BYTES + b"\n")
    (unit,) = units_of(path)
    pieces: list[int] = []
    (sample,) = SOURCES["lines"].read(unit, lambda: pieces.append(1))
    assert len(sample.text or "") == 3 * PIECE_BYTES
    assert len(pieces) >= 3


def test_ids_that_are_floats_are_refused_before_a_run_as_those_of_tables_are(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    source = SOURCES["jsonl"]
    path.write_text('{"id": 1.0, "text": "a"}\n{"id": 2.0, "text": "b"}\n')
    for named in ({}, {"id_column": "id"}):
        with pytest.raises(SourceError, match="no keys can be made of column 'id', which is of type float") as caught:
            source.holds(str(path), ReadOptions(**named))
        assert caught.value.code == "wrong_column_type"
    assert source.holds(str(path), ReadOptions(metadata_columns=("id",))) == ("text",)
    samples = read(tmp_path, "a.jsonl", b'{"id": 1, "text": "a"}\n{"id": 2.0, "text": "b"}\n')
    assert [(sample.key, code(sample)) for sample in samples] == [("1", None), ("a.jsonl:2", "missing_id")]
