"""Other users of the same machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import OutputError
from embq.worker.embedders.device.tuning import lacking

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
LONG = "x" * 120
"""A folder name with which a path is too long for a unix socket."""


@pytest.fixture
def tmpdir_of_all(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that every user may write to, as /tmp is."""
    folder = short_tmp / "t"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@as_root
def test_a_state_folder_of_another_user_is_refused(short_tmp: Path) -> None:
    """Its owner chooses what the server loads, and reads its password."""
    folder = short_tmp / "_broker"
    folder.mkdir(mode=0o700)
    os.chown(folder, 54321, 54321)
    with pytest.raises(OutputError, match="belongs to another user") as caught:
        EmbeddedServer(folder).start()
    assert "remove it" in caught.value.next_step
    assert EmbeddedServer.find(folder) == ""
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_state_folder_that_others_may_write_to_is_refused(short_tmp: Path, mode: int) -> None:
    folder = short_tmp / "_broker"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(OutputError, match="may be written by other users") as caught:
        EmbeddedServer(folder).start()
    assert "remove it" in caught.value.next_step
    assert EmbeddedServer.find(folder) == ""


def test_a_folder_that_others_may_read_is_closed(short_tmp: Path) -> None:
    """They would read the password in it."""
    folder = short_tmp / "_broker"
    folder.mkdir()
    folder.chmod(0o755)
    with EmbeddedServer(folder):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_the_socket_of_a_long_path_is_not_made_behind_a_link(short_tmp: Path, tmpdir_of_all: Path) -> None:
    """The name below /tmp is known beforehand, and a link there led the server into another folder."""
    server = EmbeddedServer(short_tmp / LONG / "_broker")
    elsewhere = short_tmp / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    server.socket.parent.symlink_to(elsewhere)
    try:
        with pytest.raises(OutputError, match="is a symbolic link"):
            server.start()
    finally:
        server.stop()
    assert elsewhere.stat().st_mode & 0o777 == 0o755
    assert list(elsewhere.iterdir()) == []


def test_a_socket_folder_that_others_may_write_to_is_refused(short_tmp: Path, tmpdir_of_all: Path) -> None:
    server = EmbeddedServer(short_tmp / LONG / "_broker")
    server.socket.parent.mkdir()
    server.socket.parent.chmod(0o777)
    try:
        with pytest.raises(OutputError, match="may be written by other users") as caught:
            server.start()
    finally:
        server.stop()
    assert "TMPDIR" in caught.value.next_step


def test_compiled_code_of_another_user_is_not_run(tmpdir_of_all: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    cache = tmpdir_of_all / f"embq-inductor-{os.getuid()}"
    assert "inductor" not in lacking()
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o777)
    assert f"{cache} is another user's or others may write there" in lacking()
    cache.rmdir()
    cache.symlink_to(tmpdir_of_all)
    assert f"{cache} is another user's" in lacking()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmpdir_of_all / "mine"))
    assert "inductor" not in lacking()


@as_root
def test_a_cache_of_compiled_code_that_another_user_made_first_is_refused(
    tmpdir_of_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    cache = tmpdir_of_all / f"embq-inductor-{os.getuid()}"
    cache.mkdir(mode=0o700)
    os.chown(cache, 54321, 54321)
    assert f"{cache} is another user's" in lacking()
