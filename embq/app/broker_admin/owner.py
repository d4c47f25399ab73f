"""Ownership of files that root creates in a container for services of another user."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from embq.core.errors import ConfigError, UsageError

_OURS = re.compile(r"users\.acl|password|(ca|server)\.(crt|key)")


@dataclass(frozen=True, slots=True)
class Owner:
    """A user id and a group id."""

    uid: int
    gid: int

    @classmethod
    def parse(cls, text: str) -> Owner:
        """From "UID:GID"; UsageError for anything else."""
        if not re.fullmatch(r"\d+:\d+", text):
            raise UsageError(f"--owner {text!r} is not UID:GID", next_step="for example --owner 1000:1000; see `id`")
        uid, gid = text.split(":")
        return cls(int(uid), int(gid))

    def take_ownership(self, folder: Path, users: Sequence[str]) -> list[Path]:
        """Become owner of the files of `embq broker init` in a folder; returns those that were changed.

        The folder itself is included if it is root's and holds nothing else but the stack's `storage`.
        """
        ours = {"ca", "broker", *users}
        foreign = [path for path in folder.iterdir() if path.name not in {*ours, "storage"}]
        itself = [folder] if folder.stat().st_uid == 0 and not foreign else []
        return [path for path in [*itself, *_ours(folder, sorted(ours))] if self._own(path)]

    def give(self, folder: Path) -> bool:
        """Become owner of an empty folder of root, such as a new Docker volume; False for any other.

        UsageError if there is no such folder.
        """
        if not folder.is_dir():
            raise UsageError(f"--give {folder}: there is no such folder", next_step="mount it, or leave it out")
        if folder.stat().st_uid != 0 or any(folder.iterdir()):
            return False
        return self._own(folder)

    def _own(self, path: Path) -> bool:
        status = path.lstat()
        if (status.st_uid, status.st_gid) == (self.uid, self.gid):
            return False
        try:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be given to {self.uid}:{self.gid}: {error.strerror}",
                next_step="only root can give files away, and where it may write: run it so, or leave --owner out",
            ) from error
        return True


def _ours(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Folders with these names, and embq's files in them; links are not followed."""
    for name in [*names, "broker/tls"]:
        below = folder / name
        if below.is_symlink() or not below.is_dir():
            continue
        yield below
        yield from (path for path in sorted(below.iterdir()) if path.is_file() and _OURS.fullmatch(path.name))
