"""Users of a broker as files: a folder with a password for each, and users.acl for the server.

The server gets SHA-256 digests of passwords of 256 random bits; a user's folder is copied to its machine.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import redis
from redis.exceptions import ResponseError
from rq.utils import as_text

from embq.app.cli.shared_options import required_url
from embq.core.broker.client import connect, reach
from embq.core.broker.users import ROLES, acl_line, role_of
from embq.core.errors import ConfigError, UsageError
from embq.core.settings import Settings
from embq.core.storage.durable import overwrite

_PRIVATE = 0o600
"""Mode of files with passwords, hashes of them and certificates."""


def administrator(settings: Settings, folder: Path) -> redis.Redis:
    """A client of the broker as the user admin; see `reload`, also for what it raises."""
    path = folder / "admin" / "password"
    try:
        password = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            next_step="name the folder that `embq broker init` has made, on the machine that has its admin's password",
        ) from error
    parts = urlsplit(required_url(settings))
    url = urlunsplit(parts._replace(netloc=f"admin@{parts.netloc.rpartition('@')[2]}"))
    client = connect(url, password=password)
    reach(client, url)
    return client


def reload(settings: Settings, folder: Path) -> list[str]:
    """Reload users.acl in the broker, and disconnect users that were removed or changed; returns those that it has now.

    Args:
        settings: with the broker's URL, whatever user it names.
        folder: that `embq broker init` has made, with the password of the user admin; users.acl may be elsewhere.

    Raises:
        ConfigError: the password cannot be read, or the server has no users.acl, cannot read it, or reads another one.
    """
    with administrator(settings, folder) as client:
        previous_lines = set(map(as_text, client.acl_list()))
        try:
            client.acl_load()
        except ResponseError as error:
            raise ConfigError(
                f"the broker cannot read its users again: {error}",
                next_step="start it with --aclfile and the users.acl that `embq broker init` has made",
                code="broker",
            ) from error
        users = sorted(filter(role_of, map(as_text, client.acl_users())))
        # The server ends connections of removed users, but keeps those with an old password. Redis 7 ends all of them.
        for line in set(map(as_text, client.acl_list())) - previous_lines:
            client.client_kill_filter(user=line.split()[1], skipme=True)
    expected = sorted(users_of(folder))
    if expected and users != expected:
        raise ConfigError(
            f"the broker does not read {folder / 'broker' / USERS}: it has the users {', '.join(users)}, "
            f"not {', '.join(expected)}",
            next_step="copy this file to the one that its `aclfile` names, and reload again",
            code="broker",
        )
    return users


USERS = "users.acl"
DEFAULT_USER = "user default off resetpass ~* &* +@all"
"""The default user cannot log in. It keeps its permissions: Redis 7.0 reads its append-only file as this user, and
without them skips every transaction there, which is all that scripts have written."""


@dataclass(slots=True, kw_only=True)
class Changes:
    """Files that were written or removed.

    Attributes:
        paths: in order.
        users_changed: whether a running server has to reload users.acl.
    """

    paths: list[Path] = field(default_factory=list)
    users_changed: bool = False


def make(folder: Path, further: Sequence[str] = ()) -> Changes:
    """Give every role and these additional users a password and a line in `folder`/broker/users.acl.

    Existing passwords stay; a removed password of a role or of one of `further` is replaced. Users whose folder is
    elsewhere are unchanged. The permissions of all are updated to this version; lines of foreign users are kept.

    Raises:
        UsageError: a user whose name does not begin with a role.
        ConfigError: users.acl or a password cannot be read.
    """
    for user in further:
        if not role_of(user):
            raise UsageError(
                f"{user!r} is no user of embq: a name is a role ({', '.join(ROLES)}), a hyphen and letters or digits",
                next_step="for example --user worker-gpu2",
            )
    path = folder / "broker" / USERS
    _own_folder(folder / "broker")
    lines, changes = _read(path), Changes()
    existing = [user for user in lines if role_of(user)]
    for user in dict.fromkeys([*ROLES, *existing, *further]):
        digests = [word[1:] for word in lines.get(user, "").split() if word.startswith("#")]
        create = user in ROLES or user in further
        if (digest := _password_digest(folder / user, create=create, changes=changes)) and digest not in digests:
            is_new = folder / user / "password" in changes.paths
            digests = [digest] if is_new else [*digests, digest]
        lines[user] = acl_line(user, digests)
    _write(path, lines, changes)
    return changes


def remove(folder: Path, users: Sequence[str]) -> Changes:
    """Remove users from users.acl, and their passwords; UsageError for a role or an unknown user."""
    path = folder / "broker" / USERS
    lines = _read(path)
    for user in users:
        if user in ROLES:
            raise UsageError(
                f"{user} is a role, and stays",
                next_step=f"to give it another password, remove {folder / user / 'password'} and make what is missing",
            )
        if user not in lines or not role_of(user):
            removable = [name for name in lines if role_of(name) and name not in ROLES]
            raise UsageError(
                f"{path} has no user {user}", next_step=f"it has {', '.join(removable) or 'no others than the roles'}"
            )
    changes = Changes()
    _write(path, {user: line for user, line in lines.items() if user not in users}, changes)
    for file in (folder / user / name for user in users for name in ("password", "ca.crt")):
        if file.exists():
            file.unlink()
            changes.paths.append(file)
    for user in users:
        with suppress(OSError):  # it was never there, or holds other files
            (folder / user).rmdir()
    return changes


def users_of(folder: Path) -> list[str]:
    """The users of embq in users.acl."""
    return [user for user in _read(folder / "broker" / USERS) if role_of(user)]


def hand_out_authority(folder: Path) -> list[Path]:
    """Copy `folder`/ca/ca.crt into each user's folder if it differs there; returns the files that were written."""
    certificate = (folder / "ca" / "ca.crt").read_bytes()
    written = []
    for user in users_of(folder):
        path = folder / user / "ca.crt"
        if path.parent.is_dir() and (not path.exists() or path.read_bytes() != certificate):
            overwrite(path, certificate, mode=_PRIVATE)
            written.append(path)
    return written


def _password_digest(folder: Path, *, create: bool, changes: Changes) -> str:
    """SHA-256 of the password in a user's folder, which is created if `create`; "" for none."""
    path = folder / "password"
    if not path.exists():
        if not create:
            return ""
        _own_folder(folder)
        overwrite(path, f"{secrets.token_hex(32)}\n".encode(), mode=_PRIVATE)
        changes.paths.append(path)
    try:
        password = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    if not password:
        raise ConfigError(f"{path} is empty", next_step="remove it: another password is made then")
    return hashlib.sha256(password.encode()).hexdigest()


def _read(path: Path) -> dict[str, str]:
    """User -> its line, without the default user."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if wrong := next((words for words in lines if words[0] != "user" or len(words) < 2), None):
        raise ConfigError(
            f"{path} has a line that is none of users.acl: {' '.join(wrong)[:60]}",
            next_step="remove the line, or the file: it is made anew from the passwords that are there",
        )
    return {words[1]: " ".join(words) for words in lines if words[1] != "default"}


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {error}", next_step="run it as the user whom it belongs to, or as root")


def _write(path: Path, lines: dict[str, str], changes: Changes) -> None:
    text = "".join(f"{line}\n" for line in [DEFAULT_USER, *lines.values()])
    previous_text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text == previous_text:
        return
    overwrite(path, text.encode(), mode=_PRIVATE)
    changes.paths.append(path)
    changes.users_changed = bool(previous_text)


def _own_folder(folder: Path) -> None:
    """Create a folder of mode 0700, or restrict an existing one to that."""
    if not folder.parent.exists():
        folder.parent.mkdir(mode=0o700, parents=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
