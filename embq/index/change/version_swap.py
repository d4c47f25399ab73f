"""Swap from one version of an index to the next, at the end of every change."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from embq.core.storage import beneath
from embq.index.index_files.files import WORK, read_json
from embq.index.index_files.publication import names_below, publish, sweep
from embq.index.index_files.sizes import sizes_of
from embq.index.index_files.version import RECORD, Version, current_name, read_version
from embq.index.stages.report import INFOS, plain
from embq.index.stages.units import CHANGES, DEDUP


def swap_version(base: Version, version: Version, changed: Mapping[str, Any]) -> Version:
    """Publish the changed version with the report of `base`, and remove files that no version needs.

    Args:
        version: not published yet.
        changed: entries of infos.json that the change replaces.

    The caller holds the index's lock.
    """

    def small(folder: Path) -> None:
        for name, status in beneath.listing(base.index, base.name):
            if stat.S_ISREG(status.st_mode) and name not in (RECORD, INFOS):
                with beneath.reader(base.index, f"{base.name}/{name}") as file, open(folder / name, "xb") as copy:
                    shutil.copyfileobj(file, copy)
        infos = read_json(base.path / INFOS) if (base.path / INFOS).exists() else {}
        collection = {**infos.get("collection", {}), "digest": version.collection.digest}
        infos |= {**sizes_of(version), "collection": {**collection, "complete": version.collection.complete}, **changed}
        (folder / INFOS).write_text(json.dumps(plain(infos), indent=1) + "\n", encoding="utf-8")

    published = publish(version, small)
    tidy(version.index)
    return published


def tidy(index: Path) -> None:
    """Remove files of interrupted changes and deduplications, and of versions that are too old to be open.

    What an interrupted build has made stays, for the same command to go on; one that was killed only after it had
    published its version is over. The caller holds the index's lock.
    """
    name = current_name(index)
    over = read_version(index, name).build if name else ""
    for build in names_below(index, WORK):
        if build == over or build.partition("-")[0] in (*CHANGES, *DEDUP):
            shutil.rmtree(index / WORK / build, ignore_errors=True)
    with suppress(OSError):  # it is there no more, or holds what is under way
        (index / WORK).rmdir()
    sweep(index)
