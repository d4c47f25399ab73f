"""Rows that resident services make of inputs: kinds, sizes, formats, types of vectors, several models, metadata.

One producer, writer and machine of workers do all runs of this file. Starting, stopping and watching them is the
subject of other files.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.core.broker.embedded import EmbeddedServer
from embq.core.rows.spec import FORMATS
from embq.core.run.reader import row_tables
from embq.core.run.run_info import load_run
from embq.worker.embedders.stub import stub_digest, stub_vectors
from tests.e2e.check import check_complete
from tests.e2e.plain import READERS, Columns, read_joined_hdf5
from tests.e2e.services import Services
from tests.e2e.session import called, closed, picture, succeed, write_shards, write_tar, write_texts
from tests.support.outputs.build import build

DIM = 16


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    """Services that stay up for the tests of this file."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="embq-t")))
        yield Services(stack, stack.enter_context(EmbeddedServer(folder / "b")))


@pytest.fixture(autouse=True)
def _no_service_logs_a_traceback(services: Services) -> Iterator[None]:
    yield
    for service in services.services.values():
        assert service.process.poll() is None, service.said
        assert "Traceback" not in service.stderr, service.said


def embed(services: Services, root: Path, *arguments: str | Path, status: int = 0) -> dict[str, Any]:
    """Have a run done, whose command would exit with `status`; gives what `embq status --json` prints."""
    succeed("enqueue", *arguments, "-o", root, environment={"EMBQ_BROKER_URL": services.environment["EMBQ_BROKER_URL"]})
    services.until(lambda: closed(root))
    assert called("resume", root)[0] == status
    shape: dict[str, Any] = json.loads(succeed("status", root, "--json"))
    assert (shape["state"], shape["eta_s"]) == ("done", 0)
    return shape


# --- kinds of input ---


def test_images_and_captions_of_shards_become_two_embeddings_of_one_row(services: Services, short_tmp: Path) -> None:
    images = write_shards(short_tmp / "shards", 3, 20, captions=True)
    expected = {key: (image, f"caption of {key}".encode()) for key, image in images.items()}
    root = short_tmp / "out"
    braces = str(short_tmp / "shards" / "{00000..00002}.tar")
    told = embed(services, root, braces, "-m", f"stub:{DIM}", "--modality", "image,text", "--dtype", "float32")
    output = check_complete(root, expected, units=3, dim=DIM, columns=("image_embedding", "text_embedding"))
    assert output.rows is not None
    assert str(output.rows.schema.field("image_embedding").type) == f"fixed_size_list<element: float>[{DIM}]"
    assert output.rows["caption"].to_pylist() == [f"caption of {key}" for key in output.keys]
    assert told["rows"] == 60


def test_captions_of_shards_and_a_folder_and_lines_of_texts_go_into_one_run(
    services: Services, short_tmp: Path
) -> None:
    images = write_shards(short_tmp / "shards", 2, 10, captions=True)
    expected = {key: f"caption of {key}".encode() for key in images}
    expected |= write_texts(short_tmp / "texts.jsonl", 30)
    folder = short_tmp / "photos"
    (folder / "more").mkdir(parents=True)
    for name in ("a", "more/b"):
        (folder / f"{name}.png").write_bytes(name.encode())
        (folder / f"{name}.txt").write_text(f"beside {name}")
        expected[f"{name}.png"] = f"beside {name}".encode()
    (short_tmp / "lines.txt").write_text("one line\nand another\n")
    expected |= {"lines.txt:1": b"one line", "lines.txt:2": b"and another"}
    inputs = [short_tmp / "shards", folder, short_tmp / "texts.jsonl", short_tmp / "lines.txt"]
    root = short_tmp / "out"
    embed(services, root, *inputs, "-m", f"stub:{DIM}", "--modality", "text", "--unit-size", "10")
    check_complete(root, expected, units=2 + 1 + 3 + 1, dim=DIM)
    succeed("verify", root)


def test_shards_of_very_different_sizes_come_out_whole(services: Services, short_tmp: Path) -> None:
    expected = {}
    for shard, samples in enumerate((1, 500, 3, 120)):
        members = [(f"{shard}_{n}.jpg", f"{shard}/{n}".encode()) for n in range(samples)]
        write_tar(short_tmp / f"{shard}.tar", members)
        expected |= {name.removesuffix(".jpg"): data for name, data in members}
    root = short_tmp / "out"
    embed(services, root, short_tmp / "*.tar", "-m", f"stub:{DIM}", "--write-batch-size", "200")
    output = check_complete(root, expected, units=4, dim=DIM)
    assert len(list((root / "parts").iterdir())) >= 2
    assert output.rows is not None


# --- several models ---


def test_two_models_embed_the_images_and_captions_of_one_run(services: Services, short_tmp: Path) -> None:
    images = write_shards(short_tmp / "shards", 2, 20, captions=True)
    write_tar(short_tmp / "shards" / "00002.tar", [("lonely.jpg", b"an image without caption")])
    wide = {key: (image, f"caption of {key}".encode()) for key, image in images.items()}
    root = short_tmp / "out"
    models = ("--model", "wide=stub:32", "--model", "narrow=stub:8?batch_size=7")
    told = embed(services, root, short_tmp / "shards", *models, "--modality", "image,text", status=3)
    for name, dim in (("wide", 32), ("narrow", 8)):
        columns = (f"{name}_image_embedding", f"{name}_text_embedding")
        check_complete(root, wide, units=3, dim=dim, columns=columns, failures={"lonely": "missing_member"})

    (group,) = json.loads(succeed("failures", root, "--json"))["groups"]
    (example,) = group["examples"]
    endings = "its members end in jpg: --caption-key names another ending"
    assert example["message"] == f"wide: the sample has no text; {endings}"
    assert json.loads(succeed("verify", root, "--json"))["vectors_recomputed"] == len(images)
    assert told["model"] == "wide=stub:32 + narrow=stub:8?batch_size=7"
    # The same models under other names are another run.
    said = called(
        "run", short_tmp / "shards", "-o", root, "--model", "a=stub:32", *models[2:], "--modality", "image,text"
    )
    assert (said[0], "other_run" in said[2]) == (65, True)


# --- what is stored of vectors ---


@pytest.mark.parametrize(
    ("options", "of", "width"),
    [
        (["--dtype", "int8", "--truncate-dim", "16", "--int8-range", "0.5"], pa.int8(), 16),
        (["--dtype", "binary", "--no-normalize"], pa.uint8(), 4),
    ],
    ids=["int8", "binary"],
)
def test_a_run_stores_vectors_as_asked_and_verifies(
    services: Services, short_tmp: Path, options: list[str], of: pa.DataType, width: int
) -> None:
    write_shards(short_tmp / "in", 2, 20, captions=True)
    root = short_tmp / "out"
    asked = [short_tmp / "in", "-m", "stub:32", "--modality", "image,text", "--similarity"]
    embed(services, root, *asked, *options)
    (part,) = (root / "parts").iterdir()
    table = pq.read_table(part)
    assert table.num_rows == 40
    types = [table.schema.field(f"{name}_embedding").type for name in ("image", "text")]
    assert [(type_.value_type, type_.list_size) for type_ in types] == [(of, width)] * 2
    assert table["image_text_similarity"].type == pa.float32()
    assert table.schema.metadata[b"embq.dtype"] == options[1].encode()
    report = json.loads(succeed("verify", root, "--json"))
    assert (report["ok"], report["rows"], report["vectors_recomputed"]) == (True, 40, 40)
    status, _, said = called("run", *asked, "-o", root)
    assert (status, "other_run" in said) == (65, True), said


# --- formats ---

ROWS, FORMAT_DIM = 20_000, 64


def write_input(path: Path) -> list[dict[str, object]]:
    """Lines with an id, a text and metadata, which some of them lack."""
    lines = [
        {"id": f"k{i:05d}-\u00e5", "text": f"text {i} \u2603", "n": i * 3, "lang": None if i % 7 == 0 else f"l{i % 5}"}
        for i in range(ROWS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return lines


def compare(found: Columns, lines: list[dict[str, object]]) -> None:
    """Every line is a row, under its key, with its own vector and values; ids count rows in order."""
    assert found["id"] == list(range(len(lines)))
    place = {line["id"]: i for i, line in enumerate(lines)}
    order = [place[key] for key in found["key"]]
    assert sorted(order) == list(range(len(lines)))
    assert found["caption"] == [lines[i]["text"] for i in order]
    assert found["n"] == [lines[i]["n"] for i in order]
    assert found["lang"] == [lines[i]["lang"] for i in order]
    assert found["metadata"] == [None] * len(lines)
    texts = [str(lines[i]["text"]).encode() for i in order]
    wanted = stub_vectors([stub_digest(text, FORMAT_DIM) for text in texts], FORMAT_DIM).astype(np.float16)
    assert found["embedding"].dtype == np.float16
    assert np.array_equal(found["embedding"], wanted)


def _often(format: str) -> object:
    """npy and Arrow seldom: tests/contract/test_stores.py reads all four back by their libraries, if not whole runs."""
    return pytest.param(format, marks=pytest.mark.slow if format in ("npy", "arrow") else ())


@pytest.mark.parametrize("format", [_often(format) for format in FORMATS])
def test_twenty_thousand_rows_come_back_by_the_plain_library_alone(
    services: Services, short_tmp: Path, format: str
) -> None:
    root, texts = short_tmp / "out", short_tmp / "texts.jsonl"
    lines = write_input(texts)
    options = ["--unit-size", "1000", "--write-batch-size", "6000", "--output-format", format]
    embed(services, root, texts, "-m", f"stub:{FORMAT_DIM}", *options)
    compare(READERS[format](root), lines)
    if format == "hdf5":
        compare(read_joined_hdf5(root), lines)


# --- metadata ---

LINES = 240
COLUMNS = {"n": "int64", "score": "float64", "kind": "string", "size.w": "int64", "tags": "json"}


def metadata(number: int) -> dict[str, Any]:
    """Fields with the same types in the first hundred lines, and with others in later ones."""
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


def test_fields_that_change_their_type_keep_the_schema_and_lose_nothing(services: Services, short_tmp: Path) -> None:
    source = short_tmp / "in.jsonl"
    lines = [{"id": f"k{number}", "text": f"text {number}", **metadata(number)} for number in range(LINES)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    embed(services, short_tmp / "two", source, "-m", "stub:8", "--unit-size", "10", "--write-batch-size", "50")
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
