"""Checks of databases that are folders of this machine: their libraries take what lies there for their own.

A link in one leads their writes and deletions elsewhere, and some files of theirs name code or other paths.
"""

from __future__ import annotations

import json
import os
import pickle
import stat
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

from embq.core.errors import InputError
from embq.core.storage import beneath
from embq.core.storage.paths import is_url

RECORD_BYTES = 64 << 20
"""Largest JSON file of a database that is checked, and so opened."""


def local_folder(destination: str) -> Path | None:
    """The folder of a database on this machine; None for a server, or another machine's storage.

    Raises InputError `foreign_database` if it holds a link, a pipe or a device.
    """
    destination = destination.removeprefix("file://")
    if is_url(destination):
        return None
    for above, folders, files in os.walk(destination):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                mode = os.lstat(os.path.join(above, name)).st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    raise foreign(destination, f"{os.path.join(above, name)} is a link, or no regular file")
    return Path(destination)


def foreign(destination: object, why: str) -> InputError:
    """The error of a database that its library cannot be trusted to open."""
    return InputError(
        f"{destination} is no database that embq or its library has written: {why}",
        next_step="export into a new folder",
        code="foreign_database",
    )


def check_names(folder: Path, *, skipped: tuple[str, ...]) -> None:
    """Raise InputError `foreign_database` if a JSON file of a database has a name that leads out of it.

    Args:
        skipped: names of files with texts of users.
    """
    for path in sorted(folder.rglob("*.json*")):
        if path.name in skipped or not path.is_file():
            continue
        try:
            content = json.loads(beneath.read_bytes(folder, path.relative_to(folder), most_bytes=RECORD_BYTES))
            outside = next((text for text in _texts(content) if _leads_out(text)), None)
        except (ValueError, RecursionError) as error:
            raise foreign(folder, f"{path} is not readable") from error
        if outside is not None:
            raise foreign(folder, f"{path} names {outside[:200]!r}")


def _texts(content: Any) -> Iterator[str]:
    """All texts of a JSON value, names of members included."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        yield from content
        content = list(content.values())
    if isinstance(content, list):
        for member in content:
            yield from _texts(member)


def _leads_out(text: str) -> bool:
    parts = text.replace("\\", "/").split("/")
    return ".." in parts or (len(parts) > 1 and not parts[0])


class _Records(pickle.Unpickler):
    """Loads objects of the classes of one module alone."""

    classes: ModuleType

    def find_class(self, module: str, name: str) -> Any:
        """A model of pydantic, which does nothing when it is made; UnpicklingError for anything else."""
        kind = getattr(self.classes, name, None) if module == self.classes.__name__ else None
        if isinstance(kind, type) and hasattr(kind, "model_fields"):
            return kind
        raise pickle.UnpicklingError(f"its rows name {module}.{name}"[:200])


class PointsOnly:
    """In place of the module pickle in a library that keeps its rows so: loads records of the library alone.

    Args:
        classes: module of the records, which are models of pydantic.
        destination: for messages.
    """

    def __init__(self, classes: ModuleType, destination: str) -> None:
        self._classes, self._destination = classes, destination

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)

    def loads(self, data: bytes) -> Any:
        """A record; InputError `foreign_database` for any other object."""
        unpickler = _Records(BytesIO(data))
        unpickler.classes = self._classes
        try:
            record = unpickler.load()
            if type(record).__module__ != self._classes.__name__:
                raise pickle.UnpicklingError("a row is no record")
        except Exception as error:  # of any kind, says pickle
            raise foreign(self._destination, str(error)[:300]) from error
        return record
