"""What a device decides about a model that is loaded: how much a pass holds, and in which way it is computed."""

from __future__ import annotations

from core.models import ModelConfig
from core.service.log import Events
from worker.embedders.base import Embedder, Trying
from worker.embedders.compiling import lacking
from worker.embedders.probe import best_budget, may_probe, may_probe_images, speeds_of_budgets, speeds_of_sizes

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
    if isinstance(embedder, Trying):
        embedder.try_ways(compile_s=_possible(compile_s, model, device))


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
