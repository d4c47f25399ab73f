"""The promises of a kind of input, for `hdf5`."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from embq.testing.sources import *  # noqa: F403
from embq.testing.sources import ROWS, Case

h5py: Any = import_module("h5py")


def write_hdf5(folder: Path) -> Path:
    """A dataset with a string per row."""
    path = folder / "rows.h5"
    with h5py.File(path, "w") as file:
        file["text"] = list(ROWS.values())
    return path


def touch(path: Path) -> None:
    """Change the file."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.fixture
def case() -> Case:
    """The input that the tests are about."""
    listing = [(f"rows.h5:{row}", None, text) for row, text in enumerate(ROWS.values(), 1)]
    return Case(kind="hdf5", write=write_hdf5, change=touch, listing=listing)
