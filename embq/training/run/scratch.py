"""A temporary folder; one left by a killed process is removed by the next."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from embq.core.storage.durable import try_lock

_TOKEN = re.compile(r"[0-9a-f]{16}")


@contextmanager
def scratch(parent: Path, prefix: str, *, mode: int = 0o777) -> Iterator[Path]:
    """A new folder in `parent`, whose name begins with `prefix`; removed after the block, unless it was renamed.

    It is locked meanwhile, which the kernel undoes when the process ends in whatever way. Folders of the same prefix
    that are not locked are removed first. Their names hold that of this host, because a lock may be unknown to others.

    Raises OSError if it cannot be made.
    """
    prefix = f"{prefix}{socket.gethostname()}-"
    _sweep(parent, prefix)
    folder, held = _created(parent, prefix, mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _created(parent: Path, prefix: str, mode: int) -> tuple[Path, int]:
    """(new folder, descriptor that locks it)."""
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(8)}"
        folder.mkdir(mode)
        # Until it is locked, another process may take it for one that was left behind.
        with suppress(FileNotFoundError):
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            if _locked(held) is not False and folder.exists():
                return folder, held
            os.close(held)


def _sweep(parent: Path, prefix: str) -> None:
    """Remove folders that processes of this user have left; what cannot be locked or removed stays."""
    with suppress(OSError):
        for entry in os.scandir(parent):
            if entry.name.startswith(prefix) and _TOKEN.fullmatch(entry.name.removeprefix(prefix)):
                _remove_if_left(entry.path)


def _remove_if_left(folder: str) -> None:
    with suppress(OSError):
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(held).st_uid == os.geteuid() and _locked(held):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(held)


def _locked(held: int) -> bool | None:
    """True if the folder could be locked; None if the file system has no locks, and folders are left alone."""
    try:
        return try_lock(held)
    except OSError:
        return None
