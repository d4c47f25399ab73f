"""Joins a Ray cluster that exists, for workers and for trainings."""

from __future__ import annotations

import io
import os
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, suppress
from typing import Any, TextIO

from embq.core.errors import AwayError, ConfigError, EmbqError

NOISE = (
    "(PlacementGroupCleaner ",
    "has constructor arguments in the object store and max_restarts > 0",
    "A worker died or was killed while executing a task",
)
"""Lines with one of these are dropped. The first one's process asks every second for the API of Ray's dashboard, and
complains if that is not installed; the second one is about an actor of Ray's own; embq reports the third."""


class FilteredStream(io.TextIOBase):
    """Writes whole lines to another stream, without `NOISE`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""

    def write(self, text: str) -> int:
        """Write complete lines; an incomplete one waits."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if not any(noise in line for noise in NOISE):
                self._stream.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def fileno(self) -> int:
        """The stream's descriptor."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """True if the stream is a terminal."""
        return self._stream.isatty()


START = "start one with `ray start --head --port=26379`; 6379, which Ray takes by default, is also Redis' port"


CONNECT_S, ANSWER_S = 10.0, 5.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of an HTTP/2 client, such as gRPC: the preface and empty settings (RFC 9113, 3.4)."""
_SETTINGS = b"\4"
"""Type of a server's first frame, behind three bytes of its length."""


def check_answer(text: str) -> None:
    """Check what listens at HOST:PORT; Ray itself would wait for a minute without an explanation.

    Raises AwayError if nothing does, ConfigError if it is another program.
    """
    host, _, port = text.rpartition(":")
    answer = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S) as connection:
            connection.settimeout(ANSWER_S)
            with suppress(OSError), connection.makefile("rb") as received:
                connection.sendall(_PREFACE)
                answer = received.read(4)
    except OSError as error:
        raise AwayError(
            f"no Ray answers at {text}: {error.strerror or error}",
            next_step=f"check the address of the cluster's head, and the firewall; {START}",
            code="ray_away",
        ) from error
    if answer[3:] == _SETTINGS:
        return
    # Redis answers what it does not understand with an error, that of a server with a password included.
    program = "a Redis" if answer[:1] in (b"-", b"+") else "another program"
    raise ConfigError(
        f"{program} answers at {text}, not Ray",
        next_step=f"give the address of the cluster's head; {START}",
        code="ray_away",
    )


_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")


def settle(address: str) -> None:
    """Set what Ray reads from the environment at its import."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "local" and "RAY_AUTH_MODE" not in os.environ:
        # Ray would write a token into the user's home, which turns authentication on for every later cluster of theirs.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16))


@contextmanager
def of_our_own(address: str) -> Iterator[dict[str, Any]]:
    """Settings of a cluster that lasts for the block; none for an existing cluster."""
    if address != "local":
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        # An answer of Ray's own over HTTP is of no use to us, and starting its server takes seconds.
        yield {"include_dashboard": False, "_temp_dir": folder}


def join(ray: Any, address: str, settings: Mapping[str, Any]) -> None:
    """Connect the module ray to a cluster; AwayError or ConfigError if that is not possible.

    Args:
        settings: further ones of `ray.init`.
    """
    if address not in ("auto", "local") and not os.environ.get("RAY_USE_TLS"):
        check_answer(address)
    with tempfile.TemporaryFile() as written:
        try:
            # Ray's workers import from the folder that it is called in; in this one only root can put modules.
            with _standard_error_in(written.fileno()), chdir("/"):
                ray.init(address=address, logging_level="ERROR", **settings)
        except Exception as error:
            written.seek(0)
            raise _refused(address, error, written.read().decode(errors="replace")) from error


@contextmanager
def _standard_error_in(file: int) -> Iterator[None]:
    """Redirect standard error, below Python too, into a file."""
    sys.stderr.flush()
    saved = os.dup(2)
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _refused(address: str, error: Exception, written: str) -> EmbqError:
    """The error of a connection that Ray refuses.

    Args:
        error: what it raised.
        written: to standard error; only this tells that a token is missing or wrong.
    """
    if "Version mismatch" in str(error) and len(versions := _VERSIONS.findall(str(error))) == 2:
        (theirs, their_python), (ours, our_python) = versions
        return ConfigError(
            f"the Ray cluster at {address} has Ray {theirs} and Python {their_python}, "
            f"this machine Ray {ours} and Python {our_python}",
            next_step="install the same version of Ray, and Python of the same minor version, on all nodes and here",
            code="other_versions",
        )
    if "InvalidAuthToken" in written or "authentication token" in str(error).lower():
        return ConfigError(
            f"the Ray cluster at {address} asks for a token, and takes none of ours",
            next_step="on every node RAY_AUTH_MODE=token, and in RAY_AUTH_TOKEN_PATH the file of its head's token",
            code="ray_away",
        )
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return AwayError(
        f"the Ray cluster at {address} cannot be joined: {first}",
        next_step=f"call embq on a node of it (`ray start --address=HOST:PORT` makes this machine one); {START}",
        code="ray_away",
    )
