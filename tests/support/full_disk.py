"""A disk without room for one of the calls of this process that need room."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from embq.core.errors import OutputError


class FullDisk:
    """Refuses the call with the number `at` of its kind, from 1 on, below a folder; the others succeed.

    Attributes:
        refused: whether there was such a call.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, kind: str, at: int) -> None:
        self._folder, self._kind, self._at = str(folder), kind, at
        self._calls = 0
        self.refused = False
        for module, name, kinds, is_about in (
            *((os, name, name, lambda *_, **__: True) for name in ("mkdir", "rename", "link")),
            (os, "open", "open", lambda _, flags, *__, **___: flags & os.O_CREAT),
            # A lock is another file, which stays empty.
            (os, "open", "write", lambda _, flags, *__, **___: flags & os.O_EXCL),
            (builtins, "open", "open write", _opens_to_write),
            (io, "open", "open write", _opens_to_write),
        ):
            if kind in kinds.split():
                patch.setattr(module, name, self._watched(getattr(module, name), is_about))

    def _watched(self, call: Callable[..., Any], is_about: Callable[..., bool]) -> Callable[..., Any]:
        def watched(path: Any, *args: Any, **options: Any) -> Any:
            if not is_about(path, *args, **options) or not self._is_due(path):
                return call(path, *args, **options)
            if self._kind != "write":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            opened = call(path, *args, **options)
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, opened if isinstance(opened, int) else opened.fileno(), inheritable=False)
            os.close(full)
            return opened

        return watched

    def _is_due(self, path: Any) -> bool:
        if os.path.isabs(path) and not str(path).startswith(self._folder):
            return False
        self._calls += 1
        due = self._calls == self._at
        self.refused |= due
        return due


def _opens_to_write(path: Any, mode: str = "r", *_: Any, **__: Any) -> bool:
    return not isinstance(path, int) and mode[0] in "wxa"


def refusals(
    kind: str, folder: Path, prepare: Callable[[int], Path], change: Callable[[Path], object]
) -> Iterator[tuple[Path, OutputError | None]]:
    """For each call of a kind that a change makes below a folder: what was changed, and the error where that call is
    refused. None if the change succeeds: a file may be optional, or stay empty.

    Args:
        kind: "open", which creates a file; "write", which fills one, and is refused by the device that is full; or the
            name of a function of `os`.
        prepare: makes what is changed anew; the argument is the number of the call.
    """
    at = 1
    while True:
        place = prepare(at)
        error = None
        with pytest.MonkeyPatch.context() as patch:
            disk = FullDisk(patch, folder, kind, at)
            try:
                change(place)
            except OutputError as caught:
                error = caught
        if not disk.refused:
            return
        yield place, error
        at += 1
