"""What stands beside an image or a text: captions and metadata, in folders, shards and tables alike."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.core.units import Sample, Unit
from embq.producer.plan import first_columns, plan
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read
from tests.support.outputs.build import write_tar
from tests.support.second_reader.samples import reread

BROKEN = {
    "list.json": b"[1]",
    "number.json": b"3",
    "empty.json": b"",
    "cut.json": b'{"a": ',
    "latin.json": b'{"a": "caf\xe9"}',
}
"""Metadata that no reader can use, by name."""


def folder_of(root: Path, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        (root / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "in" / name).write_bytes(data)
    return str(root / "in")


def shard_of(root: Path, files: dict[str, bytes]) -> str:
    write_tar(root / "in.tar", list(files.items()))
    return str(root / "in.tar")


PACKED: dict[str, Callable[[Path, dict[str, bytes]], str]] = {"folder": folder_of, "shard": shard_of}


def units_of(path: str) -> list[Unit]:
    return list(plan([path], ReadOptions(), ["image"]).units)


def samples_of(path: str, *, texts: bool) -> dict[str, Sample]:
    """The samples by their key, without an extension."""
    return {os.path.splitext(one.key)[0]: one for unit in units_of(path) for one in read(unit, [], texts=texts)}


def code_of(problem: tuple[str, str] | None) -> str | None:
    return None if problem is None else problem[0]


@pytest.mark.parametrize("packed", list(PACKED))
def test_metadata_that_cannot_be_read_are_lost_and_no_sample_is(
    tmp_path: Path, packed: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = {f"{name.removesuffix('.json')}.jpg": name.encode() for name in (*BROKEN, "good.json")}
    texts = {f"{name.removesuffix('.json')}.txt": b"a caption" for name in BROKEN}
    path = PACKED[packed](tmp_path, {**files, **texts, **BROKEN, "good.json": b'{"a": 1}'})
    for wanted in (True, False):
        samples = samples_of(path, texts=wanted)
        assert {name: code_of(one.error) for name, one in samples.items()} == dict.fromkeys(samples)
        unread = {name: code_of(one.unread) for name, one in samples.items() if one.unread}
        assert unread == {name.removesuffix(".json"): "bad_metadata" for name in BROKEN}
        assert (samples["good"].metadata, samples["list"].text, samples["list"].metadata) == (
            '{"a":1}',
            "a caption",
            None,
        )
    columns, _ = first_columns(plan([path], ReadOptions(), ["image"]).units)
    assert [column.name for column in columns] == ["a"]
    (told,) = [record.message for record in caplog.records if record.message.startswith("metadata_unread")]
    assert f"samples={len(BROKEN)}" in told


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_a_field_of_a_row_that_cannot_be_read_is_lost_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"t.{kind}"
    rows = {
        "csv": b"text,n,name\na,1,caf\xe9\nb,2,ok\n",
        "tsv": b"text\tn\tname\na\t1\tcaf\xe9\nb\t2\tok\n",
        "jsonl": b'{"text": "a", "n": "1", "name": 1e999}\n{"text": "b", "n": "2", "name": "ok"}\n',
    }
    path.write_bytes(rows[kind])
    (unit,) = plan([str(path)], ReadOptions()).units
    samples = list(read(unit, []))
    assert [one.error for one in samples] == [None, None]
    kept = [{"n": "1", "name": None}, {"n": "2", "name": "ok"}]
    assert [json.loads(one.metadata or "") for one in samples] == kept
    assert [one.metadata for one in reread(unit, images=False)] == kept
    assert [code_of(one.unread) for one in samples] == [None if kind == "jsonl" else "bad_metadata", None]


@pytest.mark.parametrize("packed", [*PACKED, "parquet", "csv"])
def test_a_caption_that_is_not_utf8_costs_its_image_only_where_texts_are_embedded(tmp_path: Path, packed: str) -> None:
    if packed in PACKED:
        files = {"a.jpg": b"a", "b.jpg": b"b", "a.txt": b"caf\xe9", "b.txt": b"caf\xc3\xa9"}
        path = PACKED[packed](tmp_path, files)
    else:
        path = str(tmp_path / f"t.{packed}")
        folder_of(tmp_path, {"a.jpg": b"a", "b.jpg": b"b"})
        if packed == "csv":
            (tmp_path / "t.csv").write_bytes(
                b"id,image_path,caption\na,in/a.jpg,caf\xe9\n" + b"b,in/b.jpg,caf\xc3\xa9\n" * 1
            )
        else:
            captions = pa.array([b"caf\xe9", b"caf\xc3\xa9"])
            pq.write_table(pa.table({"id": ["a", "b"], "image": [b"a", b"b"], "caption": captions}), path)
    wanted, unwanted = samples_of(path, texts=True), samples_of(path, texts=False)
    assert (code_of(wanted["a"].error), code_of(wanted["b"].error)) == ("text_not_utf8", None)
    assert (unwanted["a"].error, code_of(unwanted["a"].unread)) == (None, "text_not_utf8")
    assert [(one.text, bytes(one.image or b"")) for one in unwanted.values()] == [(None, b"a"), ("caf\u00e9", b"b")]


NAMES = {
    "as it is": "sub/cafe\u0301 0.jpg",
    "backslash": "sub\\cafe\u0301 0.jpg",
    "dot": "./sub/cafe\u0301 0.jpg",
    "composed": "sub/caf\u00e9 0.jpg",
    "all": ".\\sub\\caf\u00e9 0.jpg",
}
"""Spellings of one path, whose accent is apart from its letter in the folder, as macOS writes it."""


def write_metadata(path: Path, rows: list[dict[str, str]]) -> None:
    """`path` is metadata.jsonl, metadata.parquet, or metadata.csv with the delimiter behind a #."""
    name, _, delimiter = path.name.partition("#")
    path = path.with_name(name)
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith(".jsonl"):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        lines = [list(rows[0]), *(row.values() for row in rows)]
        path.write_text("\ufeff" + "".join(f"{delimiter.join(line)}\r\n" for line in lines))


METADATA = [
    "metadata.csv#,",
    "metadata.csv#;",
    "metadata.csv#\t",
    "metadata.csv#|",
    "metadata.jsonl",
    "metadata.parquet",
]


@pytest.mark.parametrize("name", METADATA)
def test_a_row_finds_its_image_in_every_spelling_of_its_path(tmp_path: Path, name: str) -> None:
    for spelling, path in NAMES.items():
        folder = folder_of(tmp_path / spelling, {"sub/cafe\u0301 0.jpg": b"0"})
        write_metadata(Path(folder) / name, [{"label": "x", "file_name": path, "caption": spelling}])
        planned = plan([folder], ReadOptions(), ["image"])
        (unit,) = planned.units
        (sample,) = read(unit, [])
        assert (sample.text, json.loads(sample.metadata or "")) == (spelling, {"label": "x"})
        assert [(one.text, one.metadata) for one in reread(unit, images=False)] == [(spelling, {"label": "x"})]
        assert [column.name for column in first_columns(iter([unit]))[0]] == ["label"]
        assert planned.warnings == ()


@pytest.mark.parametrize("name", METADATA)
def test_rows_without_an_image_and_images_without_a_row_are_told(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, {f"{number}.jpg": b"0" for number in range(5)} | {"own/5.jpg": b"5"})
    file = Path(folder) / name.partition("#")[0]
    write_metadata(Path(folder) / name, [{"file_name": f"{n}.jpg", "text": "t"} for n in (1, 2, 7)])
    write_metadata(Path(folder) / "own" / name, [{"file_name": "own/5.jpg", "text": "t"}])
    own = file.parent / "own" / file.name
    (tmp_path / "link").symlink_to(folder)
    linked = [
        line.replace(str(tmp_path / "link"), folder) for line in plan([str(tmp_path / "link")], ReadOptions()).warnings
    ]
    assert (
        tuple(linked)
        == plan([folder], ReadOptions(), ["image"]).warnings
        == (
            f"{file}: rows that name no image: 1 of 3; images without a row: 3",
            f"{own}: rows that name no image: 1 of 1, such as 'own/5.jpg'; images without a row: 1",
        )
    )


def test_a_metadata_table_that_cannot_be_read_or_is_of_another_kind_costs_no_image(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"a.jpg": b"a", "metadata.parquet": b"PAR1 and no more"})
    (sample,) = samples_of(folder, texts=False).values()
    assert (sample.error, code_of(sample.unread)) == (None, "bad_metadata")
    for table in ({"image": ["a.jpg"]}, {"file_name": [None]}, {"file_name": [7]}):
        pq.write_table(pa.table(table), f"{folder}/metadata.parquet")
        (sample,) = samples_of(folder, texts=True).values()
        assert (sample.text, sample.metadata, sample.error) == (None, None, None)
    twice = {"file_name": ["a.jpg", "a.jpg"], "image": ["a.jpg", "b.jpg"], "text": ["first", "second"], "n": [1, 2]}
    pq.write_table(pa.table(twice), f"{folder}/metadata.parquet")
    (sample,) = samples_of(folder, texts=True).values()
    assert (sample.text, json.loads(sample.metadata or "")) == ("first", {"n": 1})


@pytest.mark.parametrize("packed", list(PACKED))
@pytest.mark.parametrize(("caption", "metadata"), [("txt", "json"), ("TXT", "JSON"), ("Txt", "Json")])
def test_extensions_of_sidecars_count_in_small_and_capital_letters(
    tmp_path: Path, packed: str, caption: str, metadata: str
) -> None:
    files = {"IMG_1.JPG": b"1", f"IMG_1.{caption}": b"x", f"IMG_1.{metadata}": b'{"n": 1}'}
    path = PACKED[packed](tmp_path, files)
    planned = plan([path], ReadOptions(), ["image", "text"])
    (unit,) = planned.units
    (sample,) = read(unit, [])
    assert (sample.text, sample.metadata, sample.error) == ("x", '{"n":1}', None)
    assert [(one.text, one.metadata) for one in reread(unit, images=False)] == [("x", {"n": 1})]
    assert [column.name for column in first_columns(iter([unit]))[0]] == ["n"]
    assert "no image" not in planned.listing


SYSTEM_FILES = [
    *("@eaDir/0{}/SYNO{}", "sub/@eaDir/0{}", "__MACOSX/0{}", "__MACOSX/sub/._0{}", "sub/._0{}", "$RECYCLE.BIN/$R0{}"),
    *("lost+found/0{}", "System Volume Information/0{}", "#recycle/0{}", "sub/Thumbs.db", "Thumbs.db", "desktop.ini"),
    *("sub/.DS_Store", "a.b/._c{}"),
]


@pytest.mark.parametrize("kind", ["jpg", "txt", "jsonl", "csv", "parquet", "tar", "in a shard"])
def test_files_of_systems_are_no_samples(tmp_path: Path, kind: str) -> None:
    ending = "jpg" if kind == "in a shard" else kind
    data = b'{"text": "x"}\n' if kind == "jsonl" else b"text,n\nx,1\n"
    files = {name.replace("{}", f".{ending}"): data for name in ("0{}", "sub/1{}", *SYSTEM_FILES)}
    if kind == "in a shard":
        (unit,) = units_of(shard_of(tmp_path, files))
        assert [one.key for one in read(unit, [])] == ["0", "sub/1"]
        assert [one.key for one in reread(unit, images=False)] == ["0", "sub/1"]
        return
    if kind == "parquet":
        pq.write_table(pa.table({"text": ["x"]}), tmp_path / "x.parquet")
        files = dict.fromkeys(files, (tmp_path / "x.parquet").read_bytes())
    folder = folder_of(tmp_path, files)
    planned = plan([folder], ReadOptions())
    found = [name for unit in planned.units for name in ([item[0] for item in unit.items] or [unit.source])]
    assert [os.path.relpath(os.path.join(folder, name), folder) for name in found] == [f"0.{kind}", f"sub/1.{kind}"]
    assert "of the system" in planned.listing
    if kind != "jpg":
        globbed = plan([f"{folder}/**/*.{kind}"], ReadOptions())
        assert [os.path.relpath(unit.source, folder) for unit in globbed.units] == [f"0.{kind}", f"sub/1.{kind}"]
    with_their_own = plan([f"{folder}/__MACOSX"], ReadOptions())
    assert len(list(with_their_own.units)) == 1
