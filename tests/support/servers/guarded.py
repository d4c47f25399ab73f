"""A server with the users that `embq broker init` makes, private to one test or one module."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from embq.app.broker_admin import accounts
from embq.core.broker.client import connect
from embq.core.broker.embedded import server_binary
from embq.core.process.children import die_with_parent
from tests.support.waiting import wait_until

_REDIS = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not on PATH")
SERVERS = ["valkey", pytest.param("redis", marks=_REDIS)]
SERVERS_OF_WHOLE_RUNS = ["valkey", pytest.param("redis", marks=[_REDIS, pytest.mark.slow])]
"""Rights of users are tried on both servers command by command (tests/contract/test_roles.py); runs take long."""


class GuardedServer:
    """A server that lets in nobody but its users, with its append-only file on.

    Attributes:
        folder: the secrets, one folder for each user.
    """

    def __init__(self, folder: Path, binary: str) -> None:
        self.folder = folder / "secrets"
        self._data = folder
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        accounts.make(self.folder, ["worker-gpu2"])

    def start(self) -> None:
        """Start it, or start it again with what its file holds."""
        (self._data / "s").unlink(missing_ok=True)
        options = {
            "port": "0",
            "unixsocket": self._data / "s",
            "dir": self._data,
            "save": "",
            "appendonly": "yes",
            "aclfile": self.folder / "broker" / "users.acl",
        }
        self._process = subprocess.Popen(
            [self._binary, *(str(word) for name, value in options.items() for word in (f"--{name}", value))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        wait_until(self._answers, 30)

    def _answers(self) -> bool:
        try:
            with self.client("admin") as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    def stop(self) -> None:
        """Let it write its file and end."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)

    def url(self, user: str) -> str:
        """With the user and without the password, as services have it."""
        return f"unix://{user}@{self._data / 's'}"

    def client(self, user: str, **options: Any) -> redis.Redis:
        """A client that is logged in as one of the users."""
        return connect(self.url(user), password=self.password_file(user).read_text().strip(), **options)

    def password_file(self, user: str) -> Path:
        """The file with the user's password."""
        return self.folder / user / "password"

    def environment(self, user: str) -> dict[str, str | None]:
        """The environment of a command that a user gives."""
        return {"EMBQ_BROKER_URL": self.url(user), "EMBQ_BROKER_PASSWORD_FILE": str(self.password_file(user))}

    def refused(self) -> list[str]:
        """Refusals of the server since the last call, as "user: what, for which reason"."""
        with self.client("admin") as client:
            entries = client.acl_log()
            client.acl_log_reset()
        told = [{_text(name): _text(value) for name, value in entry.items()} for entry in entries]
        return [f"{one['username']}: {one['object']}, {one['reason']} in {one['context']}" for one in told]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@contextmanager
def guarded_server(name: str) -> Iterator[GuardedServer]:
    """A running server: "valkey", or "redis" from PATH."""
    binary = str(server_binary()) if name == "valkey" else shutil.which("redis-server") or ""
    with tempfile.TemporaryDirectory(prefix="embq-t") as folder:
        server = GuardedServer(Path(os.path.realpath(folder)), binary)
        server.start()
        try:
            yield server
        finally:
            server.stop()
