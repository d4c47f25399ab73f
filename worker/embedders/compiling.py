"""Prerequisites of torch.compile for a GPU, checked before seconds are spent on a trial."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

from core.settings import child_environment

COMPILERS = ("gcc", "clang")
"""What Triton looks for on PATH where CC names none (triton/runtime/build.py of 3.9)."""


def lacking() -> str:
    """What is missing; "" where nothing is.

    Triton compiles C against Python's headers and loads the result from its cache. torch puts this below its own cache
    unless TRITON_CACHE_DIR names another folder (torch/_inductor/runtime/triton_heuristics.py of 2.15).
    """
    environment = child_environment()
    compilers = [environment["CC"]] if environment.get("CC") else COMPILERS
    named = (environment.get(name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"))
    cache = Path(next(filter(None, named), tempfile.gettempdir()))
    lacks = []
    if not any(map(shutil.which, compilers)):
        lacks.append(f"no C compiler ({' or '.join(compilers)})")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacks.append("no headers of Python (python3-dev)")
    if is_noexec(cache):
        lacks.append(f"{cache} is mounted noexec (TRITON_CACHE_DIR names another folder)")
    return ", ".join(lacks)


def is_noexec(folder: Path) -> bool:
    """Whether code cannot be run from a folder, or from the one in which it is to be made."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return bool(os.statvfs(there).f_flag & os.ST_NOEXEC)
