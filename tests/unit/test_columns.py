"""Columns are chosen alike in all formats, and a header that is a row can be read as one."""

from __future__ import annotations

import csv
import gzip
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from embq.app.cli.entry_point import cli
from embq.core.errors import EmbqError, InputError, SourceError
from embq.producer.plan import plan
from embq.sources.formats.delimited_rows import DELIMITERS
from embq.sources.formats.text_files import BINARY
from embq.sources.reader_options import ROWS, ReadOptions
from embq.sources.unit_reader import read
from tests.support.planning import code, samples_of, units_of
from tests.unit.test_sources_tables import write as write_table


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Rows as the kind of file that the name says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        write_table(path, **{name: [row[name] for row in rows] for name in rows[0]})
    return path


FLAT = pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows", "csv", "jsonl"])
NESTED = pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows", "jsonl"])


def test_every_kind_with_columns_is_tried() -> None:
    assert set(ROWS) == {"parquet", "arrow", "csv", "jsonl"}


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows", "csv", "jsonl"])
@pytest.mark.parametrize(("text", "identity"), [("Text", "ID"), ("CAPTION", "Doc_Id"), ("Body", "Key")])
def test_usual_names_count_in_either_case(tmp_path: Path, suffix: str, text: str, identity: str) -> None:
    path = write(tmp_path / f"t.{suffix}", [{identity: "a", "other": "x", text: "one"}])
    assert [(sample.key, sample.text) for sample in samples_of(path)] == [("a", "one")]


def test_captions_of_a_folder_of_images_do_so_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(b"x")
    (tmp_path / "in" / "metadata.jsonl").write_text('{"file_name": "a.jpg", "Text": "one", "n": 1}\n')
    (sample,) = samples_of(tmp_path / "in")
    assert (sample.text, sample.metadata) == ("one", '{"n":1}')


@FLAT
@pytest.mark.parametrize("option", ["text_column", "id_column", "metadata_columns"])
def test_a_name_that_no_row_has_is_refused_with_those_that_are_near(tmp_path: Path, suffix: str, option: str) -> None:
    path = write(tmp_path / f"t.{suffix}", [{"text": "one", "language": "en"}] * 3)
    wanted: Any = ("langauge",) if option == "metadata_columns" else "Langage"
    with pytest.raises(InputError) as refused:
        plan([str(path)], ReadOptions(**{option: wanted}))
    flag = f"--{option.replace('_', '-')}"
    assert refused.value.code == "missing_column"
    assert refused.value.next_step.startswith(f"did you mean 'language'? check {flag}")


def test_columns_of_folders_need_not_be_in_their_files(tmp_path: Path) -> None:
    (tmp_path / "year=2024").mkdir()
    path = write(tmp_path / "year=2024" / "t.jsonl", [{"text": "one"}])
    assert list(plan([str(path)], ReadOptions(metadata_columns=("year",))).units)


@NESTED
def test_fields_of_objects_are_named_by_the_names_that_lead_to_them(tmp_path: Path, suffix: str) -> None:
    rows = [{"doc": {"text": f"text {n}", "ref": {"id": f"k{n}"}, "lang": "en"}, "n": n} for n in range(5)]
    path = write(tmp_path / f"t.{suffix}", rows)
    named: dict[str, Any] = {"text_column": "doc.text", "id_column": "doc.ref.id"}
    samples = samples_of(path, **named, metadata_columns=("doc.lang", "n"), unit_samples=2)
    assert [(s.key, s.text, json.loads(s.metadata or "")) for s in samples] == [
        (f"k{n}", f"text {n}", {"doc.lang": "en", "n": n}) for n in range(5)
    ]
    assert list(plan([str(path)], ReadOptions(**named)).units)
    with pytest.raises(InputError, match="doc") as refused:
        plan([str(path)], ReadOptions(text_column="doc.txt"))
    assert refused.value.code == "missing_column"
    with pytest.raises(InputError):
        plan([str(path)], ReadOptions(text_column="n.text"))


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows"])
def test_a_field_of_an_object_is_taken_only_where_it_is_named(tmp_path: Path, suffix: str) -> None:
    kind = pa.struct({"text": pa.string(), "image": pa.binary(), "id": pa.string()})
    docs = pa.array([{"text": "inner", "image": b"i", "id": "x"}, None], kind)
    path = write_table(tmp_path / f"t.{suffix}", doc=docs, body=["one", "two"])
    assert [(s.key, s.text) for s in samples_of(path)] == [(f"t.{suffix}:1", "one"), (f"t.{suffix}:2", "two")]
    first, second = samples_of(path, text_column="doc.text")
    assert (first.text, code(second)) == ("inner", "missing_text")
    (image, _) = samples_of(path, image_column="doc.image")
    assert (image.image, image.text) == (b"i", "one")
    literal = write_table(tmp_path / f"l.{suffix}", doc=docs, **{"doc.text": ["outer", "two"]})
    assert [s.text for s in samples_of(literal, text_column="doc.text")] == ["outer", "two"]


def test_a_text_of_an_object_is_no_metadata_of_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"doc": {"text": "one"}, "n": 1}, {"doc": {"text": "two", "m": 2}}])
    samples = samples_of(path, text_column="doc.text")
    assert [sample.metadata for sample in samples] == ['{"n":1}', '{"doc":{"m":2}}']


def test_a_line_without_a_text_names_the_one_in_an_object(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"doc": {"Text": "one"}}, {"doc": {"text": 1}}, {"doc": {"n": "one"}}])
    hints = [(sample.error or ("", ""))[1].partition("--text-column ")[2] for sample in samples_of(path)]
    assert hints == ["doc.Text", "", ""]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows"])
def test_texts_are_read_whatever_holds_their_bytes(tmp_path: Path, suffix: str) -> None:
    kinds = [pa.binary(), pa.large_binary(), pa.binary(5), pa.dictionary(pa.int8(), pa.binary())]
    kinds += [pa.binary_view()] if suffix != "parquet" else []
    for number, kind in enumerate(kinds):
        values = pa.array([b"one\0\0" if kind == pa.binary(5) else b"one", None, b"seven"], pa.binary())
        column = values.dictionary_encode() if pa.types.is_dictionary(kind) else values.cast(kind)
        path = write_table(tmp_path / f"{number}.{suffix}", text=column)
        samples = samples_of(path)
        assert [(sample.text, code(sample)) for sample in samples] == [
            ("one", None),
            (None, "missing_text"),
            ("seven", None),
        ]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows"])
@pytest.mark.parametrize("item", [pa.binary(), pa.struct({"bytes": pa.binary(), "path": pa.string()}), pa.string()])
@pytest.mark.parametrize("make", [pa.list_, pa.large_list, lambda item: pa.list_(item, 1)])
def test_a_list_in_a_row_is_refused_with_the_way_to_a_row_for_each(
    tmp_path: Path, suffix: str, item: pa.DataType, make: Callable[[pa.DataType], pa.DataType]
) -> None:
    value: Any = {"bytes": b"i", "path": "p"} if pa.types.is_struct(item) else "i"
    path = write_table(tmp_path / f"t.{suffix}", images=pa.array([[value]], make(item)))
    choices: list[dict[str, Any]] = [{}, {"image_column": "images"}, {"text_column": "images"}]
    for options in choices:
        with pytest.raises(InputError, match="images") as refused:
            plan([str(path)], ReadOptions(**options))
        assert "a row of its own" in refused.value.next_step


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows", "csv", "jsonl"])
def test_a_suggested_column_can_be_pasted_into_a_shell(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"t.{suffix}", [{"my (en)": "one", "it's": "two"}])
    with pytest.raises(InputError) as refused:
        plan([str(path)], ReadOptions())
    _, name = shlex.split(refused.value.next_step.partition("--text-column")[2].partition(";")[0].join(("x ", "")))
    assert name in ("my (en)", "it's")
    assert [sample.error for sample in samples_of(path, text_column=name)] == [None]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"id": "i", "title": "one", "n": 1}, "title"),
        ({"title": "one", "doc": {"Text": "two"}}, "doc.Text"),
        ({"doc": {"n": 1, "words": "two"}}, "doc.words"),
        ({"id": "i", "n": 1}, ""),
        ({"title": ["one"]}, ""),
    ],
)
def test_lines_without_a_text_are_refused_as_tables_are(tmp_path: Path, row: dict[str, Any], named: str) -> None:
    path = write(tmp_path / "t.jsonl", [row, row])
    with pytest.raises(InputError, match="none of its first") as refused:
        plan([str(path)], ReadOptions())
    assert (f"--text-column {named}" in refused.value.next_step) == bool(named)
    write(tmp_path / "t.jsonl", [row, {"text": "one"}])
    assert [code(sample) for sample in samples_of(path)] == ["missing_text", None]


@NESTED
def test_a_misspelt_column_of_an_object_is_suggested(tmp_path: Path, suffix: str) -> None:
    docs: Any = [{"text": "one", "n": 1}, {"text": "two", "n": 2}]
    path = write(tmp_path / f"t.{suffix}", [{"doc": doc, "n": 1} for doc in docs])
    with pytest.raises(InputError) as refused:
        plan([str(path)], ReadOptions(text_column="doc.txt"))
    assert "'doc.text'" in refused.value.next_step


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows"])
@pytest.mark.parametrize("options", [{}, {"text_column": "n"}, {"image_column": "n"}])
def test_a_table_of_numbers_is_to_be_cast(tmp_path: Path, suffix: str, options: dict[str, str]) -> None:
    path = write_table(tmp_path / f"t.{suffix}", n=[1, 2], x=[0.5, 1.5])
    with pytest.raises(InputError) as refused:
        plan([str(path)], ReadOptions(**options))
    assert "cast" in refused.value.next_step
    assert "--text-column" not in refused.value.next_step


# --- headers and delimiters of .csv files ---


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz"])
def test_json_lines_are_not_taken_for_a_csv(tmp_path: Path, name: str) -> None:
    data = b'{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n'
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(InputError, match="JSON") as refused:
        plan([str(tmp_path / name)], ReadOptions())
    assert "--input-format jsonl" in refused.value.next_step
    if not name.endswith(".gz"):
        plan([str(tmp_path / name)], ReadOptions(kind="jsonl"))
    assert len(samples_of(tmp_path / name, no_header="yes", delimiter="\t")) == 2


@pytest.mark.parametrize("mark", [",", ";", "|"])
def test_names_that_another_delimiter_would_split_are_told(tmp_path: Path, mark: str) -> None:
    (tmp_path / "t.tsv").write_text(f"id{mark}text\n1{mark}one\n")
    planned = plan([str(tmp_path / "t.tsv")], ReadOptions())
    list(planned.units)
    (warning,) = planned.warnings
    assert f"--delimiter '{mark}'" in warning
    (sample,) = samples_of(tmp_path / "t.tsv", delimiter=mark)
    assert (sample.key, sample.text) == ("1", "one")


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.txt"])
@pytest.mark.parametrize("magic", BINARY)
def test_a_file_of_another_kind_is_named(tmp_path: Path, name: str, magic: bytes) -> None:
    (tmp_path / name).write_bytes(magic + bytes(range(256)))
    with pytest.raises(EmbqError, match=BINARY[magic]) as refused:
        _ = [list(read(unit, [])) for unit in plan([str(tmp_path / name)], ReadOptions()).units]
    assert "iconv" not in f"{refused.value.message} {refused.value.next_step}"


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl", "t.txt"])
def test_a_file_without_a_byte_is_said_to_be_empty(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(InputError, match="is empty") as refused:
        plan([str(tmp_path / name)], ReadOptions())
    assert "check how the file" in refused.value.next_step


@pytest.mark.parametrize("delimiter", [*DELIMITERS, ":", " "])
def test_any_delimiter_is_found_in_the_header(tmp_path: Path, delimiter: str) -> None:
    (tmp_path / "t.csv").write_text(f'id{delimiter}text\n1{delimiter}one\n2{delimiter}"two{delimiter}2"\n')
    assert [(s.key, s.text) for s in samples_of(tmp_path / "t.csv")] == [("1", "one"), ("2", f"two{delimiter}2")]
    named = samples_of(tmp_path / "t.csv", delimiter=delimiter)
    assert [(s.key, s.text) for s in named] == [("1", "one"), ("2", f"two{delimiter}2")]


@pytest.mark.parametrize(
    "data",
    [
        "the text of it\na red car\nfour words are here\ntwo words\n",
        "note: text\nat 10:30 it ended\nx\n",
        "a title\ntwo words\nfour five\n",
    ],
)
def test_blanks_and_colons_of_a_column_of_texts_are_no_delimiters(tmp_path: Path, data: str) -> None:
    (tmp_path / "t.csv").write_text(data)
    assert [sample.text for sample in samples_of(tmp_path / "t.csv")] == data.splitlines()[1:]


HEADERLESS = [
    ("t.csv", b"one\ntwo\nthree\n"),
    ("t.csv", b"\xef\xbb\xbfone\r\ntwo\r\nthree"),
    ("t.csv", b"x,one\ny,two\nz,three\n"),
    ("t.csv", b"sep=;\nx;one\ny;two\nz;three\n"),
    ("t.tsv", b"x\tone\ny\ttwo\nz\tthree\n"),
    ("t.csv.gz", gzip.compress(b'\xef\xbb\xbf"x","one"\ny,two\nz,three\n', mtime=0)),
]


@pytest.mark.parametrize(("name", "data"), HEADERLESS)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_without_a_header_the_first_line_is_a_row(tmp_path: Path, name: str, data: bytes, most: int) -> None:
    (tmp_path / name).write_bytes(data)
    lone = data.find(b"x") < 0 and not name.endswith("gz")
    named: dict[str, Any] = {} if lone else {"text_column": "column2", "id_column": "column1"}
    options = ReadOptions(no_header="yes", unit_samples=most, **named)
    planned = plan([str(tmp_path / name)], options)
    assert (planned.listing, planned.warnings) == ("", ())
    samples = [sample for unit in planned.units for sample in read(unit, ())]
    assert [sample.text for sample in samples] == ["one", "two", "three"]
    assert [sample.key for sample in samples] == ([f"{name}:{n}" for n in (1, 2, 3)] if lone else ["x", "y", "z"])
    restored = ReadOptions.from_record(tuple(options.record().items()))
    assert restored.no_header == "yes"


@pytest.mark.parametrize(
    ("header", "doubtful"),
    [("hello world", True), ("17", True), ("-1.5", True), ("text", False), ("sentence", False), ("id,text", False)],
)
def test_the_line_that_is_taken_for_a_header_is_told(tmp_path: Path, header: str, doubtful: bool) -> None:
    (tmp_path / "t.csv").write_text(f"{header}\n" + ",".join(["x"] * len(header.split(","))) + "\n")
    planned = plan([str(tmp_path / "t.csv")], ReadOptions())
    assert planned.listing == f"header of t.csv: {', '.join(map(repr, header.split(',')))}"
    assert [f"{header!r}, is taken for a header; --no-header" in line for line in planned.warnings] == [True] * doubtful
    shown = CliRunner().invoke(
        cli,
        ["run", str(tmp_path / "t.csv"), "-o", str(tmp_path / "out"), "-m", "stub:8", "--devices", "cpu", "--dry-run"],
    )
    assert planned.listing in " ".join(shown.output.split())


def test_a_first_row_without_usual_names_is_refused_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a red car,hello\na dog,good bye\n")
    with pytest.raises(SourceError, match="a red car") as refused:
        plan([str(tmp_path / "t.csv")], ReadOptions())
    assert "--no-header" in refused.value.next_step
    (unit,) = units_of(tmp_path / "t.csv", no_header="yes", text_column="column1")
    assert unit.samples == 2
