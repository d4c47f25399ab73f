"""Publication of versions, and removal of files that no version needs."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from embq.core.errors import TryLaterError
from embq.core.storage import beneath
from embq.core.storage.durable import drop, drop_in, fsync_folder, names_in
from embq.core.storage.objects import ObjectPath, unfinished
from embq.core.storage.paths import Place
from embq.index.index_files.files import FILES, MAP, WORK, disk_error, read_json, write_current
from embq.index.index_files.version import CURRENT, NAME, RECORD, Version, current_name, read_version

AT_ONCE = 16
"""Objects that are removed at a time."""

KEPT = 2
"""Versions that stay: the current one, and the one before, which readers may still have open."""


def publish(version: Version, small: Callable[[Path], None], *, to: ObjectPath | None = None) -> Version:
    """Make a version the current one; returns it with its name. The caller holds the index's lock.

    Args:
        small: writes what else belongs into the version's folder; the version has its name by then.
        to: a bucket's index, where the version's is only the folder with copies of its files.

    The folder is complete before it gets its name, and CURRENT is replaced after that: a reader sees one version or
    the other. Older versions stay until `sweep`.
    """
    index = to or version.index
    settle(index)
    numbers = [_number(name) for name in names_below(index) if NAME.fullmatch(name)]
    created = datetime.now(UTC).isoformat(timespec="seconds")
    named = replace(version, name=f"v{max(numbers, default=0) + 1:04d}", created=created)
    building = version.index / f".{named.name}.{secrets.token_hex(4)}"
    try:
        building.mkdir(parents=True)
        small(building)
        (building / RECORD).write_text(json.dumps(named.record(), indent=1) + "\n", encoding="utf-8")
        if to is not None:
            _upload(building, to / named.name)
        else:
            _rename(building, named.path)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        raise disk_error(error, index) from error
    _announce(index, named.name)
    return named


def _rename(building: Path, path: Path) -> None:
    for source in building.iterdir():
        with open(source, "rb") as file:
            os.fsync(file.fileno())
    fsync_folder(building)
    os.rename(building, path)
    fsync_folder(path.parent)


def _upload(building: Path, path: ObjectPath) -> None:
    """Send a version's small files; the record is created last, and is there from one process only."""
    for source in building.iterdir():
        if source.name != RECORD:
            (path / source.name).replace(source.read_bytes())
    try:
        (path / RECORD).create((building / RECORD).read_bytes())
    except FileExistsError:
        raise TryLaterError(
            f"{path} was published by another process meanwhile", next_step="give the same command again"
        ) from None
    shutil.rmtree(building)


def _announce(index: Place, name: str) -> None:
    """Write CURRENT. In a bucket another process may have published a later version since: that one is current then."""
    write_current(index / CURRENT, f"{name}\n".encode())
    if isinstance(index, ObjectPath) and (latest := _committed(index, after=name)):
        _announce(index, latest)


def _committed(index: ObjectPath, *, after: str) -> str:
    """The latest version in a bucket that has its record and is later than another one; "" if there is none."""
    least = _number(after) if after else 0
    names = sorted((name for name in names_below(index) if NAME.fullmatch(name) and _number(name) > least), key=_number)
    return next((name for name in reversed(names) if (index / name / RECORD).exists()), "")


def sweep(index: Place) -> int:
    """Remove versions before the last `KEPT`, and files that no version needs; returns the number of both.

    What an interrupted build or change has made so far is needed. The caller holds the index's lock.
    """
    settle(index)
    names = sorted((name for name in names_below(index) if NAME.fullmatch(name)), key=_number)
    retained = set(names[-KEPT:]) | {current_name(index)}
    removed = 0
    for name in names:
        if name not in retained:
            remove_folder(index / name)
            removed += 1
    if isinstance(index, ObjectPath):
        for upload in unfinished(index):
            upload.abort()
    else:
        _drop_temporary(index)
    needed = {file.path for name in retained if name for file in read_version(index, name).files()}
    needed |= _under_way(index)
    for name in names_below(index, FILES):
        if f"{FILES}/{name}" not in needed:
            drop_in(index / FILES, name)
            removed += 1
    return removed


def _drop_temporary(index: Path) -> None:
    """Remove what a killed process has left behind."""
    for name in names_below(index):
        if name.startswith(".v"):
            remove_folder(index / name)
        elif name.startswith((f".{CURRENT}.", f".{MAP}.")):
            beneath.unlink(index, name, missing_ok=True)


def remove_folder(folder: Place) -> None:
    """Remove a folder, or the objects directly below a prefix; what cannot be removed stays."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(drop, folder.iterdir()))


def names_below(index: Place, folder: str = "") -> list[str]:
    """The names of what is in a folder of an index, none if it is missing; OutsideError if it is a link."""
    if isinstance(index, ObjectPath):
        return names_in(index / folder if folder else index)
    try:
        return [name for name, _ in beneath.listing(index, folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _number(name: str) -> int:
    return int(name[1:])


def settle(index: Place) -> None:
    """End what a writer that was killed had begun to publish: later versions than the current one.

    In a bucket the latest one that has its record is made current; all others are removed.
    """
    current = current_name(index)
    if isinstance(index, ObjectPath) and (latest := _committed(index, after=current)):
        _announce(index, latest)
        current = latest
    for name in names_below(index):
        if NAME.fullmatch(name) and (not current or _number(name) > _number(current)):
            remove_folder(index / name)


def _under_way(index: Place) -> set[str]:
    """The files that units of interrupted builds and changes have committed."""
    committed: set[str] = set()
    for build in names_below(index, WORK):
        for name in names_below(index, f"{WORK}/{build}"):
            files = read_json(index / WORK / build / name).get("files") if name.endswith(".json") else None
            if isinstance(files, dict):
                committed |= {str(file["path"]) for file in files.values() if isinstance(file, dict) and "path" in file}
    return committed
