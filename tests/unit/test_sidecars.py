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
