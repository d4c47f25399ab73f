"""Folder of one build or change that is under way."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.storage import beneath
from core.storage.durable import write_new
from indexer.index_files.files import FILES, WORK, disk_error, read_json


@dataclass(frozen=True, slots=True)
class BuildDir:
    """Folder of one build.

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
        """Path of build.json: written first, and never changed."""
        return self.folder / "build.json"

    def make(self) -> None:
        """Create the folders; OutputError where that is not possible, OutsideError where one is a link."""
        try:
            self.index.mkdir(parents=True, exist_ok=True)
            for name in (FILES, f"{WORK}/{self.build}/tmp"):
                with beneath.folder(self.index, name, make=True):
                    pass
        except OSError as error:
            raise disk_error(error, self.folder) from error

    def begin(self, make_spec: Callable[[], Mapping[str, Any]]) -> tuple[dict[str, Any], bool]:
        """Content of build.json, and whether an interrupted build goes on.

        Args:
            make_spec: makes the content; called only where there is no build.json yet.

        Raises OutputError where the folders or build.json cannot be made.
        """
        self.make()
        resumed = self.spec.exists()
        if not resumed:
            self.write_once(self.spec, make_spec())
        return self.read_spec(), resumed

    def temporary(self, name: str) -> Path:
        """A path for an unfinished file; a name of its own, so that two attempts never share one."""
        return self.folder / "tmp" / f"{secrets.token_hex(4)}-{name}"

    def read_spec(self) -> dict[str, Any]:
        """Content of build.json; OutputError where it cannot be read."""
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
