"""Names that are made from data stay below their folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from embq.core.errors import MalformedError, OutsideError
from embq.core.storage import beneath
from embq.core.storage.objects import ObjectPath

OUTSIDE = ["", ".", "..", "../x", "a/../../x", "a/./b", "a//b", "/etc/passwd", "a/", "a\0b", "x/../../.."]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "a" / "b").mkdir(parents=True)
    (made / "a" / "b" / "file").write_bytes(b"inside")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"outside")
    (made / "link").symlink_to(outside)
    (made / "a" / "linked").symlink_to(outside / "file")
    (made / "dangling").symlink_to(tmp_path / "nowhere")
    return made


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_could_lead_out_is_refused(root: Path, name: str) -> None:
    for use in (beneath.below, beneath.open_file, beneath.unlink, beneath.remove):
        with pytest.raises(OutsideError):
            use(root, name)
    with pytest.raises(OutsideError):
        beneath.below(ObjectPath("s3://bucket/prefix"), name)


@pytest.mark.parametrize("name", ["link/file", "a/linked", "dangling"])
def test_a_link_is_refused_wherever_it_stands(root: Path, name: str) -> None:
    for use in (beneath.below, beneath.open_file, beneath.reader):
        with pytest.raises(OutsideError, match="is a symbolic link"):
            use(root, name)
    with pytest.raises(OutsideError, match="is a symbolic link"):
        beneath.open_file(root, name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert (root.parent / "outside" / "file").read_bytes() == b"outside"
    assert not (root.parent / "nowhere").exists()


def test_a_folder_that_is_a_link_is_not_listed_not_emptied_and_not_extended(root: Path) -> None:
    with pytest.raises(OutsideError, match="is a symbolic link"):
        beneath.listing(root, "link")
    with pytest.raises(OutsideError, match="is a symbolic link"):
        beneath.remove(root, "link/file")
    with pytest.raises(OutsideError, match="is a symbolic link"), beneath.folder(root, "link/new", make=True):
        pass
    with pytest.raises(OutsideError, match="is a symbolic link"):
        beneath.unlink(root, "link/file")
    beneath.remove(root, "link")
    assert [path.name for path in (root.parent / "outside").iterdir()] == ["file"]


def test_what_is_inside_is_used(root: Path) -> None:
    assert beneath.below(root, "a/b/file") == root / "a" / "b" / "file"
    assert beneath.below(root, "not/there") == root / "not" / "there"
    assert beneath.below(ObjectPath("s3://bucket/prefix"), "a/b") == ObjectPath("s3://bucket/prefix/a/b")
    assert beneath.read_bytes(root, Path("a/b/file"), most_bytes=6) == b"inside"
    assert sorted(name for name, _ in beneath.listing(root, "a")) == ["b", "linked"]
    with beneath.folder(root, "new/deep", make=True) as descriptor:
        os.close(os.open("made", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
    assert (root / "new" / "deep" / "made").exists()
    beneath.unlink(root, "a/linked")
    assert (root.parent / "outside" / "file").exists()
    beneath.unlink(root, "a/gone", missing_ok=True)
    beneath.remove(root, "a")
    assert not (root / "a").exists()


def test_a_file_that_is_too_long_is_not_read(root: Path) -> None:
    with pytest.raises(MalformedError, match="more than 5 bytes"):
        beneath.read_bytes(root, "a/b/file", most_bytes=5)


def test_the_root_itself_may_be_a_link(root: Path) -> None:
    alias = root.parent / "alias"
    alias.symlink_to(root)
    assert beneath.read_bytes(alias, "a/b/file", most_bytes=6) == b"inside"
    assert beneath.below(alias, "a/b") == alias / "a" / "b"


def test_links_in_a_tree_that_is_removed_keep_their_targets(root: Path) -> None:
    (root / "a" / "out").symlink_to(root.parent / "outside")
    beneath.remove(root, "a")
    assert (root.parent / "outside" / "file").read_bytes() == b"outside"


def test_a_pipe_is_refused_at_once(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(OutsideError, match="no regular file"):
        beneath.open_file(root, "pipe")


def test_a_disk_without_inodes_is_told_as_full_and_not_as_a_missing_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def full(name: str, flags: int, *more: int, **options: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        return opened(name, flags, *more, **options)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match="No space left on device"):
        beneath.open_file(root, "a/new", os.O_WRONLY | os.O_CREAT)


@pytest.mark.parametrize("name", ["run[1]", "*?[z]", "new\nline", "caf\u00e9", os.fsdecode(b"caf\xe9")])
def test_any_name_that_the_file_system_takes_is_a_name(tmp_path: Path, name: str) -> None:
    with beneath.folder(tmp_path, name, make=True):
        pass
    assert [found for found, _ in beneath.listing(tmp_path)] == [name]
    beneath.remove(tmp_path, name)


def test_no_descriptor_stays_open(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("a/b/file", "link/file", "not/there", "a/linked", ".."):
        for use in (beneath.open_file, beneath.listing):
            try:
                found = use(root, name)
            except (OSError, OutsideError):
                continue
            if isinstance(found, int):
                os.close(found)
    assert len(os.listdir("/proc/self/fd")) == before
