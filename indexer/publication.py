"""Publishing a version of an index, and removing what no version needs any more."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from core.durable import drop, fsync_folder
from indexer.version import CURRENT, NAME, RECORD, Version, current_name, read_version
from indexer.workshop import FILES, WORK, read_json, write_current
from indexer.writing import disk_error

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
    numbers = [_number(one.name) for one in index.glob("v*") if NAME.fullmatch(one.name)]
    named = replace(version, name=f"v{max(numbers, default=0) + 1:04d}")
    building = index / f".{named.name}.{secrets.token_hex(4)}"
    try:
        building.mkdir(parents=True)
        small(building)
        (building / RECORD).write_text(json.dumps(named.describe(), indent=1) + "\n", encoding="utf-8")
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
    """Remove versions before the last `KEPT`, and files that nobody needs; gives the number of both.

    What an interrupted build or change has made so far is needed. The caller holds the index's lock.
    """
    _drop_unannounced(index)
    names = sorted((one.name for one in index.glob("v*") if NAME.fullmatch(one.name)), key=_number)
    kept = set(names[-KEPT:]) | {current_name(index)}
    removed = 0
    for name in names:
        if name not in kept:
            shutil.rmtree(index / name, ignore_errors=True)
            removed += 1
    for litter in index.glob(".v*"):
        shutil.rmtree(litter, ignore_errors=True)
    for litter in index.glob(f".{CURRENT}.*"):
        drop(litter)
    needed = {file.path for name in kept if name for file in read_version(index, name).files()}
    needed |= _under_way(index)
    for path in (index / FILES).glob("*"):
        if f"{FILES}/{path.name}" not in needed:
            drop(path)
            removed += 1
    return removed


def _number(name: str) -> int:
    return int(name[1:])


def _drop_unannounced(index: Path) -> None:
    """Remove versions that were complete and never current, because their writer was killed in between."""
    current = current_name(index)
    for path in index.glob("v*"):
        if NAME.fullmatch(path.name) and (not current or _number(path.name) > _number(current)):
            shutil.rmtree(path, ignore_errors=True)


def _under_way(index: Path) -> set[str]:
    """The files that units of interrupted builds and changes have committed."""
    found: set[str] = set()
    for path in (index / WORK).glob("*/*.json"):
        files = read_json(path).get("files")
        if isinstance(files, dict):
            found |= {str(file["path"]) for file in files.values()}
    return found
