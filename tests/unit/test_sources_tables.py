"""Parquet and Arrow tables: which column is taken, what a bad row or file becomes, and that verify reads the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

import embq.sources.rows
from embq.core.errors import InputError, SourceError
from embq.core.rows.arrow_messages import CONTINUATION
from embq.core.units import Unit
from embq.producer.plan import plan
from embq.sources.kinds import SOURCES, detect
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read, read_here
from tests.support.outputs.build import build
from tests.support.planning import code, samples_of, units_of
from tests.support.second_reader.checks import verify
from tests.support.second_reader.samples import reread


def write(path: Path, **columns: Any) -> Path:
    """A table as the kind of file that the name says; .arrows is a stream."""
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=4)
    else:
        new = ipc.new_stream if path.suffix == ".arrows" else ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    return path


def failure(path: Path, **options: Any) -> SourceError:
    """Failure of every unit of a file."""
    units = units_of(path, **options)
    found = []
    for unit in units:
        with pytest.raises(SourceError) as caught:
            list(read(unit, ()))
        found.append(caught.value)
    assert len({error.code for error in found}) == 1
    assert str(path) in found[0].message
    return found[0]


SUFFIXES = pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows"])


@SUFFIXES
def test_units_of_long_rows_are_known_from_those_of_short_ones_before_they_are_read(
    tmp_path: Path, suffix: str
) -> None:
    path = write(tmp_path / f"t.{suffix}", text=[f"{n:04d}" for n in range(8)] + [f"{n:04d}" * 1000 for n in range(8)])
    sizes = [unit.size for unit in units_of(path, unit_samples=3)]
    assert len(sizes) == 6
    assert 0 < sizes[0] < sizes[2] < sizes[3] < 1.1 * sizes[4]
    (whole,) = units_of(path, unit_samples=100)
    assert abs(whole.size - sum(sizes)) < 10
    assert whole.unit_id == Unit.from_description(whole.describe()).unit_id, "it is no part of what a unit says"


@SUFFIXES
@pytest.mark.parametrize("most", [1, 3, 4, 10, 1000])
def test_every_slice_has_its_rows_in_whatever_order_units_are_read(tmp_path: Path, suffix: str, most: int) -> None:
    path = write(tmp_path / f"t.{suffix}", text=[f"text {n}" for n in range(10)], n=range(10))
    units = units_of(path, unit_samples=most, metadata_columns=("n",))
    assert [unit.first for unit in units] == list(range(0, 10, most))
    for order in (units, units[::-1], units[::2] + units[1::2]):
        found = {sample.key: (sample.text, sample.metadata) for unit in order for sample in read(unit, ())}
        assert found == {f"t.{suffix}:{n + 1}": (f"text {n}", f'{{"n":{n}}}') for n in range(10)}


@pytest.mark.parametrize("suffix", ["arrow", "arrows"])
@pytest.mark.parametrize("has_dictionary", [False, True])
def test_messages_without_the_marker_that_arrow_has_had_since_0_15_are_read(
    tmp_path: Path, suffix: str, has_dictionary: bool
) -> None:
    texts = pa.array([f"text {n % 7}" for n in range(20)])
    table = pa.table({"text": texts.dictionary_encode() if has_dictionary else texts, "n": range(20)})
    samples = []
    for name, is_legacy in (("old", True), ("new", False)):
        path = tmp_path / name / f"t.{suffix}"
        path.parent.mkdir()
        new = ipc.new_stream if suffix == "arrows" else ipc.new_file
        with new(path, table.schema, options=ipc.IpcWriteOptions(use_legacy_format=is_legacy)) as writer:
            writer.write_table(table, max_chunksize=4)
        assert (CONTINUATION in path.read_bytes()) != is_legacy
        units = units_of(path, unit_samples=6, metadata_columns=("n",))
        samples.append([(one.key, one.text, one.metadata) for unit in units[::-1] for one in read(unit, ())])
        cut = path.with_name(f"cut.{suffix}")
        cut.write_bytes(path.read_bytes()[:-5])
        assert failure(cut).code == "table_damaged"
    assert samples[0] == samples[1]
    assert {text for _, text, _ in samples[0]} == {f"text {n}" for n in range(7)}
    assert len(samples[0]) == 20


@pytest.mark.parametrize(
    ("columns", "options", "text", "image", "key"),
    [
        ({"title": ["x"], "text": ["x"]}, {}, "text", "", ""),
        ({"TEXT": ["x"], "URL": ["u"]}, {}, "TEXT", "", ""),
        ({"sentence": ["x"], "n": [1]}, {}, "sentence", "", ""),
        ({"sentence": ["x"], "id": ["i"]}, {}, "sentence", "", "id"),
        ({"caption": ["x"], "text": ["x"], "key": [1]}, {}, "text", "", "key"),
        ({"caption": ["x"], "image": [b"i"]}, {}, "caption", "image", ""),
        ({"caption": ["x"], "hash": [b"i"]}, {}, "caption", "", ""),
        ({"jpg": [b"i"], "png": [b"i"]}, {}, "", "jpg", ""),
        ({"blob": [b"i"], "label": ["x"], "split": ["x"]}, {}, "", "blob", ""),
        ({"photo": [{"bytes": b"i", "path": "p"}], "other": [b"b"]}, {}, "", "photo", ""),
        ({"image_path": ["a.jpg"], "caption": ["x"]}, {}, "caption", "image_path", ""),
        ({"a": ["x"], "b": ["x"]}, {"text_column": "b"}, "b", "", ""),
        ({"a": ["x"], "b": ["x"], "c": [b"i"]}, {"text_column": "b", "image_column": "c"}, "b", "c", ""),
        ({"id": ["x"], "sku": ["y"], "text": ["z"]}, {"id_column": "sku"}, "text", "", "sku"),
        ({"id": ["x"], "text": [b"z"]}, {}, "text", "", "id"),
        ({"id": ["x"], "words": [b"z"]}, {"text_column": "words"}, "words", "", "id"),
        ({"caption": [b"z"], "image": [b"i"], "sku": ["y"]}, {"id_column": "sku"}, "caption", "image", "sku"),
    ],
)
def test_columns_are_found_by_name_and_type(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, str], text: str, image: str, key: str
) -> None:
    (tmp_path / "a.jpg").write_bytes(b"i")
    path = write(tmp_path / "t.parquet", **columns)
    (sample,) = samples_of(path, **options)
    assert code(sample) is None
    values = {name: one.decode() if isinstance(one, bytes) else one for name, (one, *_) in columns.items()}
    assert sample.text == (values[text] if text else None)
    assert sample.image == (b"i" if image else None)
    assert sample.key == (str(values[key]) if key else "t.parquet:1")
    (unit,) = SOURCES["parquet"].split(str(path), ReadOptions(**options))  # type: ignore[arg-type]
    assert [(one.key, one.text) for one in reread(unit, images=False)] == [(sample.key, sample.text)]
    held = SOURCES["parquet"].holds(str(path), ReadOptions(**options))  # type: ignore[arg-type]
    assert held == (("image",) if image else ()) + (("text",) if text else ())


@pytest.mark.parametrize(
    ("columns", "options", "expected", "says"),
    [
        ({"a": ["x"], "b": ["x"]}, {}, "ambiguous_column", "a (string), b (string)"),
        ({"a": [b"x"], "b": [b"x"]}, {}, "ambiguous_column", "a (binary), b (binary)"),
        ({"n": [1]}, {}, "missing_column", "it has n (int64)"),
        ({"text": ["x"]}, {"text_column": "txet"}, "missing_column", "no column 'txet'; it has text (string)"),
        ({"text": ["x"]}, {"metadata_columns": ("n",)}, "missing_column", "no column 'n'"),
        ({"text": [1], "b": ["x"]}, {"text_column": "text"}, "wrong_column_type", "int64; usable: b (string)"),
        ({"text": ["x"], "m": [b"x"]}, {"metadata_columns": ("m",)}, "wrong_column_type", "binary"),
    ],
)
def test_what_cannot_be_chosen_is_said_with_names_and_types(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], expected: str, says: str
) -> None:
    path = write(tmp_path / "t.parquet", **columns)
    error = failure(path, **options)
    assert error.code == expected
    assert says in error.message
    with pytest.raises(InputError) as planned:
        plan([str(path)], ReadOptions(**options))
    assert planned.value.code == expected
    assert planned.value.next_step


def test_one_file_of_many_that_lacks_the_column_fails_and_the_others_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(5):
        write(tmp_path / f"{n}.parquet", **{"body" if n != 3 else "title": ["x", "y"], "other": ["1", "2"]})
    planned = plan([str(tmp_path)], ReadOptions(text_column="body"))
    units = list(planned.units)
    assert "table_unusable" in caplog.text
    assert [len(list(read(unit, ()))) for unit in units if "3.parquet" not in unit.source] == [2, 2, 2, 2]
    error = failure(tmp_path / "3.parquet", text_column="body")
    assert error.code == "missing_column"
    assert "title (string)" in error.message


def test_ids_beside_other_columns_are_never_taken_for_the_texts(tmp_path: Path) -> None:
    assert failure(write(tmp_path / "a.parquet", id=["x"], n=[1])).code == "missing_column"
    assert [s.text for s in samples_of(write(tmp_path / "b.parquet", id=["x"]))] == ["x"]


def test_files_may_differ_in_what_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", text=["x"], n=[1])
    write(tmp_path / "b.parquet", n=["other type"], text=pa.array(["y"], pa.large_string()))
    write(tmp_path / "c.parquet", text=pa.array(["z"]).dictionary_encode())
    planned = plan([str(tmp_path)], ReadOptions())
    assert [sample.text for unit in planned.units for sample in read(unit, ())] == ["x", "y", "z"]
    assert planned.modalities == ("text",)


@SUFFIXES
def test_an_odd_value_is_one_failure(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embq.sources.rows, "SAMPLE_MAX_BYTES", 100)
    broken = pa.array([b"caf\xe9"]).cast(pa.binary()).view(pa.string())
    values = pa.concat_arrays([pa.array(["ok", None, "", " \n", "x" * 101]), broken, pa.array(["twice", "twice"])])
    path = write(tmp_path / f"t.{suffix}", text=values, id=["a", "b", "c", "d", None, "f", "g", "g"])
    samples = [sample for unit in units_of(path) for sample in read_here(unit, ())]
    assert [(s.key, code(s)) for s in samples] == [
        ("a", None),
        ("b", "missing_text"),
        ("c", "empty_text"),
        ("d", "empty_text"),
        (f"t.{suffix}:5", "too_large"),
        ("f", "text_not_utf8"),
        ("g", None),
        ("g", "duplicate_key"),
    ]
    assert [code(s) for s in samples_of(path, id_column="id")][4] == "missing_id"


def test_a_null_caption_or_image_leaves_the_other(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", caption=["x", None, "z"], image=[b"1", b"2", None])
    assert [(s.text, s.image, code(s)) for s in samples_of(path)] == [
        ("x", b"1", None),
        (None, b"2", None),
        ("z", None, None),
    ]


def test_metadata_is_json_whatever_the_type(tmp_path: Path) -> None:
    import datetime
    import decimal

    path = write(
        tmp_path / "t.parquet",
        text=["x", "y"],
        when=[datetime.datetime(2024, 1, 2, 3, 4, 5), None],
        price=[decimal.Decimal("1.50"), None],
        score=[float("nan"), 1.5],
        deep=[{"a": [1, None]}, None],
        blob=[{"b": b"x"}, {"b": None}],
    )
    first, second = samples_of(path, metadata_columns=("when", "price", "score", "deep"))
    assert json.loads(first.metadata or "") == {
        "when": "2024-01-02 03:04:05.000000",
        "price": "1.50",
        "score": None,
        "deep": {"a": [1, None]},
    }
    assert json.loads(second.metadata or "") == {"when": None, "price": None, "score": 1.5, "deep": None}
    lost, whole = samples_of(path, metadata_columns=("blob", "price"))
    assert (code(lost), code(whole), whole.unread) == (None, None, None)
    assert (lost.unread or ("",))[0] == "bad_metadata"
    assert json.loads(lost.metadata or "") == {"blob": None, "price": "1.50"}


def test_the_path_of_an_image_may_not_leave_the_folder_of_its_table(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.jpg").write_bytes(b"a")
    (tmp_path / "secret.jpg").write_bytes(b"s")
    (folder / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    links = [
        "deep/a.jpg",
        str(folder / "deep" / "a.jpg"),
        "../secret.jpg",
        str(tmp_path / "secret.jpg"),
        "link.jpg",
        "gone.jpg",
        "deep",
        "a\0b",
        "file:///etc/passwd",
        None,
    ]
    samples = samples_of(write(folder / "t.parquet", image_path=links))
    assert [(s.image, code(s)) for s in samples] == [
        (b"a", None),
        (b"a", None),
        (None, "outside_root"),
        (None, "outside_root"),
        (None, "outside_root"),
        (None, "source_missing"),
        (None, "unsupported_member"),
        (None, "source_missing"),
        (None, "outside_root"),
        (None, None),
    ]


def test_an_image_struct_without_bytes_is_read_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"a")
    images = [{"bytes": b"1", "path": "gone.jpg"}, {"bytes": None, "path": "a.jpg"}, None]
    assert [s.image for s in samples_of(write(tmp_path / "t.parquet", image=images))] == [b"1", b"a", None]


def test_a_dataset_that_was_saved_is_read_by_its_own_list(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    for split, count in (("train", 2), ("test", 1)):
        (root / split).mkdir(parents=True)
        names = [f"data-{n:05d}-of-{count:05d}.arrow" for n in range(count)]
        for n, name in enumerate(names):
            made = write(root / split / f"{n}.arrows", text=[f"{split} {n} {row}" for row in range(5)])
            made.rename(root / split / name)
        (root / split / "cache-1234.arrow").write_bytes(b"not part of it")
        (root / split / "dataset_info.json").write_text("{}")
        (root / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    texts = [s.text for unit in plan([str(root)], ReadOptions()).units for s in read(unit, ())]
    assert texts == [f"{split} {n} {row}" for split, n in (("train", 0), ("train", 1), ("test", 0)) for row in range(5)]
    assert len(detect(str(root / "test"))) == 1
    (root / "test" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../../etc/passwd"}]}))
    with pytest.raises(InputError, match="no file of this folder"):
        detect(str(root))


def test_images_or_texts_are_wanted_of_a_table_that_has_none(tmp_path: Path) -> None:
    texts = write(tmp_path / "texts.parquet", text=["x"])
    images = write(tmp_path / "images.arrow", image=[b"x"])
    with pytest.raises(InputError, match="holds texts only"):
        plan([str(texts)], ReadOptions(), ["image"])
    with pytest.raises(InputError, match="no column that is known to hold texts"):
        plan([str(images)], ReadOptions(), ["text"])
    assert plan([str(images)], ReadOptions()).modalities == ("image",)


@SUFFIXES
def test_verify_reads_every_row_a_second_time(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "a.jpg").write_bytes(b"by path")
    path = write(
        tmp_path / f"t.{suffix}",
        caption=["c", None, "e", "", "g", "h", "i"],
        image=[{"bytes": b"1", "path": None}, {"bytes": None, "path": "a.jpg"}, *[{"bytes": b"3", "path": "x"}] * 5],
        id=[3, 1, 2, None, 3, 6, 6],
    )
    for name, modalities in (("image", ()), ("both", ("image", "text"))):
        report = verify(build(tmp_path / name, [path], modalities=modalities))
        assert report.ok, report.violations
        assert report.rows + report.failures == 7
    path = write(tmp_path / f"u.{suffix}", text=["c", None, "e", " ", "g"])
    report = verify(build(tmp_path / "texts", [path]))
    assert report.ok, report.violations
    assert (report.rows, report.failures) == (3, 2)
