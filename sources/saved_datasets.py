"""Folders that the `datasets` library saves: which Arrow files they consist of, and in which order.

Only the library's own list counts: such a folder may hold Arrow files of a cache as well.
"""

from __future__ import annotations

import json
from typing import Any

from core.errors import InputError
from core.units import Unit
from sources.base import unwatched
from sources.storage import open_unchanged, stat_file

DICTIONARY, STATE, INFO = "dataset_dict.json", "state.json", "dataset_info.json"


def saved_files(path: str, names: list[str]) -> list[str] | None:
    """The Arrow files of a saved dataset, or of all splits of one, as paths; None for any other folder.

    Args:
        path: the folder.
        names: what it holds.

    Raises InputError where the folder does not hold what its own list says.
    """
    if DICTIONARY in names:
        splits = _listed(path, DICTIONARY, "splits")
        return [file for split in splits for file in _files(f"{path.rstrip('/')}/{_plain(path, split)}")]
    return _files(path) if STATE in names and INFO in names else None


def _files(path: str) -> list[str]:
    state = _load(path, STATE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise InputError(
            f"{path}: is a selection of a dataset, not the rows themselves",
            next_step="save it again, with dataset.flatten_indices().save_to_disk(...)",
        )
    return [
        f"{path.rstrip('/')}/{_plain(path, entry.get('filename') if isinstance(entry, dict) else None)}"
        for entry in _listed(path, STATE, "_data_files")
    ]


def _listed(path: str, name: str, field: str) -> list[Any]:
    listed = _load(path, name).get(field)
    if not isinstance(listed, list):
        raise _broken(path, f"{name} has no list {field!r}")
    return listed


def _load(path: str, name: str) -> dict[str, Any]:
    file = f"{path.rstrip('/')}/{name}"
    unit = Unit(kind="arrow", source=file, etag=stat_file(file).version)
    with open_unchanged(unit, "source_changed", unwatched) as opened:
        data = opened.read(10_000_000)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"{name} is not JSON") from error
    if not isinstance(value, dict):
        raise _broken(path, f"{name} is no JSON object")
    return value


def _plain(path: str, name: object) -> str:
    if not isinstance(name, str) or not name or "/" in name or name in (".", ".."):
        raise _broken(path, f"it names {name!r}, which is no file of this folder")
    return name


def _broken(path: str, what: str) -> InputError:
    return InputError(f"{path}: looks like a saved dataset, and {what}", next_step="save the dataset again")
