"""An output folder that comes from somebody else: an archive, a download, a shared disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core.broker import connect
from core.embedded import EmbeddedServer, keep_to_ourselves, kept_off
from core.errors import EmbqError, OutsideError
from embq.children import Child

# --- the state of the private server ---


def command(*words: str) -> bytes:
    """One command as an append-only file holds it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words)


def planted_state(folder: Path) -> Path:
    """A state folder of which every file would do something, were it used."""
    data = folder / "appendonlydir"
    data.mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    (data / "appendonly.aof.manifest").write_text("file appendonly.aof.1.incr.aof seq 1 type i\n")
    (data / "appendonly.aof.1.incr.aof").write_bytes(command("SELECT", "0") + command("SET", "planted", "1"))
    (folder / "appendonly.aof").write_bytes(command("SELECT", "0") + command("SET", "planted", "1"))
    (folder / "password").write_text("0" * 32 + "\nmaxclients 77")
    (folder / "server.conf").write_text("maxclients 77\n")
    return folder


def test_no_state_of_a_folder_reaches_the_server(short_tmp: Path) -> None:
    """Finding 3: a newline in `_broker/password` added directives (`loadmodule`), and the append-only file is a list of
    commands that the server carries out when it starts, MODULE LOAD among them."""
    with EmbeddedServer(planted_state(short_tmp / "_broker")) as server, connect(server.url) as client:
        assert client.keys() == []
        assert client.config_get("maxclients") != {"maxclients": "77"}


@pytest.mark.parametrize("entry", ["server.log", "password", "server.conf", "lock", "server.sock", "appendonlydir"])
def test_a_link_in_the_state_folder_is_never_followed(short_tmp: Path, entry: str) -> None:
    """Finding 3: a link named `server.log` or `lock` had a file of the user overwritten or appended to."""
    target = short_tmp / "profile"
    target.write_text("mine")
    folder = short_tmp / "out" / "_broker"
    folder.mkdir(parents=True, mode=0o700)
    (folder / entry).symlink_to(target)
    if entry == "lock":
        with pytest.raises(OutsideError, match="is a symbolic link"):
            EmbeddedServer(folder).start()
    else:
        with EmbeddedServer(folder), kept_off(folder) as alone:
            assert not alone
    assert target.read_text() == "mine"
    assert sorted(path.name for path in short_tmp.iterdir()) == ["out", "profile"]


def test_a_state_folder_that_is_a_link_is_refused(short_tmp: Path) -> None:
    """Finding 3: the server's files went wherever the link led to."""
    elsewhere = short_tmp / "elsewhere"
    elsewhere.mkdir()
    folder = short_tmp / "_broker"
    folder.symlink_to(elsewhere)
    for use in (keep_to_ourselves, lambda path: EmbeddedServer(path).start(), lambda path: kept_off(path).__enter__()):
        with pytest.raises(OutsideError, match="is a symbolic link") as caught:
            use(folder)
        assert caught.value.next_step
    assert list(elsewhere.iterdir()) == []


def test_a_server_is_looked_for_with_a_password_of_ours_only(own_server: EmbeddedServer) -> None:
    """Finding 3: what stood in `_broker/password` became part of a URL and of a command."""
    (own_server.folder / "password").chmod(0o600)
    assert EmbeddedServer.find(own_server.folder) == own_server.url
    (own_server.folder / "password").write_text("0" * 32 + "@elsewhere/")
    assert EmbeddedServer.find(own_server.folder) == ""
    (own_server.folder / "password").write_bytes(b"\xff" * 32)
    assert EmbeddedServer.find(own_server.folder) == ""
    (own_server.folder / "password").unlink()
    os.mkfifo(own_server.folder / "password")
    assert EmbeddedServer.find(own_server.folder) == ""


@pytest.mark.parametrize("linked", ["_logs", "_logs/writer.log"])
def test_logs_are_not_written_through_a_link(tmp_path: Path, linked: str) -> None:
    """Finding 3: lines of a log, with names from the folder in them, were appended to a file of the user."""
    target = tmp_path / "target"
    out = tmp_path / "out"
    out.mkdir()
    if linked == "_logs":
        target.mkdir()
        (target / "writer.log").write_text("mine")
    else:
        (out / "_logs").mkdir()
        target.write_text("mine")
    (out / linked).symlink_to(target)
    log = out / "_logs" / "writer.log"
    child = Child("writer", ["--help"], again=[], log=log, broker_url="redis://127.0.0.1:1")
    try:
        with pytest.raises(EmbqError, match="is a symbolic link"):
            child.start()
    finally:
        child.stop(10.0)
    assert log.read_text() == "mine"
