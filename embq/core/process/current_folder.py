"""Libraries that read settings, or load code, from the current folder: they are imported as if it were another one.

`python -P` keeps Python's own modules out of the current folder, and `READERS` are what it does not stop.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

READERS = {
    "matplotlib": "matplotlibrc, before any that a variable names; evaluated until 3.10",
    "numba": ".numba_config.yaml, which may name a folder of pickled kernels",
    "pymilvus": ".env, which may name other servers",
    "torch": "libcuda.so.1, which runs: the RUNPATH of NVIDIA's libcusparseLt ends with an empty entry",
}
"""Packages -> what they take from the current folder when they are imported. `set_up_wandb` is for wandb, which reads
wandb/settings later."""

_ELSEWHERE = "/"
_CLONE_FS = 0x200


@contextmanager
def elsewhere() -> Iterator[None]:
    """Make another folder the current one of this thread, for the length of the block.

    On Linux the thread no longer shares its current folder with the others of this process. Where the system does not
    allow that, as in a container with Docker's seccomp profile, the folder changes for the process if it has no other
    thread, and not at all if it has.
    """
    try:
        is_own = ctypes.CDLL(None).unshare(_CLONE_FS) == 0
    except AttributeError:  # macOS
        is_own = False
    threading = sys.modules.get("threading")
    if not is_own and threading is not None and threading.active_count() > 1:
        yield
        return
    try:
        here = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it has been removed, or may not be read
        yield
        return
    os.chdir(_ELSEWHERE)
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def leave_out_current_folder() -> None:
    """Import `READERS` elsewhere from now on, also where libraries import them. Further calls do nothing."""
    if not any(isinstance(finder, _Readers) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Readers())


class _Readers(MetaPathFinder):
    """Import hook of `READERS`."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The spec of a reader, whose loader runs it elsewhere; None for all others."""
        if name not in READERS:
            return None
        # By the finders behind this one: others may have hooks of their own there, such as tracing.
        finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next((spec for finder in finders if (spec := finder.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_elsewhere(module: Any) -> None:
            with elsewhere():
                run(module)

        spec.loader.exec_module = run_elsewhere  # type: ignore[method-assign]
        return spec


def set_up_wandb() -> None:
    """Have wandb read its settings elsewhere: wandb/settings may name a server, which is sent the key."""
    import wandb

    with elsewhere():
        folder = wandb.setup().settings.root_dir
    if folder == _ELSEWHERE:  # not named by WANDB_DIR
        wandb.setup(wandb.Settings(root_dir=os.getcwd()))
