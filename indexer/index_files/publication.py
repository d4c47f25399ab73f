"""Publication of versions, and removal of files that no version needs."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from core.storage import beneath
from core.storage.durable import fsync_folder
from indexer.index_files.files import FILES, WORK, disk_error, read_json, write_current
from indexer.index_files.version import CURRENT, NAME, RECORD, Version, current_name, read_version

KEPT = 2
"""Versions that stay: the current one, and the one before, which readers may still have open."""


def publish(version: Version, small: Callable[[Path], None]) -> Version:
    """Make a version the current one; gives it with its name. The caller holds the index's lock.

    Args:
        small: writes what else belongs into the version's folder; the version has its name by then.

    The folder is complete before it gets its name, and CURRENT is replaced after that: a reader sees one version or
    the other. Versions before the last one, and files that none of the rest names, are removed.
    """
    index = version.index
    _drop_unannounced(index)
    numbers = [_number(name) for name in names_below(index) if NAME.fullmatch(name)]
    created = datetime.now(UTC).isoformat(timespec="seconds")
    named = replace(version, name=f"v{max(numbers, default=0) + 1:04d}", created=created)
    building = index / f".{named.name}.{secrets.token_hex(4)}"
    try:
        building.mkdir(parents=True)
        small(building)
        (building / RECORD).write_text(json.dumps(named.record(), indent=1) + "\n", encoding="utf-8")
        for path in building.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        fsync_folder(building)
        os.rename(building, named.path)
        fsync_folder(index)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        raise disk_error(error, building) from error
    write_current(index / CURRENT, f"{named.name}\n".encode())
    return named


def sweep(index: Path) -> int:
    """Remove versions before the last `KEPT`, and files that no version needs; gives the number of both.

    What an interrupted build or change has made so far is needed. The caller holds the index's lock.
    """
    _drop_unannounced(index)
    names = sorted((name for name in names_below(index) if NAME.fullmatch(name)), key=_number)
    kept = set(names[-KEPT:]) | {current_name(index)}
    removed = 0
    for name in names:
        if name not in kept:
            shutil.rmtree(index / name, ignore_errors=True)
            removed += 1
    for name in names_below(index):
        if name.startswith(".v"):
            shutil.rmtree(index / name, ignore_errors=True)
        elif name.startswith(f".{CURRENT}."):
            beneath.unlink(index, name, missing_ok=True)
    needed = {file.path for name in kept if name for file in read_version(index, name).files()}
    needed |= _under_way(index)
    for name in names_below(index, FILES):
        if f"{FILES}/{name}" not in needed:
            beneath.unlink(index, f"{FILES}/{name}", missing_ok=True)
            removed += 1
    return removed


def names_below(index: Path, folder: str = "") -> list[str]:
    """The names of what is in a folder of an index, none where it is missing; OutsideError where it is a link."""
    try:
        return [name for name, _ in beneath.listing(index, folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _number(name: str) -> int:
    return int(name[1:])


def _drop_unannounced(index: Path) -> None:
    """Remove versions that were complete and never current, because their writer was killed in between."""
    current = current_name(index)
    for name in names_below(index):
        if NAME.fullmatch(name) and (not current or _number(name) > _number(current)):
            shutil.rmtree(index / name, ignore_errors=True)


def _under_way(index: Path) -> set[str]:
    """The files that units of interrupted builds and changes have committed."""
    found: set[str] = set()
    for build in names_below(index, WORK):
        for name in names_below(index, f"{WORK}/{build}"):
            files = read_json(index / WORK / build / name).get("files") if name.endswith(".json") else None
            if isinstance(files, dict):
                found |= {str(file["path"]) for file in files.values()}
    return found
