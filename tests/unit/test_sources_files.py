"""Folders of images: every image file is a sample, and no link leads out of the folder."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from embq.core.errors import InputError, SourceError
from embq.core.units import UNIT_SPEC_MAX_BYTES, Sample, Unit, canonical_json
from embq.sources.access.files import PIECE_BYTES
from embq.sources.formats.image_folder import FilesSource
from embq.sources.reader_options import ReadOptions
from tests.support.planning import code

FILES = FilesSource()


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(name))


def units_of(root: Path, most: int = 1000) -> list[Unit]:
    return list(FILES.split(str(root), ReadOptions(unit_samples=most)))


def read(root: Path, units: list[Unit] | None = None) -> dict[str, Sample]:
    return {s.key: s for unit in units or units_of(root) for s in FILES.read(unit)}


def test_images_are_found_in_all_folders_and_ordered_by_their_path(tmp_path: Path) -> None:
    names = ["a.jpg", "a/b.JPEG", "a-b.png", "a/a.gif", "z/y/x.webp", "b.bmp", "a.b/c.Jpg", "d.TIF", "e.tiff", "f.avif"]
    write(tmp_path, *names, "a.heic", "jpg", "notes.md")
    samples = read(tmp_path)
    assert list(samples) == sorted(names)
    assert all(sample.image == key.encode() and sample.error is None for key, sample in samples.items())


def test_captions_and_metadata_lie_beside_the_image(tmp_path: Path) -> None:
    write(tmp_path, "a.b.jpg", "b.jpg", "c.jpg")
    (tmp_path / "a.b.txt").write_bytes(b"\xef\xbb\xbfa caption")
    (tmp_path / "a.b.json").write_text('{"n": [1, 2]}')
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "c.json").write_text("nope")
    samples = read(tmp_path)
    assert (samples["a.b.jpg"].text, samples["a.b.jpg"].metadata) == ("a caption", '{"n":[1,2]}')
    assert [code(samples[key]) for key in ("b.jpg", "c.jpg")] == ["text_not_utf8", None]
    assert (samples["c.jpg"].unread or ("",))[0] == "bad_metadata"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"a.jpg": "txt of a", "a.png": "txt of a", "b.mask.png": None, "c.JPG": None}),
        ({"image_keys": ("jpg",)}, {"a.jpg": "txt of a", "c.JPG": None}),
        ({"image_keys": ("png", "mask.png")}, {"a.png": "txt of a", "b.mask.png": "txt of b"}),
        ({"image_keys": ("scan",)}, {"d.scan": "txt of d"}),
        ({"image_keys": ("scan",), "caption_keys": ("cap", "txt")}, {"d.scan": "cap of d"}),
        ({"image_keys": ("jpg",), "caption_keys": ("cap", "txt")}, {"a.jpg": "txt of a", "c.JPG": None}),
    ],
)
def test_extensions_that_the_user_names_are_taken(
    tmp_path: Path, options: dict[str, tuple[str, ...]], expected: dict[str, str | None]
) -> None:
    write(tmp_path, "a.jpg", "a.png", "b.mask.png", "c.JPG", "d.scan")
    for name, text in (("a.txt", "txt of a"), ("b.txt", "txt of b"), ("d.cap", "cap of d"), ("d.txt", "txt of d")):
        (tmp_path / name).write_text(text)
    units = list(FILES.split(str(tmp_path), ReadOptions(**options)))  # type: ignore[arg-type]
    assert {sample.key: sample.text for sample in read(tmp_path, units).values()} == expected


def test_an_extension_that_no_file_has_is_an_error_with_those_that_are_there(tmp_path: Path) -> None:
    write(tmp_path, "a.jpg", "a.txt", "b.png")
    with pytest.raises(InputError, match=r"\.jpg \(1\)"):
        list(FILES.split(str(tmp_path), ReadOptions(image_keys=("tif",))))
    with pytest.raises(SourceError, match=r"no file ends in \.cap; found: .*\.txt \(1\)"):
        FILES.holds(str(tmp_path), ReadOptions(caption_keys=("cap",)))
    assert FILES.holds(str(tmp_path), ReadOptions(caption_keys=("cap", "txt"))) == ("image", "text")


def test_units_hold_the_wanted_number_and_count_on(tmp_path: Path) -> None:
    write(tmp_path, *(f"{number:03d}.jpg" for number in range(10)))
    units = units_of(tmp_path, 4)
    assert [(unit.first, unit.samples) for unit in units] == [(0, 4), (4, 4), (8, 2)]


def test_units_of_very_long_names_still_fit_into_a_hint(tmp_path: Path) -> None:
    folder = "\u00fc" * 100 + "/" + "\U0001f600" * 50
    write(tmp_path, *(f"{folder}/{'n' * 200}{number:03d}.jpg" for number in range(200)))
    units = units_of(tmp_path)
    assert len(units) > 1
    for unit in units:
        assert len(canonical_json(unit.describe()).encode()) <= UNIT_SPEC_MAX_BYTES
        assert len(json.dumps(unit.describe(), separators=(",", ":"))) <= UNIT_SPEC_MAX_BYTES
    assert len(read(tmp_path)) == 200


def test_names_that_are_not_utf8_survive_a_hint(tmp_path: Path) -> None:
    with open(os.path.join(os.fsencode(tmp_path), b"\xff\xe9.jpg"), "wb") as file:
        file.write(b"image")
    (unit,) = units_of(tmp_path)
    again = Unit.from_description(json.loads(json.dumps(unit.describe())))
    assert again.unit_id == unit.unit_id
    (sample,) = FILES.read(again)
    assert (sample.image, os.fsencode(sample.key)) == (b"image", b"\xff\xe9.jpg")


def test_links_inside_the_folder_are_read_and_links_out_of_it_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    write(root, "a.jpg")
    write(tmp_path, "secret.jpg", "elsewhere/b.jpg", "root-2/c.jpg")
    (root / "inside.jpg").symlink_to(root / "a.jpg")
    (root / "outside.jpg").symlink_to(tmp_path / "secret.jpg")
    (root / "prefix.jpg").symlink_to(tmp_path / "root-2" / "c.jpg")
    (root / "gone.jpg").symlink_to(root / "nothing")
    (root / "loop.jpg").symlink_to(root / "loop.jpg")
    (root / "a.txt").symlink_to(tmp_path / "secret.jpg")
    (root / "folder").symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        samples = read(root)
    assert {key: code(sample) for key, sample in samples.items()} == {
        "a.jpg": "outside_root",
        "gone.jpg": "source_missing",
        "inside.jpg": None,
        "loop.jpg": "source_missing",
        "outside.jpg": "outside_root",
        "prefix.jpg": "outside_root",
    }
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith("linked_folders_skipped ")
    assert "folders=1" in warning


@pytest.mark.parametrize("item", ["../secret.jpg", "/etc/passwd", "a/../../secret.jpg"])
def test_a_unit_from_elsewhere_cannot_name_a_file_outside(tmp_path: Path, item: str) -> None:
    root = tmp_path / "root"
    write(root, "a.jpg")
    write(tmp_path, "secret.jpg")
    (sample,) = FILES.read(Unit(kind="files", source=str(root), items=((item, 10),)))
    assert (sample.image, code(sample)) == (None, "outside_root")


def test_files_that_vanished_or_changed_fail_alone(tmp_path: Path) -> None:
    write(tmp_path, "a.jpg", "b.jpg", "c.jpg", "d.jpg")
    units = units_of(tmp_path)
    (tmp_path / "a.jpg").unlink()
    (tmp_path / "b.jpg").write_bytes(b"longer than it was")
    (tmp_path / "c.jpg").unlink()
    os.mkfifo(tmp_path / "c.jpg")
    samples = read(tmp_path, units)
    assert [code(s) for s in samples.values()] == ["source_missing", "source_changed", "unsupported_member", None]


def test_a_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "a.jpg", "wb") as file:
        file.truncate(32_000_001)
    assert code(read(tmp_path)["a.jpg"]) == "too_large"


def test_a_folder_without_images_says_what_it_holds_instead(tmp_path: Path) -> None:
    write(tmp_path, "a.heic", "b/c.heic", "README")
    with pytest.raises(InputError, match=r"found: \.heic \(2\), no extension \(1\)"):
        units_of(tmp_path)


def test_a_large_image_tells_of_each_piece_that_comes_in(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"x" * 3 * PIECE_BYTES)
    (unit,) = units_of(tmp_path)
    pieces: list[int] = []
    (sample,) = FILES.read(unit, lambda: pieces.append(1))
    assert len(sample.image or b"") == 3 * PIECE_BYTES
    assert len(pieces) >= 3


def test_a_folder_of_links_out_of_it_is_refused_before_the_run(tmp_path: Path) -> None:
    write(tmp_path, "blobs/1", "blobs/2")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for name in ("1", "2"):
        (snapshot / f"{name}.jpg").symlink_to(f"../../blobs/{name}")
    with pytest.raises(InputError, match=r"links out of the folder, such as 1\.jpg to .*blobs/1") as caught:
        units_of(snapshot)
    assert caught.value.code == "outside_root"
    assert "cp -rL" in caught.value.next_step
    write(snapshot, "3.jpg")
    assert {key: code(sample) for key, sample in read(snapshot).items()} == {
        "1.jpg": "outside_root",
        "2.jpg": "outside_root",
        "3.jpg": None,
    }
