"""Describes a machine for the service registry: devices and their states, cores, memory, cache, packages."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from embq.core.process.libraries import model_packages
from embq.core.process.limits import cores, memory_bytes
from embq.core.queue.heartbeats import Device, Service
from embq.core.settings import model_cache
from embq.worker.embedders.device.capability import BUILDS, serves
from embq.worker.embedders.device.hardware import device_name, precisions_of
from embq.worker.supervisor.devices import Gpu, find_gpus, memory_of, torch_architectures
from embq.worker.supervisor.slot import Slot
from embq.worker.supervisor.supervisor import Supervisor


class Machine:
    """Describes the machine of a supervisor. Safe to use from another thread; the first call may take seconds.

    Args:
        cuda_visible: CUDA_VISIBLE_DEVICES, or None if it is not set.
    """

    def __init__(self, supervisor: Supervisor, cuda_visible: str | None) -> None:
        self._supervisor = supervisor
        self._cuda_visible = cuda_visible
        self._devices: dict[str, Device] = {}
        self._packages = model_packages()

    def refreshed(self, service: Service) -> Service:
        """`service` as it is now."""
        if not self._devices:
            self._devices = described({slot.device for slot in self._supervisor.slots}, self._cuda_visible)
        return replace(
            service,
            state="draining" if self._supervisor.draining else "running",
            devices=tuple(self._device(slot) for slot in self._supervisor.slots),
            cores=cores(),
            memory_bytes=memory_bytes(),
            cache_free_bytes=room(model_cache()),
            packages=self._packages,
            refused={model: why for slot in self._supervisor.slots for model, why in dict(slot.refused).items()},
        )

    def _device(self, slot: Slot) -> Device:
        used, total = memory_of(slot.gpu) if slot.gpu is not None else (0, 0)
        return replace(
            self._devices[slot.device],
            state=slot.doing,
            worker=slot.name if slot.process is not None else "",
            why=slot.why,
            memory_used_bytes=used,
            memory_bytes=total,
            uuid=slot.gpu.uuid if slot.gpu is not None else "",
        )


def described(devices: Collection[str], cuda_visible: str | None) -> dict[str, Device]:
    """Each device with its name and the precisions that it computes fast, as if its process were being started.

    A GPU for which the installed torch has no code has none. torch is asked, in a process of its own, if there is
    one that current builds have dropped.

    Args:
        cuda_visible: CUDA_VISIBLE_DEVICES, or None if it is not set.
    """
    all_gpus = find_gpus(cuda_visible) if any(device.startswith("cuda") for device in devices) else ()
    gpus = {name: gpu for gpu in all_gpus if (name := f"cuda:{gpu.number}") in devices}
    has_old = any(gpu.capability is not None and gpu.capability < BUILDS[0][0] for gpu in gpus.values())
    architectures = torch_architectures() if has_old else ()
    return {device: _described(device, gpus.get(device), architectures) for device in devices}


def _described(device: str, gpu: Gpu | None, architectures: Sequence[str]) -> Device:
    name = device_name(device) if not device.startswith("cuda") else "" if gpu is None else gpu.name
    # CPUs compute in bf16 only if they have the instructions, and simulated devices stand for any.
    fast = precisions_of(gpu.capability, gpu.architecture) if gpu is not None else ("fp32",)
    if architectures and gpu is not None and gpu.capability is not None and not serves(architectures, gpu.capability):
        fast = ()
    return Device(device=device, name=name, state="starting", worker="", precisions=fast)


def room(folder: Path) -> int:
    """Free bytes where a folder is, or will be."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return 0
