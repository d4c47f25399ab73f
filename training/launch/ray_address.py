"""The address of a Ray cluster: its form, and whether it is a Ray that answers there."""

from __future__ import annotations

import re
import socket
from contextlib import suppress

from core.errors import AwayError, ConfigError, UsageError

START = "start one with `ray start --head --port=26379`; 6379, which Ray takes by default, is also Redis' port"

_HOST_PORT = re.compile(r"(?P<host>[^\s:/@\[\]]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>\d{1,5})")
_SCHEME = re.compile(r"(?P<scheme>[a-z]+)://(?P<rest>.*?)/?")

CONNECT_S, ANSWER_S = 10.0, 5.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What an HTTP/2 client, and so a gRPC one, says first: the preface and empty settings (RFC 9113, 3.4)."""
_SETTINGS_AT, _SETTINGS = 3, 4
"""Where a frame has its type, and the type of a server's first one."""


def check_address(text: str) -> None:
    """UsageError, with the right form, for what is no address of a Ray cluster."""
    if text in ("", "auto", "local"):
        return
    if (found := _SCHEME.fullmatch(text)) and found["scheme"] == "ray":
        raise UsageError(
            f"--ray-address {text}: ray:// is for Ray's client, which cannot hold a training",
            next_step="call embq on a node of the cluster, with the port of its head: --ray-address HOST:26379",
        )
    if found:
        raise UsageError(
            f"--ray-address {text}: an address of Ray has no {found['scheme']}:// before it",
            next_step=f"--ray-address {found['rest'] or 'HOST:26379'}",
        )
    if not (found := _HOST_PORT.fullmatch(text)) or not 0 < int(found["port"]) < 65536:
        raise UsageError(f"--ray-address {text}: this is no HOST:PORT", next_step="such as 10.0.0.1:26379, or auto")


def check_answer(text: str) -> None:
    """See who listens at HOST:PORT; Ray itself would wait for a minute, and not say who it was.

    Raises AwayError where nobody does, ConfigError where it is another program.
    """
    host, _, port = text.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S) as connection:
            said = _first_words(connection)
    except OSError as error:
        raise AwayError(
            f"no Ray answers at {text}: {error.strerror or error}",
            next_step=f"check the address of the cluster's head, and the firewall; {START}",
            code="ray_away",
        ) from error
    if said[_SETTINGS_AT : _SETTINGS_AT + 1] == bytes((_SETTINGS,)):
        return
    # Redis answers what it does not understand with an error, that of a server with a password included.
    who = "a Redis" if said[:1] in (b"-", b"+") else "another program"
    raise ConfigError(
        f"{who} answers at {text}, not Ray",
        next_step=f"give the address of the cluster's head; {START}",
        code="ray_away",
    )


def _first_words(connection: socket.socket) -> bytes:
    connection.settimeout(ANSWER_S)
    said = b""
    with suppress(OSError):
        connection.sendall(_PREFACE)
        while len(said) <= _SETTINGS_AT and (more := connection.recv(64)):
            said += more
    return said
