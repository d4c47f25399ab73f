"""What the storage of `--out` refuses, as an error that a user can do something about."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.errors import OutputError
from core.storage.durable import output_error


@contextmanager
def writing(path: Path, kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """OutputError where `path` cannot be written within the block.

    Args:
        kinds: of errors that tell so.
    """
    try:
        yield
    except kinds as error:
        # Of what else than a full disk would a library tell?
        code = output_error(error if isinstance(error, OSError) else OSError(errno.ENOSPC, str(error)), path).code
        why = getattr(error, "strerror", None) or error
        raise OutputError(f"{path} cannot be written: {why}", next_step=_NEXT_STEPS[code], code=code) from error


_NEXT_STEPS = {
    "not_writable": "give write permission, or name another --out",
    "no_space": "make room, then start the same command again: it goes on from the last checkpoint",
    "output": "mend the storage, or name another --out; the same command goes on from the last checkpoint",
}


def append(file: io.FileIO, data: bytes) -> None:
    """Hand bytes to the kernel in one write; OSError where it takes only a part, as a disk that gets full does."""
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
