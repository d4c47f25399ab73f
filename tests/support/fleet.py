"""The worker processes of a supervisor that no test starts, or that reach no broker."""

from __future__ import annotations

from embq.core.settings import Settings
from embq.worker.supervisor.devices import Gpu
from embq.worker.supervisor.protocol import WorkerOptions
from embq.worker.supervisor.slot import Fleet


def fleet(*devices: str, gpus: tuple[Gpu, ...] = ()) -> Fleet:
    """A process for each device."""
    return Fleet(
        devices=devices,
        options=WorkerOptions(
            run="", prefetch=1, threads=1, batch_size=0, transport="auto", drain_s=1.0, version="test"
        ),
        settings=Settings(broker_url="redis://127.0.0.1:1"),
        gpus=gpus,
    )
