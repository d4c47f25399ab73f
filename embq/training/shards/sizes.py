"""`sizes.json` (samples of each shard) and `classes.json` (class names by index) beside shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embq.core.errors import InputError, SourceError
from embq.core.storage.beneath import read_small
from embq.core.storage.paths import is_url
from embq.sources.access.files import join, source_errors
from embq.sources.access.ranged_reads import fetch_all

SIZES, CLASSES = "sizes.json", "classes.json"


def sizes_beside(folder: str) -> dict[str, int] | None:
    """Shard -> samples, from `sizes.json` in a folder or behind a URL; None without one.

    Raises InputError if it is something else, SourceError if the storage does not tell.
    """
    counts = _read(folder, SIZES)
    if counts is None:
        return None
    if not isinstance(counts, dict) or not all(type(count) is int and count >= 0 for count in counts.values()):
        raise InputError(
            f"{join(folder, SIZES)}: is not the samples of shards, as {{'train-000000.tar': 1000}} is",
            next_step="let `embq shards verify FOLDER --write-sizes` count the samples again",
        )
    return counts


def classes_beside(folder: str) -> list[str] | None:
    """Class names by index, from `classes.json`; None without one."""
    names = _read(folder, CLASSES)
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise InputError(
            f"{join(folder, CLASSES)}: is not a list of different names of classes",
            next_step="put the file of the conversion back, or convert the pictures again",
        )
    return names


def rendered(value: Mapping[str, int] | list[str]) -> bytes:
    """The bytes of either file, with one line for each entry."""
    return (json.dumps(value, indent=0, ensure_ascii=False) + "\n").encode()


def _read(folder: str, name: str) -> Any:
    path = join(folder, name)
    try:
        if is_url(path):
            (data,) = fetch_all([path], [None], lambda: None)
            if isinstance(data, SourceError):
                raise data
        else:
            with source_errors(path):
                data = read_small(Path(path))
        return json.loads(data)
    except SourceError as error:
        # Stores that let nobody list say of what is not there that it may not be read.
        if error.code == "source_missing" or (error.code == "source_denied" and is_url(path)):
            return None
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: is not JSON: {error}", next_step="remove it, and let `embq shards verify --write-sizes` write it"
        ) from error
