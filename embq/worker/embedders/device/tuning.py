"""Tuning of a loaded model for its device: batch size and variant of the forward pass."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

from embq.core.models import ModelConfig
from embq.core.service.log import Events
from embq.core.settings import child_environment
from embq.worker.embedders.base import Embedder, HasVariants
from embq.worker.embedders.device.batch_size import (
    best_budget,
    may_probe,
    may_probe_images,
    speeds_of_budgets,
    speeds_of_sizes,
)

COMPILERS = ("gcc", "clang")
"""C compilers that Triton looks for on PATH where CC names none (triton/runtime/build.py of 3.9)."""


def lacking() -> str:
    """Missing prerequisite of torch.compile; "" where nothing is missing.

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


log = Events("worker")


def tune(embedder: Embedder, model: ModelConfig, *, device: str, batch_size: int = 0, compile_s: float = 0.0) -> None:
    """Try what suits the device, within some seconds, and have the embedder keep to it. None of it changes a vector.

    Args:
        batch_size: what the user asked for, which `embedder` has already; 0 where that is ours to choose.
        compile_s: seconds that compiling may take; 0 spares it.

    Raises DeviceError where the device is broken, DeviceFullError where it has no room for a single sample.
    """
    if may_probe(model, embedder, batch_size=batch_size):
        embedder.token_budget = best_budget(speeds := speeds_of_budgets(embedder))
        log.info("budget_chosen", model=model.spec, tokens=embedder.token_budget, tokens_per_s=_told(speeds))
    if may_probe_images(model, embedder, batch_size=batch_size, device=device):
        embedder.batch_size = embedder.window = best_budget(speeds := speeds_of_sizes(embedder, model.modalities))
        log.info("batch_size_chosen", model=model.spec, rows=embedder.batch_size, rows_per_s=_told(speeds))
    if isinstance(embedder, HasVariants):
        embedder.choose_variant(compile_s=_possible(compile_s, model, device))


def _possible(compile_s: float, model: ModelConfig, device: str) -> float:
    """The seconds for compiling, or 0 where it cannot be done; a CPU never compiles."""
    if not compile_s or not device.startswith("cuda"):
        return 0.0
    if lacks := lacking():
        log.warning("compile_refused", model=model.spec, lacks=lacks, next="mend that, or unset EMBQ_COMPILE_S")
        return 0.0
    return compile_s


def _told(speeds: dict[int, float]) -> str:
    return " ".join(f"{size}:{round(speed)}" for size, speed in speeds.items())
