"""The kind of an input by its path, and refusals of the worker's gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from embq.core.errors import InputError, SourceError
from embq.core.units import Unit
from embq.sources.kinds import SOURCES, Listing, detect, kind_of, source_for
from embq.sources.reader_options import ReadOptions, format_of
from embq.sources.unit_reader import read


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.tar", "tar"),
        ("A.TAR", "tar"),
        ("a.jsonl", "jsonl"),
        ("a.ndjson", "jsonl"),
        ("a.txt", "lines"),
        ("a.txt.gz", "lines"),
        ("a.jsonl.zst", "jsonl"),
        ("a.csv.bz2", "csv"),
        ("a.tsv", "csv"),
        ("a.parquet", "parquet"),
        ("a.feather", "arrow"),
    ],
)
def test_a_file_tells_its_kind_by_its_name(tmp_path: Path, name: str, kind: str) -> None:
    touch(tmp_path, name)
    assert detect(str(tmp_path / name)) == [(kind, str(tmp_path / name))]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["b.tar", "a.tar", "a.parquet", "a_stats.json", ".c.tar"], [("tar", "a.tar"), ("tar", "b.tar")]),
        (["x.md", "deep/er/a.jpg", "a.txt"], [("files", "")]),
        (["00000/a.jpg", "00000.parquet", "._a.parquet", "b/a.JPE"], [("files", "")]),
        (["b.jsonl", "sub/a.ndjson", "README.md"], [("jsonl", "b.jsonl"), ("jsonl", "sub/a.ndjson")]),
        (["sub/a.tar"], [("tar", "sub/a.tar")]),
        (["y=1/a.parquet", "_delta_log/1.parquet", "_SUCCESS", ".x/b.parquet"], [("parquet", "y=1/a.parquet")]),
        (["a.arrow", "cache-1.arrow", "dataset_info.json"], [("arrow", "a.arrow")]),
        (["a.csv", "out/run.json", "out/manifest/gen.json", "out/parts/b.parquet"], [("csv", "a.csv")]),
        (["run.json", "manifest/gen.json", "parts/b.parquet"], [("parquet", "parts/b.parquet")]),
        (["run.json", "manifest/0", "metadata/a.parquet", "img_emb/0.npy"], [("parquet", "metadata/a.parquet")]),
    ],
)
def test_a_folder_stands_for_what_it_holds(tmp_path: Path, names: list[str], found: list[tuple[str, str]]) -> None:
    touch(tmp_path, *names)
    assert detect(str(tmp_path)) == [(kind, str(tmp_path / name)) for kind, name in found]


def test_texts_beside_no_image_are_counted_and_captions_are_not(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg", "a.txt", "b.jpg", "b.txt", "notes/1.txt", "notes/2.txt")
    listing = Listing()
    assert detect(str(tmp_path), listing=listing) == [("files", str(tmp_path))]
    assert listing.left_out == {"texts beside no image": 2}
    # One image has two names before its extension, two have one caption, and four texts have no image.
    touch(tmp_path, "c.txt", "c.webp", "d.e.png", "d.e.txt", "b.png", "README.txt", "b.txt.gz", "d.txt", "a.jpg.txt")
    for wanted in ("", "files"):
        listing = Listing()
        assert detect(str(tmp_path), wanted, listing=listing) == [("files", str(tmp_path))]
        assert (listing.taken, listing.left_out) == ({"files": 5}, {"texts beside no image": 6})
    touch(tmp_path, "_x/a.txt", "_x/a.webp")  # the text comes first, and is left as one in such a folder
    listing = Listing()
    detect(str(tmp_path), listing=listing)
    assert listing.left_out == {"texts beside no image": 6, "in a folder whose name begins with _": 1}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["b.parquet", "notes.txt"], r"parquet \(b\.parquet\), text \(notes\.txt\)"),
        (["corpus.jsonl", "LICENSE.txt"], r"text \(LICENSE\.txt\), jsonl \(corpus\.jsonl\)"),
        (["train.parquet", "assets/banner.png"], r"files \(assets/banner\.png\), parquet \(train\.parquet\)"),
        (["a.csv", "sub/b.arrow"], r"csv \(a\.csv\), arrow \(sub/b\.arrow\)"),
        (["a.tar", "b/c.jpg"], r"webdataset \(a\.tar\), files \(b/c\.jpg\)"),
    ],
)
def test_a_folder_with_several_kinds_names_the_option_that_chooses(
    tmp_path: Path, names: list[str], message: str
) -> None:
    touch(tmp_path, *names)
    with pytest.raises(InputError, match=message) as caught:
        detect(str(tmp_path))
    assert "--input-format" in caught.value.next_step
    listing = Listing()
    kind = kind_of(names[0]) or "files"
    assert {found for found, _ in detect(str(tmp_path), kind, listing=listing)} == {kind}
    assert sum(listing.left_out.values()) == 1


@pytest.mark.parametrize("name", ["a.txt", "notes/a.txt.gz", "a.csv", "a.tsv.zst", "a.jsonl"])
def test_a_text_or_table_among_a_repository_of_code_is_taken_only_where_it_is_named(tmp_path: Path, name: str) -> None:
    touch(tmp_path, name, *(f"src/{number}.py" for number in range(250)))
    with pytest.raises(InputError, match=rf"1 of its files .*such as {name}, among 250 .*\.py \(250\)") as caught:
        detect(str(tmp_path))
    kind = kind_of(name) or ""
    assert caught.value.next_step.endswith(f"--input-format {format_of(kind)}")
    assert detect(str(tmp_path), kind) == detect(str(tmp_path / name)) == [(kind, str(tmp_path / name))]
    touch(tmp_path, *(f"{number}.{name.partition('.')[2]}" for number in range(12)))
    assert len(detect(str(tmp_path))) == 13


def test_a_wanted_kind_stands_above_names(tmp_path: Path) -> None:
    touch(tmp_path, "b.parquet", "notes.txt", "rows.dat")
    assert detect(str(tmp_path), "lines") == [("lines", str(tmp_path / "notes.txt"))]
    assert detect(str(tmp_path / "rows.dat"), "csv") == [("csv", str(tmp_path / "rows.dat"))]
    with pytest.raises(InputError, match="no file of kind 'arrow'"):
        detect(str(tmp_path), "arrow")


@pytest.mark.parametrize("name", ["a.h5", "A.HDF5", ""])
def test_hdf5_files_are_for_a_plug_in(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "b.h5", *filter(None, [name]))
    with pytest.raises(InputError) as caught:
        detect(str(tmp_path / name))
    assert "docs/how-to/contribute/plug-ins.md" in caught.value.next_step


@pytest.mark.parametrize("names", [[], ["a.xls"], ["sub/a"]])
def test_a_folder_with_nothing_to_embed_says_what_it_holds(tmp_path: Path, names: list[str]) -> None:
    touch(tmp_path, *names)
    with pytest.raises(InputError, match=r"found: (nothing|\.xls|no extension)"):
        detect(str(tmp_path))


def test_a_single_image_or_an_unknown_file_is_no_input(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg", "a.xls", "a.parquet.gz")
    with pytest.raises(InputError, match="images are read by the folder"):
        detect(str(tmp_path / "a.jpg"))
    for name in ("a.xls", "a.parquet.gz"):
        with pytest.raises(InputError, match="no input"):
            detect(str(tmp_path / name))


@pytest.mark.parametrize(
    "source", ["pipe:touch /tmp/owned", "zip://a.tar::https://host/a.zip", "memory://a.tar", "file:///etc/passwd"]
)
@pytest.mark.parametrize("kind", list(SOURCES))
def test_commands_and_unknown_urls_are_refused_for_every_kind(kind: str, source: str) -> None:
    with pytest.raises(SourceError) as caught:
        read(Unit(kind=kind, source=source), [])
    assert caught.value.code == "shard_scheme_denied"


def test_a_unit_outside_of_the_allowed_folders_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.txt", "out/b.txt", "in-2/c.txt")
    allowed = [str(tmp_path / "other"), str(tmp_path / "in")]
    (tmp_path / "in" / "link.txt").symlink_to(tmp_path / "out" / "b.txt")
    for name in ("out/b.txt", "in-2/c.txt", "in/link.txt", "in/../out/b.txt"):
        with pytest.raises(SourceError) as caught:
            read(Unit(kind="lines", source=str(tmp_path / name)), allowed)
        assert caught.value.code == "source_denied", name
    (unit,) = SOURCES["lines"].split(str(tmp_path / "in" / "a.txt"), ReadOptions())
    assert [sample.text for sample in read(unit, allowed)] == ["x"]
    assert [sample.text for sample in read(unit, ["/"])] == ["x"]
    assert [sample.text for sample in read(unit, [])] == ["x"]


@pytest.mark.parametrize("source", ["a\0b.tar", "\ud800.tar"])
def test_a_source_that_is_no_path_is_refused(source: str) -> None:
    with pytest.raises(SourceError, match="not a path"):
        read(Unit(kind="tar", source=source), [])


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(SourceError) as caught:
        source_for("pickle")
    assert caught.value.code == "unknown_kind"
