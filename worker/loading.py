"""Loading a model onto the device of a worker process: capability check, warm-up, tuning."""

from __future__ import annotations

import time

from core.errors import DeviceFullError, ModelError
from core.models import ModelConfig
from core.service.log import Events
from worker.embedders.base import Embedder
from worker.embedders.device.capability import check_device
from worker.embedders.device.hardware import free_memory
from worker.embedders.device.tuning import tune
from worker.embedders.device.warm_up import warm_up
from worker.embedders.registry import load
from worker.report import DEVICE_FULL
from worker.workplace import Workplace

FULL_ATTEMPTS, FULL_PAUSE_S = 3, 5.0
"""A device may be full only because another process is just leaving it."""

log = Events("worker")


def load_model(model: ModelConfig, place: Workplace) -> Embedder:
    """A model that has embedded something, in the way that its device computes best.

    Raises ModelError where the model cannot be loaded here, or is too large for the device, ConfigError where the
    device can serve no model, and DeviceError where it is broken.
    """
    check_device(place.options.torch_device)
    attempts = 1 if place.options.guest else FULL_ATTEMPTS
    while True:
        try:
            return _loaded(model, place)
        except DeviceFullError as error:
            attempts -= 1
            if not attempts or place.stopped():
                raise ModelError(
                    f"{model.spec} does not fit on the device: {error.message}",
                    next_step="end what else uses its memory, or take fewer --workers-per-device or a smaller model",
                    code=DEVICE_FULL,
                ) from error
            log.warning("device_full", model=model.spec, device=place.options.device, why=error.message)
        # Out here the exception is gone, and with it what it held of the model.
        free_memory(place.options.torch_device)
        again_at = time.monotonic() + FULL_PAUSE_S
        while time.monotonic() < again_at and not place.stopped():
            time.sleep(0.1)


def _loaded(model: ModelConfig, place: Workplace) -> Embedder:
    asked, device = place.options.batch_size, place.options.torch_device
    embedder = load(model, device)
    if asked:
        embedder.batch_size = asked
    place.board.expect("embed", warm_up(embedder, model.modalities) * embedder.batch_size)
    tune(embedder, model, device=device, batch_size=asked, compile_s=place.settings.compile_s)
    return embedder
