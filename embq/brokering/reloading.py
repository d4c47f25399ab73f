"""Telling a running server that its users have changed."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from redis.exceptions import ResponseError

from core.broker.client import connect, reach
from core.broker.users import role_of
from core.errors import ConfigError
from core.settings import Settings
from embq.options import required_url


def reload(settings: Settings, folder: Path) -> list[str]:
    """Have the broker read its users.acl again, and everybody log in again; gives the users that may come in now.

    Args:
        settings: with the broker's URL, whatever user it names.
        folder: that `embq broker init` has made, with the password of the user admin.

    Raises:
        ConfigError: the password cannot be read, or the server has no users.acl or cannot read it.
    """
    path = folder / "admin" / "password"
    try:
        password = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            next_step="name the folder that `embq broker init` has made, on the machine that has its admin's password",
        ) from error
    url = _as_admin(required_url(settings))
    with connect(url, password=password) as client:
        reach(client, url)
        try:
            client.acl_load()
        except ResponseError as error:
            raise ConfigError(
                f"the broker cannot read its users again: {error}",
                next_step="start it with --aclfile and the users.acl that `embq broker init` has made",
                code="broker",
            ) from error
        users = sorted(filter(role_of, (_text(user) for user in client.acl_users())))
        for user in users:
            # The server may leave in who came with an old password; who has the new one comes back at once.
            client.client_kill_filter(user=user, skipme=True)
        return users


def _as_admin(url: str) -> str:
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"admin@{place}"))


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
