"""Place of one build or change that is under way, in a folder or a bucket."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embq.core.storage import beneath
from embq.core.storage.durable import publish, write_new
from embq.core.storage.paths import Place
from embq.index.index_files.files import FILES, WORK, File, T, asking, disk_error, from_json, read_json, to_json
from embq.index.index_files.remote import build_cache, copied, forget_copies, in_use, sent


@dataclass(frozen=True, slots=True)
class BuildDir:
    """Place of one build.

    Attributes:
        index: folder or URL of the index.
        build: id of the build.
    """

    index: Place
    build: str

    @property
    def local(self) -> Path:
        """Folder of this machine that has the index's files under their paths: the index itself, or copies of it."""
        return self.index if isinstance(self.index, Path) else build_cache(self.index, self.build)

    @property
    def folder(self) -> Place:
        """Sidecars, and payloads that only later stages of the build need."""
        return self.index / WORK / self.build

    @property
    def spec(self) -> Place:
        """Path of build.json: written first, and never changed."""
        return self.folder / "build.json"

    def make(self) -> None:
        """Create the folders; OutputError if that is not possible, OutsideError if one is a link."""
        try:
            self.local.mkdir(parents=True, exist_ok=True)
            for name in (FILES, f"{WORK}/{self.build}/tmp"):
                with beneath.folder(self.local, name, make=True):
                    pass
        except OSError as error:
            raise disk_error(error, self.folder) from error

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the files on this machine for the length of the block; OSError if they cannot be written."""
        if isinstance(self.index, Path):
            yield
            return
        with in_use(self.local):
            self.make()
            yield

    def file(self, file: File) -> Path:
        """Path of a payload on this machine, fetched if it is in a bucket; OutputError if it is gone."""
        return file.check(self.index) if isinstance(self.index, Path) else copied(self.index, file, self.local)

    def publish(self, temporary: Path, file: File) -> None:
        """Give a finished, closed temporary file its name in the index, durably."""
        if isinstance(self.index, Path):
            publish(temporary, beneath.below(self.index, file.path))
        else:
            sent(temporary, self.index, file, self.local)

    def forget(self) -> None:
        """Remove what stands of it on this machine alone."""
        if not isinstance(self.index, Path):
            forget_copies(self.local)

    def begin(self, form: type[T], make_spec: Callable[[], T]) -> tuple[T, bool]:
        """The record in build.json, and whether an interrupted build goes on.

        Args:
            form: type of the record.
            make_spec: makes it; called only if there is no build.json yet.

        Raises OutputError if the folders or build.json cannot be made.
        """
        self.make()
        with asking(self.spec):
            resumed = self.spec.exists()
        if not resumed:
            self.write_once(self.spec, to_json(make_spec()))
        return from_json(form, self.read_spec(), str(self.spec)), resumed

    @property
    def scratch(self) -> Path:
        """Folder of this machine for what no other unit reads: in a bucket another machine does not see it."""
        return self.local / WORK / self.build

    def temporary(self, name: str) -> Path:
        """A path for an unfinished file; a name of its own, so that two attempts never share one."""
        return self.scratch / "tmp" / f"{secrets.token_hex(4)}-{name}"

    def read_spec(self) -> dict[str, Any]:
        """Content of build.json; OutputError if it cannot be read."""
        return read_json(self.spec)

    def write_once(self, path: Place, data: Mapping[str, Any]) -> bool:
        """Create a small file, complete and durable; False if it is there already. OutputError if impossible."""
        try:
            write_new(path, json.dumps(data, indent=1).encode() + b"\n", temporary=self.temporary(path.name))
        except FileExistsError:
            return False
        except OSError as error:
            raise disk_error(error, path) from error
        return True
