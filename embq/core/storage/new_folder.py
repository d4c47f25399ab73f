"""New folders of exports: complete under their final name, or absent."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embq.core.errors import InputError, OutputError
from embq.core.storage.durable import fsync_folder, output_error, writing

UNFINISHED = ".unfinished-"
"""Part of the name of the temporary folder; a process that is killed leaves it behind."""

_NEXT_STEPS = {
    "no_space": "make room, then export again",
    "not_writable": "give write permission, or name another folder",
}


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder, renamed to `path` at the end of the block, durably; removed if the block fails.

    Raises InputError if `path` exists and is not an empty folder, OutputError if it cannot be made.
    """
    refuse_used(path)
    unfinished = path.with_name(f"{path.name}{UNFINISHED}{secrets.token_hex(4)}")
    with writing(path, next_steps=_NEXT_STEPS):
        unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for folder, _, _ in os.walk(unfinished):
            fsync_folder(Path(folder))
        refuse_used(path)
        os.rename(unfinished, path)  # replaces an empty folder, but not one that is in use
        fsync_folder(path.parent)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise output_error(error, path, next_steps=_NEXT_STEPS) from error
    except OutputError as error:  # of a store, whose next step is for a run
        shutil.rmtree(unfinished, ignore_errors=True)
        next_step = _NEXT_STEPS.get(error.code, error.next_step)
        raise type(error)(error.message, next_step=next_step, code=error.code) from error
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def refuse_used(path: Path) -> None:
    """Raise InputError if `path` exists and is not an empty folder."""
    if not path.exists():
        return
    if path.is_mount():
        raise InputError(f"{path} is a mount point", next_step="name a new folder in it")
    if not path.is_dir() or any(path.iterdir()):
        raise InputError(f"{path} is not empty", next_step="choose an empty or a new folder", code="foreign_output")
