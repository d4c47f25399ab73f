"""The folder of an index, and in it the folder of one build that is under way."""

from __future__ import annotations

import fcntl
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core import wire
from core.errors import MalformedError, OutputError, TryLaterError
from core.storage.durable import overwrite, write_new
from indexer.writing import disk_error

MOST_BYTES = 1 << 26
"""Of a record: the list of what thousands of units have made."""
FILES, WORK, LOCK = "files", "_work", "_lock"


@contextmanager
def alone(index: Path) -> Iterator[None]:
    """Hold the index's lock for the length of the block; TryLaterError where another build or change has it."""
    try:
        index.mkdir(parents=True, exist_ok=True)
        lock = open(index / LOCK, "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise disk_error(error, index) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TryLaterError(
                f"another embq process is at work on the index {index}", next_step="wait for it, or stop it"
            ) from error
        yield


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where one build keeps what it makes.

    Attributes:
        index: folder of the index.
        build: id of the build.
    """

    index: Path
    build: str

    @property
    def folder(self) -> Path:
        """Sidecars, and payloads that only later stages of the build need."""
        return self.index / WORK / self.build

    @property
    def files(self) -> Path:
        """Payloads that the finished index consists of."""
        return self.index / FILES

    @property
    def spec(self) -> Path:
        """What the build is: written first, and never changed."""
        return self.folder / "build.json"

    def make(self) -> None:
        """Create the folders; OutputError where that is not possible."""
        for folder in (self.files, self.folder, self.folder / "tmp"):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise disk_error(error, folder) from error

    def temporary(self, name: str) -> Path:
        """A path for an unfinished file; a name of its own, so that two attempts never share one."""
        return self.folder / "tmp" / f"{secrets.token_hex(4)}-{name}"

    def read_spec(self) -> dict[str, Any]:
        """What the build is; OutputError where it cannot be read."""
        return read_json(self.spec)

    def write_once(self, path: Path, data: Mapping[str, Any]) -> bool:
        """Create a small file, complete and durable; False where it is there already. OutputError where impossible."""
        try:
            write_new(path, json.dumps(data, indent=1).encode() + b"\n", temporary=self.temporary(path.name))
        except FileExistsError:
            return False
        except OSError as error:
            raise disk_error(error, path) from error
        return True


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of ours; OutputError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return wire.read(dict[str, Any], file.read(MOST_BYTES + 1), what=str(path), most_bytes=MOST_BYTES)
    except (OSError, MalformedError) as error:
        raise OutputError(
            f"{path} cannot be read: {error}",
            next_step="build the index again with `embq index --rebuild`",
            code="index_damaged",
        ) from error


def write_current(path: Path, data: bytes) -> None:
    """Replace a small file as a whole, durably; OutputError where it cannot be written."""
    try:
        overwrite(path, data, temporary=path.with_name(f".{path.name}.{secrets.token_hex(4)}"))
    except OSError as error:
        raise disk_error(error, path) from error
