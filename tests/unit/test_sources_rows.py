"""Texts in .csv, HDF5 and compressed files: every row is counted, and what is cut or damaged is never short."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embq.core.errors import InputError, SourceError, UsageError
from embq.core.units import Sample
from embq.producer.plan import plan
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read
from tests.support.archives import zstd
from tests.support.outputs.build import build
from tests.support.planning import code, samples_of, units_of
from tests.support.second_reader.checks import verify
from tests.support.second_reader.tables import csv_rows

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstd.compress,
}


def csv_samples(folder: Path, data: bytes, name: str = "t.csv", **options: Any) -> list[Sample]:
    path = folder / name
    path.write_bytes(data)
    return samples_of(path, **options)


# --- csv ---


@pytest.mark.parametrize("most", [1, 2, 100])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_quoted_fields_may_hold_line_ends_quotes_and_separators(tmp_path: Path, most: int, end: bytes) -> None:
    rows = [b"id,text,n", b'a,"one,\ntwo",1', b'b,"say ""hi""",2', b"c,plain,3"]
    samples = csv_samples(tmp_path, end.join(rows), unit_samples=most)
    assert [(s.key, s.text, s.metadata) for s in samples] == [
        ("a", "one,\ntwo", '{"n":"1"}'),
        ("b", 'say "hi"', '{"n":"2"}'),
        ("c", "plain", '{"n":"3"}'),
    ]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.tsv", b"text\tn\none, two\t1\n"),
        ("t.csv", b"text;n\none, two;1\n"),
        ("t.csv", b"text\tn\none, two\t1\n"),
        ("t.csv", b'\xef\xbb\xbftext,n\n"one, two",1\n'),
        ("t.csv", b"sep=;\r\ntext;n\r\none, two;1\r\n"),
        ("t.csv", b'\xef\xbb\xbf"sep=;"\ntext;n\none, two;1\n'),
        ("t.csv", b"text|n\none, two|1\n"),
        ("t.csv", b"text^n\none, two^1\n"),
    ],
)
def test_the_separator_is_told_by_name_or_header(tmp_path: Path, name: str, data: bytes) -> None:
    (sample,) = csv_samples(tmp_path, data, name)
    assert (sample.text, sample.metadata) == ("one, two", '{"n":"1"}')
    assert verified(tmp_path / name) == 1


def verified(path: Path, **options: Any) -> int:
    """Rows that the second reader, which `embq verify` uses, finds like the first."""
    (unit,) = plan([str(path)], ReadOptions(**options)).units
    first = [(s.key, (s.text or "").encode()) for s in read(unit, ())]
    assert [(key, text) for key, _, text, _ in csv_rows(unit, False)] == first
    return len(first)


@pytest.mark.parametrize("data", [b'"Price, EUR";text;id\n1;a, b;x\n', b"Price, EUR;text;id\n1;a, b, c;x\n"])
def test_a_comma_in_the_name_of_a_column_is_not_the_separator(tmp_path: Path, data: bytes) -> None:
    (sample,) = csv_samples(tmp_path, data)
    assert (sample.key, sample.metadata) == ("x", '{"Price, EUR":"1"}')
    assert verified(tmp_path / "t.csv") == 1


def test_a_separator_in_doubt_is_asked_for(tmp_path: Path) -> None:
    data = b"text|a,b\nx|y,z\n"
    (tmp_path / "t.csv").write_bytes(data)
    with pytest.raises(SourceError, match="separated by any of") as caught:
        list(plan([str(tmp_path / "t.csv")], ReadOptions()).units)
    assert "--delimiter" in (caught.value.next_step or "")
    (sample,) = csv_samples(tmp_path, data, delimiter="|")
    assert (sample.text, sample.metadata) == ("x", '{"a,b":"y,z"}')
    with pytest.raises(UsageError, match="no delimiter"):
        list(plan([str(tmp_path / "t.csv")], ReadOptions(delimiter="||")).units)


def test_a_row_that_is_not_as_the_header_says_fails_alone(tmp_path: Path) -> None:
    data = b'text,id\nok,1\nshort\nlong,2,3\n\n,4\ncaf\xe9,5\n"bad"quote,6\nok,1\nlast,\n'
    assert [(s.key, code(s)) for s in csv_samples(tmp_path, data)] == [
        ("1", None),
        ("t.csv:2", "ragged_row"),
        ("t.csv:3", "ragged_row"),
        ("4", "empty_text"),
        ("5", "text_not_utf8"),
        ("t.csv:6", "bad_csv"),
        ("1", "duplicate_key"),
        ("t.csv:8", None),
    ]
    assert [code(s) for s in csv_samples(tmp_path, data, id_column="id")][-1] == "missing_id"


def test_a_quote_that_never_closes_is_a_failure_and_not_a_short_file(tmp_path: Path) -> None:
    samples = csv_samples(tmp_path, b'text,n\none,1\n"two,2\nthree,3\n')
    assert [code(s) for s in samples] == [None, "bad_csv"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"text,text\nx,y\n", "'text'"),
        (b"text,n\n", "no row"),
        (b"\xff,n\nx,y\n", "not UTF-8"),
        (b"\nx\n", "blank"),
        (b"text,n\rx,y\r", "carriage return alone"),
    ],
)
def test_a_file_without_a_usable_header_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(data)
    with pytest.raises(InputError, match=says):
        list(plan([str(path)], ReadOptions()).units)


def test_quotes_of_a_tsv_that_means_none_are_characters(tmp_path: Path) -> None:
    data = b'id\ttext\n1\t"so he said\n2\tplain\n3\t5" pipe\n4\t"a" b\n'
    assert [s.text for s in csv_samples(tmp_path, data, "t.tsv", quotes="none")] == [
        '"so he said',
        "plain",
        '5" pipe',
        '"a" b',
    ]
    assert verified(tmp_path / "t.tsv", quotes="none") == 4


LINES = [f"{n}\tplain {n}" for n in range(8)]


@pytest.mark.parametrize(
    ("rows", "count", "text"),
    [
        ([*LINES, '8\t"so he said', '9\t5" pipe', '10\t"a" b'], 11, '"a" b'),  # no quote is closed
        ([*LINES, '8\t"hello', '9\tworld"'], 10, 'world"'),  # a later one closes it, and takes a row
        ([*LINES, '8\t"He said" and left', '9\t"all"'], 10, "all"),  # one of each: they enclose
        ([*LINES, '8\t"He said" and left', '9\t"Go" now', '10\t"all"'], 11, '"all"'),
        ([*LINES, '8\t"a\nb\tc"\td', '9\t"e\nf"'], 10, "e\nf"),
        ([*LINES, '8\t"a\tb"', '9\t"e\nf"'], 10, "e\nf"),  # quoted as in RFC 4180
        (['1\t"a"', '2\t"b ""c"""'], 2, 'b "c"'),
        ([*(f'{n}\t"a\nb"' for n in range(9)), '9\t"x" y', "10\tz"], 11, "z"),  # a bad row changes no other
        ([*(f'"{n}"\t"a"' for n in range(9)), '"9"\t"5" pipe"', '"10"\t"z"'], 11, "z"),
    ],
)
@pytest.mark.parametrize("before", [0, 12_000])
@pytest.mark.parametrize("suffix", ["tsv", "tsv.gz"])
def test_rows_with_quotes_of_a_tsv_tell_whether_they_enclose(
    tmp_path: Path, rows: list[str], count: int, text: str, before: int, suffix: str
) -> None:
    path = tmp_path / f"t.{suffix}"
    plain = [f"{n:x}-\tplain" for n in range(before)]
    data = "\n".join(["id\ttext", *plain, *rows, ""]).encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    (unit,) = plan([str(path)], ReadOptions(unit_samples=1 << 20)).units
    samples = list(read(unit, ()))
    assert (unit.samples, samples[-1].text) == (before + count, text)
    if not any(sample.error for sample in samples):
        assert verified(path, unit_samples=1 << 20) == before + count


def test_names_in_quotes_tell_that_quotes_enclose(tmp_path: Path) -> None:
    samples = csv_samples(tmp_path, b'"id"\t"text"\n1\t"5" pipe\n2\t"so\n', "t.tsv")
    assert [sample.error[0] for sample in samples if sample.error] == ["bad_csv", "bad_csv"]
    assert "in the row at byte 12 (lines: 1)" in str(samples[0].error)


def test_a_quote_that_nothing_closes_refuses_its_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embq.sources.formats.delimited_rows.LINES_MAX", 50)
    (tmp_path / "a.csv").write_text(
        "id,text\n" + "".join(f"{n},plain\n" for n in range(30)) + '30,"open\n' + "x,y\n" * 99
    )
    (tmp_path / "b.csv").write_text('id,text\n1,"a\n' + "b\n" * 40 + '"\n')
    broken, whole = plan([str(tmp_path)], ReadOptions(unit_samples=10)).units
    assert (broken.samples, whole.samples) == (None, 1)
    with pytest.raises(SourceError, match=r"not closed within 50 lines") as caught:
        list(read(broken, ()))
    assert (caught.value.code, "--quotes none" in caught.value.next_step) == ("table_damaged", True)
    (whole, *_) = plan([str(tmp_path / "a.csv")], ReadOptions(quotes="none")).units
    assert whole.samples == 130
    monkeypatch.setattr("embq.sources.formats.delimited_rows.FIELD_MAX_BYTES", 100)
    (broken,) = plan([str(tmp_path / "b.csv")], ReadOptions()).units
    assert broken.samples == 1
    (tmp_path / "c.csv").write_text('id,text\n1,"a\n' + "a long line\n" * 40 + '"\n')
    with pytest.raises(SourceError, match="not closed within"):
        list(read(*plan([str(tmp_path / "c.csv")], ReadOptions()).units, ()))


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl", "t.csv", "t.txt.gz", "t.csv.gz"])
@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("text\na red car\n".encode("utf-16"), "is UTF-16"),
        ("text\na red car\n".encode("utf-16-le"), "UTF-16 without a mark"),
        ("text\na red car\n".encode("utf-32"), "is UTF-32.*iconv -f UTF-32 "),
        ("text\na red car\n".encode("utf-32-le"), "UTF-32 without a mark; iconv -f UTF-32LE"),
        ("text\na red car\n".encode("utf-32-be"), "UTF-32 without a mark; iconv -f UTF-32BE"),
        ("text\n\u4f60\u597d\u8054\u901a\u4e16\u754c\n".encode("utf-32-le"), "iconv -f UTF-32LE"),
        ("text\n\u4f60\u597d\u8054\u901a\u4e16\u754c\n".encode("utf-32-be"), "iconv -f UTF-32BE"),
        (b"\xff\x00\x01\xe0\x00\x10JFIF\n\x02\n", "binary"),
        ("text\na red car\n".encode("utf-16-be"), "iconv -f UTF-16BE"),
        ("text\ncaf\u00e9\nplain\nna\u00efve \u00e9".encode("latin-1"), "text, but not UTF-8"),
        (
            "text\n\u4f60\u597d\n\u8054\u901a\n\u4e16\u754c\n".encode("gbk"),
            "text, but not UTF-8",
        ),  # the second is UTF-8
    ],
)
def test_a_file_that_is_no_utf8_fails_once_and_not_line_by_line(
    tmp_path: Path, name: str, data: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (tmp_path / f"good{name[1:]}").write_bytes(
        gzip.compress(b'"text"\n1\n') if name.endswith(".gz") else b'"text"\n1\n'
    )
    _, unit = plan([str(tmp_path)], ReadOptions()).units
    with pytest.raises(SourceError, match=says) as caught:
        list(read(unit, ()))
    assert caught.value.code == "source_damaged"
    assert "; iconv -f " in caught.value.message


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl", "t.csv", "t.tsv", "t.txt.gz", "t.csv.gz"])
def test_a_file_of_carriage_returns_alone_is_not_one_line(tmp_path: Path, name: str) -> None:
    data = b'{"text": "a"}\r{"text": "b"}\r' if "json" in name else b"text\ra red car\r\ra blue one\r"
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises((SourceError, InputError), match="end with a carriage return alone") as caught:
        list(read(*plan([str(tmp_path / name)], ReadOptions()).units, ()))
    assert "tr '\\r' '\\n'" in caught.value.next_step


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl", "t.csv", "t.tsv", "t.txt.gz"])
def test_a_zero_byte_is_a_character_wherever_it_stands(tmp_path: Path, name: str) -> None:
    lines = [f"a red car {n}" for n in range(300)]
    lines[1] = lines[299] = "a\0b"
    data = "".join(
        (json.dumps({"text": line}) if "json" in name else line) + "\n" for line in ["text", *lines]
    ).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (unit,) = plan([str(tmp_path / name)], ReadOptions()).units
    assert [sample.text for sample in read(unit, ())][-300:] == lines


@pytest.mark.parametrize("packed", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("data", "command"),
    [
        (json.dumps([{"text": "a"}, {"text": "b"}], indent=1), "jq -c '.[]' FILE"),
        ('[\n {"text": "a"},\n {"text": "b"}\n]\n', "jq -c '.[]' FILE"),
        (' [{"text": "a"},\r\n{"text": "b"}]', "jq -c '.[]' FILE"),
        ('[{"text": "a"}]', "jq -c '.[]' FILE"),
        (json.dumps({"text": "a"}, indent=2) + "\n" + json.dumps({"text": "b"}, indent=2) + "\n", "jq -c . FILE"),
        ('{"text": "a",\n "n": 1}\n', "jq -c . FILE"),
        ('{"text": "a"},\n{"text": "b"},\n', "sed 's/,[[:space:]]*$//' FILE"),
        ('{"text": "a"},\r\n{"text": "b"}\r\n', "sed 's/,[[:space:]]*$//' FILE"),
    ],
)
def test_json_of_another_form_fails_once_with_the_command_that_converts_it(
    tmp_path: Path, data: str, command: str, packed: Callable[[bytes], bytes]
) -> None:
    bad, good = (tmp_path / f"{name}.jsonl{'' if packed is bytes else '.gz'}" for name in ("bad", "good"))
    bad.write_bytes(packed(data.encode()))
    good.write_bytes(packed(b'{"text": "one"}\n'))
    with pytest.raises(SourceError) as caught:
        plan([str(bad)], ReadOptions())
    assert f"; {command} > NEW.jsonl converts it" in caught.value.message
    failing, whole = plan([str(tmp_path)], ReadOptions()).units
    assert (failing.samples, whole.samples) == (None, 1)
    with pytest.raises(SourceError) as again:
        list(read(failing, ()))
    assert (again.value.message, again.value.code) == (caught.value.message, "table_damaged")
    if shutil.which("jq") or not command.startswith("jq"):
        bad.write_text(data)
        subprocess.run(f"{command} > NEW.jsonl".replace("FILE", bad.name), shell=True, check=True, cwd=tmp_path)
        (unit,) = plan([str(tmp_path / "NEW.jsonl")], ReadOptions()).units
        assert all(sample.error is None for sample in read(unit, ()))


@pytest.mark.parametrize(
    "first", [b"[1]", b"[INFO] x", b'{"text": "a"', b'{"text": "a"} {"text": "b"}', b'{"a\nb": 1}']
)
def test_a_first_line_that_is_broken_costs_no_other(tmp_path: Path, first: bytes) -> None:
    (tmp_path / "t.jsonl").write_bytes(first + b'\n{"text": "one"}\n{"text": "two"}\n')
    (unit,) = plan([str(tmp_path / "t.jsonl")], ReadOptions()).units
    assert [sample.text for sample in read(unit, ()) if not sample.error] == ["one", "two"]


@pytest.mark.parametrize("name", ["t.txt", "t.csv"])
@pytest.mark.parametrize("rest", [b"plain\n", "na\u00efve\ncaf\u00e9\n".encode()])
def test_a_line_that_is_no_utf8_is_a_failure_alone(tmp_path: Path, name: str, rest: bytes) -> None:
    (tmp_path / name).write_bytes(b"text\n" + rest + b"caf\xe9\n" + rest)
    (unit,) = plan([str(tmp_path / name)], ReadOptions()).units
    assert [sample.error[0] for sample in read(unit, ()) if sample.error] == ["text_not_utf8"]


def test_a_file_of_ascii_with_some_lines_that_are_no_utf8_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes((b"plain\n" * 9 + b"caf\xe9\n") * 20)
    (unit,) = plan([str(tmp_path / "t.txt")], ReadOptions()).units
    assert [bool(sample.error) for sample in read(unit, ())] == ([False] * 9 + [True]) * 20


def test_a_column_that_one_csv_lacks_makes_its_units_fail(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"body,x\n1,1\n")
    (tmp_path / "b.csv").write_bytes(b"title,x\n2,2\n")
    first, second = plan([str(tmp_path)], ReadOptions(text_column="body")).units
    assert [s.text for s in read(first, ())] == ["1"]
    with pytest.raises(SourceError, match=r"b\.csv: no column 'body'; it has title \(text\), x \(text\)") as caught:
        list(read(second, ()))
    assert caught.value.code == "missing_column"


# --- compressed ---


@pytest.mark.parametrize("suffix", list(COMPRESS))
@pytest.mark.parametrize("name", ["t.txt", "t.jsonl", "t.csv"])
def test_a_compressed_text_gives_what_the_plain_one_gives(tmp_path: Path, suffix: str, name: str) -> None:
    rows = [f'{{"text": "line {n}"}}' if name == "t.jsonl" else f"line {n}" for n in range(100)]
    data = "\n".join((["text"] if name == "t.csv" else []) + rows).encode()
    (tmp_path / name).write_bytes(data)
    packed = tmp_path / f"{name}.{suffix}"
    packed.write_bytes(COMPRESS[suffix](data[:300]) + COMPRESS[suffix](data[300:]))
    plain = [s.text for s in samples_of(tmp_path / name, unit_samples=7)]
    assert plain == [f"line {n}" for n in range(100)]
    units = units_of(packed, unit_samples=7)
    assert [unit.samples for unit in units] == [7] * 14 + [2]
    for order in (units, units[::-1], units[1::2] + units[::2]):
        found = {s.key: s.text for unit in order for s in read(unit, ())}
        assert found == {f"{packed.name}:{n + 1}": text for n, text in enumerate(plain)}


@pytest.mark.parametrize("suffix", list(COMPRESS))
@pytest.mark.parametrize("name", ["t.txt", "t.jsonl", "t.csv"])
def test_a_compressed_text_that_is_cut_or_has_more_behind_its_end_fails_whole(
    tmp_path: Path, suffix: str, name: str
) -> None:
    path = tmp_path / f"{name}.{suffix}"
    whole = COMPRESS[suffix]("\n".join(f"line {n * n}" for n in range(500)).encode())
    for data in [*(whole[:cut] for cut in range(12, len(whole), 67)), whole[:-1], whole + b"more of it", whole + b"x"]:
        path.write_bytes(data)
        (unit,) = units_of(path, unit_samples=7)
        assert unit.samples is None
        with pytest.raises(SourceError) as caught:
            list(read(unit, ()))
        assert caught.value.code in ("source_truncated", "source_damaged")
        assert str(path) in caught.value.message


def test_a_compressed_file_is_decompressed_about_once_for_all_its_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.txt.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d\n" % n for n in range(10_000))))
    units = units_of(path, unit_samples=10)
    opened = 0
    original = sys.modules["embq.sources.formats.text_files"].TextCursor.__init__  # type: ignore[attr-defined]

    def counting(*arguments: Any) -> None:
        nonlocal opened
        opened += 1
        original(*arguments)

    monkeypatch.setattr("embq.sources.formats.text_files.TextCursor.__init__", counting)
    assert sum(len(list(read(unit, ()))) for unit in units) == 10_000
    assert opened == 1


def test_how_a_file_is_compressed_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"one\ntwo\n"))
    (tmp_path / "b.txt.gz").write_bytes(b"BZhe plain text\n" + "\u00e4".encode() * 1000)
    assert [s.text for s in samples_of(tmp_path / "a.txt")] == ["one", "two"]
    assert next(s.text for s in samples_of(tmp_path / "b.txt.gz")) == "BZhe plain text"


# --- verify ---


def test_verify_reads_all_of_them_a_second_time(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,"x\ny"\n2\n\n3,\n1,z\n,w\n"q"q,1\nlast,\xff\n')
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"text\n1\n\n2\n3\n4\n"))
    (tmp_path / "c.jsonl.zst").write_bytes(zstd.compress(b'{"text":"1","id":"a"}\n\n{"text":"2"}\n{"text":"3"}\n'))
    (tmp_path / "d.txt.xz").write_bytes(lzma.compress(b"1\n2\n\n4\n5\n"))
    (tmp_path / "e.txt.bz2").write_bytes(bz2.compress(b"1\n2\n3\n4\n"))
    inputs = [path for path in sorted(tmp_path.iterdir()) if path.is_file()]
    report = verify(build(tmp_path / "out", inputs))
    assert report.ok, report.violations
    assert report.rows + report.failures == 7 + 5 + 4 + 5 + 4
