"""Planning: from the inputs that a user names to the units of a run."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from embq.core.errors import InputError, UsageError
from embq.core.units import Unit
from embq.producer.file_names import distinct_names
from embq.producer.plan import Plan, first_columns, plan
from embq.producer.selection import Selection
from embq.sources.access.urls import SCHEMES, check_source, is_http, names_host
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read
from tests.e2e.session import write_tar
from tests.support.second_reader.samples import reread


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x\ny\n")


def plan_of(*inputs: str | Path, modalities: Sequence[str] = (), unit_samples: int = 1000) -> Plan:
    return plan([str(path) for path in inputs], ReadOptions(unit_samples=unit_samples), modalities)


def sources_of(planned: Plan, root: Path) -> list[str]:
    return [os.path.relpath(unit.source, root) for unit in planned.units]


def test_braces_name_shards_in_order(tmp_path: Path) -> None:
    touch(tmp_path, *(f"{number:05d}.tar" for number in range(12)))
    planned = plan_of(tmp_path / "{00000..00011}.tar")
    assert sources_of(planned, tmp_path) == [f"{number:05d}.tar" for number in range(12)]
    assert (planned.modalities, planned.warnings) == (("image",), ())


def test_patterns_are_sorted_and_may_follow_braces_and_go_deep(tmp_path: Path) -> None:
    touch(tmp_path, "a/2.tar", "a/1.tar", "b/1.tar", "c/d/9.tar")
    assert sources_of(plan_of(tmp_path / "{b,a}" / "*.tar"), tmp_path) == ["b/1.tar", "a/1.tar", "a/2.tar"]
    assert sources_of(plan_of(tmp_path / "**" / "9.tar"), tmp_path) == ["c/d/9.tar"]


def test_hidden_files_and_output_folders_are_no_inputs_and_are_counted(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.jpg", "in/._a.jpg", "in/.thumbnails/a.jpg", "in/b/.ipynb_checkpoints/a.jpg", "in/x.md")
    touch(tmp_path, *(f"in/out/{name}" for name in ("run.json", "manifest/0", "_inputs/a.jpg")))
    planned = plan_of(tmp_path / "in")
    (unit,) = planned.units
    assert [name for name, _ in unit.items] == ["a.jpg"]
    assert planned.listing == "taken: files (1); left out: hidden (3), output folder of embq (1), .md (1)"


def test_a_pattern_leaves_out_what_runs_wrote_unless_it_names_the_entry(tmp_path: Path) -> None:
    touch(tmp_path, "a.tar", "parts/b.tar", *(f"out/{name}" for name in ("run.json", "manifest/0", "parts/c.tar")))
    planned = plan_of(tmp_path / "**" / "*.tar")
    assert sources_of(planned, tmp_path) == ["a.tar", "parts/b.tar"]
    assert planned.listing == "taken: webdataset (2); left out: output folder of embq (1)"
    assert sources_of(plan_of(tmp_path / "*" / "parts" / "*.tar"), tmp_path) == ["out/parts/c.tar"]
    with pytest.raises(InputError, match="no file matches outside of output folders"):
        plan_of(tmp_path / "out" / "*" / "*.tar")


def test_a_path_that_exists_is_no_pattern(tmp_path: Path) -> None:
    touch(tmp_path, "[x]{1,2}*.tar")
    assert sources_of(plan_of(tmp_path / "[x]{1,2}*.tar"), tmp_path) == ["[x]{1,2}*.tar"]


def test_a_folder_is_planned_by_what_it_holds(tmp_path: Path) -> None:
    touch(tmp_path, "shards/1.tar", "shards/0.tar", "images/a.jpg", "images/b/c.jpg")
    planned = plan_of(tmp_path / "shards", tmp_path / "images")
    units = list(planned.units)
    assert [(unit.kind, unit.samples) for unit in units] == [("tar", None), ("tar", None), ("files", 2)]
    assert planned.modalities == ("image",)


def test_relative_names_become_absolute_and_links_keep_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "real.tar")
    (tmp_path / "link.tar").symlink_to(tmp_path / "real.tar")
    monkeypatch.chdir(tmp_path)
    assert [unit.source for unit in plan_of("./link.tar").units] == [str(tmp_path / "link.tar")]


def test_texts_are_cut_into_units_of_the_wanted_size(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt", "b.jsonl")
    planned = plan_of(tmp_path / "a.txt", tmp_path / "b.jsonl", unit_samples=1)
    assert [(unit.kind, unit.samples) for unit in planned.units] == [("lines", 1)] * 2 + [("jsonl", 1)] * 2
    assert planned.modalities == ("text",)


def test_missing_inputs_are_counted_and_three_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "0.tar", "2.tar")
    with pytest.raises(InputError) as caught:
        plan_of(tmp_path / "{0..6}.tar", tmp_path / "a.txt", tmp_path / "folder")
    missing = ", ".join(str(tmp_path / f"{number}.tar") for number in (1, 3, 4))
    assert caught.value.message == f"{missing} and 4 more are not found (7 of 9 inputs)"
    with pytest.raises(InputError, match=r"nowhere is not found \(1 of 1 inputs\)"):
        plan_of(tmp_path / "nowhere")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_url_with_one_slash_is_named_with_two(scheme: str) -> None:
    with pytest.raises(InputError, match="is not found") as caught:
        plan_of(f"{scheme}:/bucket/x.tar")
    assert f"{scheme}://bucket/x.tar" in caught.value.next_step


def test_an_empty_input_is_not_the_current_folder() -> None:
    with pytest.raises(InputError, match="an input is empty"):
        plan_of("")


@pytest.mark.parametrize("name", ["-", "pipe", "pipe.jsonl", "/dev/null"])
def test_what_is_read_once_is_to_be_written_into_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for pipe in ("pipe", "pipe.jsonl"):
        os.mkfifo(pipe)
    with pytest.raises(InputError) as refused:
        list(plan_of(name).units)
    assert "into a file first" in refused.value.next_step


def test_a_link_to_nowhere_and_a_tilde_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink("nowhere.txt", "t.txt")
    for name, said in (("t.txt", "is a link to nowhere.txt"), ("~/t.txt", "write $HOME/t.txt")):
        with pytest.raises(InputError, match="is not found") as refused:
            plan_of(name)
        assert said in refused.value.next_step


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_port_that_no_host_has_is_refused_at_once(scheme: str) -> None:
    url = f"{scheme}://127.0.0.1:99999/x.tar"
    if is_http(url) or names_host(url):
        with pytest.raises(InputError, match="Port out of range"):
            plan_of(url)
    else:
        check_source(url)


def test_an_input_that_is_named_twice_is_planned_once_with_a_warning(tmp_path: Path) -> None:
    touch(tmp_path, "0.tar", "1.tar")
    planned = plan_of(tmp_path / "0.tar", tmp_path / "*.tar", tmp_path, f"{tmp_path}/./1.tar")
    units = list(planned.units)
    assert len(units) == len({unit.unit_id for unit in units}) == 2
    (warning,) = planned.warnings
    assert "named more than once" in warning


def test_empty_texts_are_left_out_with_a_warning_unless_all_are_empty(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt")
    (tmp_path / "empty.txt").touch()
    planned = plan_of(tmp_path)
    assert sources_of(planned, tmp_path) == ["a.txt"]
    assert planned.warnings == (f"{tmp_path / 'empty.txt'} is empty, left out",)
    with pytest.raises(InputError, match="nothing is left"):
        plan_of(tmp_path / "empty.txt")


def test_images_with_texts_need_a_choice(tmp_path: Path) -> None:
    touch(tmp_path, "a.tar", "b.txt")
    inputs = (tmp_path / "a.tar", tmp_path / "b.txt")
    with pytest.raises(InputError) as caught:
        plan_of(*inputs)
    assert "--modality" in caught.value.next_step
    assert "separately" in caught.value.next_step
    assert plan_of(*inputs, modalities=["text"]).modalities == ("text",)
    with pytest.raises(InputError, match=r"b\.txt holds texts only"):
        plan_of(*inputs, modalities=["image"])
    assert plan_of(inputs[0], modalities=["text", "image"]).modalities == ("image", "text")


@pytest.mark.parametrize(
    ("inputs", "modalities", "unit_samples"), [([], [], 1), (["a.tar"], ["sound"], 1), (["a.tar"], [], 0)]
)
def test_options_out_of_range_are_usage_errors(
    tmp_path: Path, inputs: list[str], modalities: list[str], unit_samples: int
) -> None:
    touch(tmp_path, "a.tar")
    with pytest.raises(UsageError):
        plan_of(*(tmp_path / name for name in inputs), modalities=modalities, unit_samples=unit_samples)


def test_the_same_input_gives_the_same_units(tmp_path: Path) -> None:
    touch(tmp_path, "0.tar", "1.tar")
    units: list[Unit] = list(plan_of(tmp_path).units)
    assert units == list(plan_of(tmp_path).units)


def test_planning_shards_looks_at_each_once_and_into_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, *(f"{number}.tar" for number in range(10)))
    looks: list[str] = []
    stat = os.stat

    def counted(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        looks.append(str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", counted)
    assert len(list(plan_of(tmp_path / "{0..9}.tar").units)) == 10
    first, *others = sorted(Counter(looks).items())
    assert first == (str(tmp_path / "0.tar"), 3)
    assert others == [(str(tmp_path / f"{number}.tar"), 1) for number in range(1, 10)]


def test_an_option_that_no_input_looks_at_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg", "b.txt", "c/0.tar")
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n')
    images, lines, shard, rows = (
        str(tmp_path),
        str(tmp_path / "b.txt"),
        str(tmp_path / "c"),
        str(tmp_path / "d.jsonl"),
    )
    for path, options, name in (
        (images, {"text_column": "x"}, "--text-column"),
        (images, {"metadata_columns": ("x",)}, "--metadata-columns"),
        (lines, {"id_column": "x"}, "--id-column"),
        (rows, {"image_keys": ("jpg",)}, "--image-key"),
        (rows, {"image_column": "x"}, "--image-column"),
        (shard, {"text_column": "x"}, "--text-column"),
    ):
        kind = {"kind": "files"} if path == images else {}
        with pytest.raises(UsageError, match=f"{name} is for inputs of kind"):
            plan([path], ReadOptions(**options, **kind))  # type: ignore[arg-type]
    plan([lines, rows], ReadOptions(text_column="text", metadata_columns=("*",)))
    plan([lines], ReadOptions(metadata_columns=("*",)))


def test_an_extension_that_no_shard_has_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("a.png", b"i"), ("a.txt", b"t"), ("b.png", b"i")])
    for options, option in (
        (ReadOptions(image_keys=("jpg", "tif")), "jpg or tif"),
        (ReadOptions(caption_keys=("c",)), "c"),
    ):
        with pytest.raises(InputError, match=rf"no member ends in {option}; there are png \(2\), txt \(1\)"):
            plan([str(tmp_path)], options)
    write_tar(tmp_path / "1.tar", [("a.jpg", b"i")])
    plan([str(tmp_path)], ReadOptions(image_keys=("jpg", "tif")))  # one of the shards has it


def test_an_extension_of_what_is_not_embedded_may_be_absent(tmp_path: Path) -> None:
    shard, folder = tmp_path / "0.tar", tmp_path / "images"
    write_tar(shard, [("a.png", b"i"), ("b.png", b"i")])
    folder.mkdir()
    (folder / "a.png").write_bytes(b"i")
    for path in (shard, folder):
        captions = ReadOptions(image_keys=("png",), caption_keys=("txt",))
        [unit] = plan([str(path)], captions, ("image",)).units
        assert dict(unit.options)["caption_keys"] == "txt"  # of an image that has one it is kept
        for modalities in ((), ("text",), ("image", "text")):
            with pytest.raises(InputError, match="txt"):
                plan([str(path)], captions, modalities)
        with pytest.raises(InputError, match="png"):
            plan([str(path)], ReadOptions(image_keys=("jpg",)), ("image",))
    write_tar(shard, [("a.txt", b"t")])
    plan([str(shard)], ReadOptions(image_keys=("png",), caption_keys=("txt",)), ("text",))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_field_that_no_line_has_is_named_with_those_that_are_there(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(pack(b'{"body": "x", "n": 1}\nno object\n{"body": "y"}\n'))
    for options in (ReadOptions(text_column="txt"), ReadOptions(id_column="txt")):
        with pytest.raises(InputError, match=r"no.* field 'txt'; they have body \(2\), n \(1\)") as refused:
            plan([str(tmp_path / "a.jsonl")], options)
        assert refused.value.code == "missing_column"
    (tmp_path / "b.jsonl").write_bytes(pack(b'{"txt": "x"}\n'))
    assert len(list(plan([str(tmp_path)], ReadOptions(text_column="txt")).units)) == 2  # one of the files has it


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_a_partitioned_data_set_is_an_input_and_its_folders_are_columns(tmp_path: Path, kind: str) -> None:
    for day, place in ((1, "Z%C3%BCrich"), (2, "__HIVE_DEFAULT_PARTITION__")):
        folder = tmp_path / f"day=0{day}" / f"place={place}"
        folder.mkdir(parents=True)
        table = pa.table({"id": [f"k{day}"], "text": ["x"], "kept": [day]})
        if kind == "parquet":
            pq.write_table(table, folder / "part.parquet")
        elif kind == "csv":
            (folder / "part.csv").write_text(f"id,text,kept\nk{day},x,{day}\n")
        else:
            (folder / "part.jsonl").write_text(json.dumps(table.to_pylist()[0]) + "\n")
    own = {"parquet": {}, "csv": {"kept": "1"}, "jsonl": {"kept": 1}}[kind]
    columns, units = first_columns(plan_of(tmp_path).units)
    assert {(one.name, one.type) for one in columns} >= {("day", "int64"), ("place", "string")}
    first, second = units
    (sample,) = read(first, [])
    assert json.loads(sample.metadata or "") == {"day": 1, "place": "Z\u00fcrich", **own}
    assert [one.metadata for one in reread(first, images=False)] == [json.loads(sample.metadata or "")]
    assert json.loads(next(read(second, [])).metadata or "")["place"] is None
    named = plan([str(tmp_path)], ReadOptions(metadata_columns=("day", "kept")))
    assert json.loads(next(read(next(named.units), [])).metadata or "") == {"day": 1, "kept": own.get("kept", 1)}


NAMED_KINDS = ["txt", "jsonl", "csv", "tsv", "parquet", "arrow"]
"""Endings of files whose name is in the keys of their rows."""


def write_texts(path: Path, text: str) -> None:
    """A file of one row without an id."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".txt":
        path.write_text(f"{text}\n")
    else:
        write_rows(path, text=[text], n=["1"])


def keys_of(units: Iterable[Unit]) -> list[str]:
    """The keys of all rows, which both readers give."""
    found = list(units)
    keys = [sample.key for unit in found for sample in read(unit, [])]
    assert keys == [sample.key for unit in found for sample in reread(unit, images=False)]
    return keys


@pytest.mark.parametrize("kind", NAMED_KINDS)
def test_files_of_one_name_below_a_folder_have_keys_of_their_own(tmp_path: Path, kind: str) -> None:
    names = ["a/deep/x", "a/x", "b/x", "x"]
    for name in names:
        write_texts(tmp_path / f"{name}.{kind}", f"text of {name}")
    for inputs in ([str(tmp_path)], [f"{tmp_path}/**/*.{kind}"], [f"{tmp_path}/{{a/deep/,a/,b/,}}x.{kind}"]):
        assert sorted(keys_of(plan(inputs, ReadOptions()).units)) == [f"{name}.{kind}:1" for name in names]
    assert keys_of(plan_of(tmp_path / "a" / f"x.{kind}").units) == [f"x.{kind}:1"]


@pytest.mark.parametrize("kind", NAMED_KINDS)
def test_files_of_one_name_that_are_named_themselves_have_keys_of_their_own(tmp_path: Path, kind: str) -> None:
    names = ["data/a/part-0", "data/b/part-0", "data/b/part-1"]
    for name in (*names, "other/a/part-0", "other/part-1"):
        write_texts(tmp_path / f"{name}.{kind}", f"text of {name}")

    def keys(*inputs: str) -> list[str]:
        planned = plan([str(tmp_path / one) for one in inputs], ReadOptions())
        return [key.removesuffix(f".{kind}:1") for key in keys_of(planned.units)]

    quoted = keys(f"data/*/part-0.{kind}")
    expanded = [f"{name}.{kind}" for name in names]
    assert keys(*expanded[:2]) == quoted == ["a/part-0", "b/part-0"]
    assert keys(*expanded) == ["a/part-0", "b/part-0", "part-1"]
    # A folder, a pattern and files that are named themselves, with names that are those of others.
    deep = f"other/a/part-0.{kind}"
    assert keys(expanded[0], deep) == ["data/a/part-0", "other/a/part-0"]
    assert keys("data/a", f"other/*/part-0.{kind}", expanded[1]) == ["data/a/part-0", "other/a/part-0", "b/part-0"]
    assert keys("data", "other") == ["data/a/part-0", "b/part-0", "b/part-1", "other/a/part-0", "part-1"]


def test_names_of_many_files_are_told_apart_in_few_rounds() -> None:
    files = [(f"/x/{n % 7}/{n}/part-0.parquet", "part-0.parquet") for n in range(1_000)]
    rounds: list[int] = []

    def listed() -> list[tuple[str, str]]:
        rounds.append(1)
        return files

    assert distinct_names(listed) == {path: "/".join(path.split("/")[-2:]) for path, _ in files}
    assert len(rounds) == 3
    queries = [(f"https://host/get?id={n}", "get") for n in range(3)]
    names = distinct_names(lambda: queries)
    assert len(set(names.values())) == 3
    assert all("id=" not in name for name in names.values()), "a query may hold a secret"


def write_rows(path: Path, **columns: list[Any]) -> None:
    """One table or .jsonl file, of the kind that its name tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    else:
        between = "\t" if path.suffix == ".tsv" else ","
        rows = [list(columns), *(row.values() for row in table.to_pylist())]
        path.write_text("".join(f"{between.join(map(str, row))}\n" for row in rows))


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "arrow"])
def test_a_file_of_a_folder_whose_text_is_a_guess_is_refused_beside_one_that_tells(tmp_path: Path, kind: str) -> None:
    for number in range(3):
        write_rows(tmp_path / f"corpus-{number}.{kind}", id=["1", "2"], text=["a", "b"])
    for name in ("labels", "annotations"):  # behind and before the others
        write_rows(tmp_path / f"{name}.{kind}", id=["1", "2"], label=["x", "y"])
        for inputs in ([str(tmp_path)], [f"{tmp_path}/*.{kind}"]):
            with pytest.raises(InputError, match=rf"{name}\.{kind}: its texts would be those of 'label'") as caught:
                plan(inputs, ReadOptions())
            assert f"--exclude {name}.{kind}" in caught.value.next_step
            excluded = plan(inputs, ReadOptions(), selection=Selection(exclude=(f"{name}.{kind}",)))
            assert (len(list(excluded.units)), excluded.warnings) == (3, ())
        assert len(list(plan_of(tmp_path / f"{name}.{kind}", tmp_path / f"corpus-0.{kind}").units)) == 2, "named"
        (tmp_path / f"{name}.{kind}").unlink()
    write_rows(tmp_path / f"a.{kind}", id=["3"], body=["c"])
    assert plan_of(tmp_path).warnings == (
        f"{tmp_path}/corpus-0.{kind} has other columns than {tmp_path}/a.{kind}: (id, text), not (body, id)",
    )


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "arrow", "jsonl"])
def test_files_of_a_folder_with_other_columns_are_told(tmp_path: Path, kind: str) -> None:
    for number in range(40):
        write_rows(tmp_path / f"part-{number:05d}.{kind}", id=["1"], text=["a"])
    assert plan_of(tmp_path).warnings == ()
    write_rows(tmp_path / f"reviews.{kind}", id=["1"], text=["a"], stars=["5"])
    assert plan_of(tmp_path).warnings == (
        f"{tmp_path}/reviews.{kind} has other columns than {tmp_path}/part-00000.{kind}: "
        "(id, stars, text), not (id, text)",
    )


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_metadata_file_beside_images_gives_captions_and_metadata(tmp_path: Path, ending: str) -> None:
    touch(tmp_path, "0.png", "1.png", "2.png", "2.txt", "sub/3.png", "own/4.png", "own/5.png")
    (tmp_path / "0.json").write_text('{"n": "of the image", "m": 1}')
    rows = [
        ("0.png", "a red car", "a"),
        ("sub/3.png", "x, \u00e4", "b"),
        ("2.png", "unused", "c"),
        ("own/4.png", "no", "no"),
    ]
    for folder, found in ((tmp_path, rows), (tmp_path / "own", [("4.png", "nearest", "d")])):
        if ending == "csv":
            lines = ["file_name,text,n", *(f'{name},"{text}",{n}' for name, text, n in found)]
        else:
            lines = [json.dumps({"file_name": name, "text": text, "n": n}) for name, text, n in found]
        (folder / f"metadata.{ending}").write_text("\n".join(lines), encoding="utf-8")
    planned = plan_of(tmp_path)
    columns, units = first_columns(planned.units)
    assert [one.name for one in columns] == ["n", "m"]
    (unit,) = units
    samples = [(one.key, one.text, json.loads(one.metadata or "null")) for one in read(unit, [])]
    assert samples == [
        ("0.png", "a red car", {"n": "of the image", "m": 1}),
        ("1.png", None, None),
        ("2.png", "x\ny\n", {"n": "c"}),
        ("own/4.png", "nearest", {"n": "d"}),
        ("own/5.png", None, None),
        ("sub/3.png", "x, \u00e4", {"n": "b"}),
    ]
    assert [(one.key, one.text, one.metadata) for one in reread(unit, images=False)] == samples
    (tmp_path / f"metadata.{ending}").write_text("image\n0.png" if ending == "csv" else '{"image": "0.png"}')
    assert [one.text for one in read(unit, [])][:2] == [None, None], "it is somebody else's, without a file_name"
    assert [one.text for one in reread(unit, images=False)][:2] == [None, None]
    (tmp_path / f"metadata.{ending}").write_text('file_name\n"')
    # 2.png has a caption beside it, and the images in "own" a file of their own.
    bad = ["bad_metadata", "bad_metadata", None, None, None, "bad_metadata"]
    assert [one.error and one.error[0] for one in read(unit, [])] == bad
    without_texts = list(read(unit, [], texts=False))
    assert [one.error for one in without_texts] == [None] * 6
    assert [one.unread and one.unread[0] for one in without_texts] == ["bad_metadata"] * 3 + [None] * 2 + [
        "bad_metadata"
    ]
