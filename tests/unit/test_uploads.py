"""Names of uploads: what a laptop may send, and what a writer takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embq.core.errors import EmbqError, InputError, MalformedError
from embq.core.queue.uploads import Upload, UploadFile
from embq.core.run.layout import INPUTS
from embq.core.units import Unit
from embq.producer.upload import UploadedInputs

FOLDER = f"{INPUTS}/0123456789abcdef"


def refusal(*paths: str) -> EmbqError | None:
    """The error by which an upload of these files is refused, as it comes over the network; None if it is taken."""
    files = tuple(UploadFile(path=path, bytes=1, mtime_ns=0, sha256="0" * 64) for path in paths)
    text = Upload(run="0" * 16, output="/out", record="{}", files=files).to_json()
    try:
        upload = Upload.from_json(text)
    except EmbqError as error:
        return error
    assert upload is not None
    assert [file.path for file in upload.files] == list(paths)
    return None


@pytest.mark.parametrize(
    "path",
    [
        *("run.json", "manifest/00000.parquet", f"{INPUTS}/01234/a.tar"),
        *(
            f"{FOLDER}/{name}"
            for name in ("a.tar", "a/b/c", ".hidden", "..a", "a\nb\x01", "schön", "\udce9", "x" * 255)
        ),
    ],
)
def test_a_name_below_the_folder_of_its_input_is_taken(path: str) -> None:
    assert refusal(path) is None


NAMES = ["", ".", "..", "a\0b", "a/..", "../a", "a/../b", "a/./b", "a//b", "a/", "/a"]
ELSEWHERE = """a .hidden run.json/a xrun.json run.jsonx runxjson RUN.JSON /run.json manifest/0000.parquet
    manifest/000000.parquet manifest/0000a.parquet manifest/00000.parquet.x manifest/00000xparquet
    manifest/../run.json commits/00000001.json parts/a.parquet control.json _inputs/a.tar _inputs/0123/a.tar
    _inputs/00000000000000000/a.tar _inputs/0123g/a.tar _inputs/ABCDE/a.tar _inputs/01234 x_inputs/01234/a.tar
    /out/_inputs/01234/a.tar"""


@pytest.mark.parametrize(
    "path", [*(f"{FOLDER}/{name}" for name in NAMES), *NAMES[1:], "run.json\n", *ELSEWHERE.split()]
)
def test_a_name_of_anything_else_is_refused(path: str) -> None:
    error = refusal(path)
    assert isinstance(error, InputError | MalformedError)
    assert isinstance(error, MalformedError) or (error.code, repr(path) in error.message) == ("outside_root", True)


def test_a_name_that_no_field_can_hold_is_refused() -> None:
    for path in ("", f"{FOLDER}/{'x' * 8_192}", f"{FOLDER}/\ud800"):
        assert isinstance(refusal(path), MalformedError), path[:80]


def test_a_file_is_not_sent_twice_nor_as_a_folder_of_another() -> None:
    twice = refusal(f"{FOLDER}/a", "run.json", f"{FOLDER}/a")
    above = [refusal(*pair) for pair in ((f"{FOLDER}/a", f"{FOLDER}/a/b"), (f"{FOLDER}/a/b/c", f"{FOLDER}/a"))]
    assert [error and error.code for error in (twice, *above)] == ["outside_root"] * 3
    assert refusal(f"{FOLDER}/a", f"{FOLDER}/ab/c") is None


@pytest.mark.parametrize("name", [b"\xe9", b"caf\xe9.tar", b"\xff\xfe", b"a\xed\xa0\x80", b"cut\xc3"])
def test_an_input_whose_name_is_not_utf_8_is_not_sent(name: bytes) -> None:
    source = f"/data/{os.fsdecode(name)}"
    inputs = UploadedInputs("/out")
    for path in (source, f"{source}/"):
        with pytest.raises(InputError) as caught:
            inputs.relocate(Unit(kind="webdataset", source=path))
        assert (caught.value.code, repr(path) in caught.value.message) == ("bad_name", True)
    assert inputs.files == {}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/data/a.tar", "a.tar"),
        ("/data/.hidden", ".hidden"),
        ("/a\nb", "a\nb"),
        ("/\udce9/ü", "ü"),
        ("/d//", "d"),
        ("/", "input"),
    ],
)
def test_an_input_is_sent_by_its_own_name_which_the_writer_takes(source: str, name: str) -> None:
    inputs = UploadedInputs("/out")
    unit = inputs.relocate(Unit(kind="webdataset", source=source))
    ((path, at),) = inputs.files.items()
    assert (unit.source, Path(path).name, at) == (f"/out/{path}", name, source)
    assert refusal(path) is None
