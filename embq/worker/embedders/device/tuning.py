"""Tuning of a loaded model for its device: batch size, variant of the forward pass, and optional compute paths."""

from __future__ import annotations

import os
import shutil
import stat
import sysconfig
import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from embq.core.models import ModelConfig
from embq.core.service.log import Events
from embq.core.settings import change_environment, child_environment
from embq.worker.embedders.base import Embedder, HasVariants
from embq.worker.embedders.device.batch_size import (
    best_budget,
    may_probe,
    may_probe_images,
    speeds_of_budgets,
    speeds_of_sizes,
)

FLAT = "flat"
"""Batches of texts without padding, see `embq.worker.embedders.text.forward`."""

log = Events("worker")

COMPILERS = ("gcc", "clang")
"""C compilers that Triton looks for on PATH if CC names none (triton/runtime/build.py of 3.9)."""


def lacking() -> str:
    """Missing prerequisite of torch.compile; "" if nothing is missing.

    Triton compiles C against Python's headers and loads the result from its cache. torch puts this below its own cache
    unless TRITON_CACHE_DIR names another folder (torch/_inductor/runtime/triton_heuristics.py of 2.15).
    """
    environment, own = child_environment(), _own_cache()
    compilers = [environment["CC"]] if environment.get("CC") else COMPILERS
    named = (environment.get(name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"))
    cache = Path(next(filter(None, named), own))
    lacks = []
    if not any(map(shutil.which, compilers)):
        lacks.append(f"no C compiler ({' or '.join(compilers)})")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacks.append("no headers of Python (python3-dev)")
    if is_noexec(cache):
        lacks.append(f"{cache} is mounted noexec (TRITON_CACHE_DIR names another folder)")
    if not environment.get("TORCHINDUCTOR_CACHE_DIR") and _is_of_others(own):
        lacks.append(f"{own} is another user's or others may write there (TORCHINDUCTOR_CACHE_DIR names another)")
    return ", ".join(lacks)


def _own_cache() -> Path:
    """Folder of compiled code, which torch runs. Its own default in /tmp has a name that anyone may take first."""
    return Path(tempfile.gettempdir()) / f"embq-inductor-{os.getuid()}"


def _is_of_others(folder: Path) -> bool:
    """Whether anyone else may write in a folder, which is made if it is not there."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    return not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or bool(status.st_mode & 0o022)


def is_noexec(folder: Path) -> bool:
    """Whether code cannot be run from a folder, or from the one in which it is to be made."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return bool(os.statvfs(existing).f_flag & os.ST_NOEXEC)


class OptionalPaths:
    """Optional code paths of this process: those that it must not try, and those on trial or in use.

    A kernel that faults leaves a CUDA context in which nothing works any more, so the process ends. The supervisor is
    informed of each path before it is tried, and starts the next process without those of this one. A process serves
    one device, so there is one object for a process.

    Attributes:
        without: paths that must not be tried.
        report: called with the names of all paths that are on trial or in use, whenever these change.
    """

    def __init__(self) -> None:
        self.without: frozenset[str] = frozenset()
        self.report: Callable[[Collection[str]], None] = lambda _: None
        self._used: set[str] = set()

    def clear(self) -> None:
        """Forget the paths of a model that is not loaded any more."""
        self._used.clear()
        self.report(())

    def try_out(self, name: str) -> None:
        """Report that a path is tried from now on."""
        self.report(sorted({*self._used, name}))

    def settle(self, name: str, *, is_taken: bool) -> None:
        """Report whether a path that was tried is used from now on. Not to be called if it broke the device."""
        if is_taken:
            self._used.add(name)
        self.report(sorted(self._used))


PATHS = OptionalPaths()
"""Optional paths of this process."""


def tune(embedder: Embedder, model: ModelConfig, *, device: str, batch_size: int = 0, compile_s: float = 0.0) -> None:
    """Try what suits the device, within some seconds, and have the embedder keep to it. None of it changes a vector.

    Args:
        batch_size: of the user, which `embedder` has already; 0 to choose it here.
        compile_s: seconds that compiling may take; 0 leaves it out.

    Raises DeviceError if the device is broken, DeviceFullError if it has no room for a single sample.
    """
    if may_probe(model, embedder, batch_size=batch_size):
        embedder.token_budget = best_budget(speeds := speeds_of_budgets(embedder))
        log.info("budget_chosen", model=model.spec, tokens=embedder.token_budget, tokens_per_s=_listed(speeds))
    if may_probe_images(model, embedder, batch_size=batch_size, device=device):
        embedder.batch_size = embedder.window = best_budget(speeds := speeds_of_sizes(embedder, model.modalities))
        log.info("batch_size_chosen", model=model.spec, rows=embedder.batch_size, rows_per_s=_listed(speeds))
    if isinstance(embedder, HasVariants):
        embedder.choose_variant(compile_s=_possible(compile_s, model, device))


def _possible(compile_s: float, model: ModelConfig, device: str) -> float:
    """The seconds for compiling, or 0 if it cannot be done; a CPU never compiles."""
    if not compile_s or not device.startswith("cuda"):
        return 0.0
    if lacks := lacking():
        log.warning("compile_refused", model=model.spec, lacks=lacks, next="mend that, or unset EMBQ_COMPILE_S")
        return 0.0
    if not child_environment().get("TORCHINDUCTOR_CACHE_DIR"):
        change_environment({"TORCHINDUCTOR_CACHE_DIR": str(_own_cache())})
    return compile_s


def _listed(speeds: dict[int, float]) -> str:
    return " ".join(f"{size}:{round(speed)}" for size, speed in speeds.items())
