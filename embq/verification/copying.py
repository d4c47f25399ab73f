"""Local copies of remote inputs for the second reading: one plain stream for each, not the ranges workers ask for."""

from __future__ import annotations

import atexit
import os
import posixpath
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import replace

from core.units import Unit


class Copies:
    """The last file that was asked for, since the next slice of it is likely to be asked for next."""

    def __init__(self) -> None:
        self._kept = ExitStack()
        self._of: tuple[str, str] | None = None
        self._folder = ""
        atexit.register(self._kept.close)

    def of(self, unit: Unit) -> Unit:
        """A unit of a URL as the same unit of a local copy, which stays until the copy of another is asked for.

        Raises OSError where it cannot be fetched. Images of a folder that are gone are left out.
        """
        name = posixpath.basename(unit.source.partition("?")[0])
        if unit.kind == "files":
            self._begin()
            for relative, _ in unit.items:
                self._fetch(unit.source, relative)
                self._fetch(unit.source, os.path.splitext(relative)[0] + ".txt")
            return replace(unit, source=self._folder)
        if self._of != (unit.source, unit.etag):
            self._begin()
            self._fetch(unit.source, name, url=unit.source)
            self._of = (unit.source, unit.etag)
        return replace(unit, source=os.path.join(self._folder, name))

    def _begin(self) -> None:
        self._of = None
        self._kept.close()
        self._folder = self._kept.enter_context(tempfile.TemporaryDirectory(prefix="embq-verify-"))

    def _fetch(self, folder: str, relative: str, *, url: str = "") -> None:
        import fsspec

        path = os.path.join(self._folder, relative)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with fsspec.open(url or f"{folder}/{relative}", "rb") as source, open(path, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        except FileNotFoundError:
            if os.path.exists(path):
                os.unlink(path)


COPIES = Copies()
