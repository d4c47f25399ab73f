"""What a supervisor reports of its machine: devices, what they are at, and what there is beside them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from core.cores import cores
from core.fleet import Device, Service
from core.memory import memory_bytes
from core.packages import model_packages
from core.settings import model_cache
from worker.daemon import Supervisor
from worker.embedders.hardware import device_name
from worker.gpus import find_gpus


class Machine:
    """Looks at the slots of a supervisor; safe to use from another thread, which it may hold up for seconds once.

    Args:
        cuda_visible: CUDA_VISIBLE_DEVICES, or None where it is not set.
    """

    def __init__(self, supervisor: Supervisor, cuda_visible: str | None) -> None:
        self._supervisor = supervisor
        self._cuda_visible = cuda_visible
        self._names: dict[str, str] = {}
        self._packages = model_packages()

    def look(self, service: Service) -> Service:
        """`service` as it is now."""
        if not self._names:
            self._names = self._name_devices()
        return replace(
            service,
            state="draining" if self._supervisor.draining else "running",
            devices=tuple(
                Device(
                    device=slot.device,
                    name=self._names[slot.device],
                    state=slot.doing,
                    worker=slot.name if slot.process is not None else "",
                )
                for slot in self._supervisor.slots
            ),
            cores=cores(),
            memory_bytes=memory_bytes(),
            cache_free_bytes=room(model_cache()),
            packages=self._packages,
            refused={model: why for slot in self._supervisor.slots for model, why in dict(slot.refused).items()},
        )

    def _name_devices(self) -> dict[str, str]:
        devices = {slot.device for slot in self._supervisor.slots}
        gpus = find_gpus(self._cuda_visible) if any(device.startswith("cuda") for device in devices) else ()
        names = {f"cuda:{gpu.number}": gpu.name for gpu in gpus}
        return {
            device: names.get(device, "") if device.startswith("cuda") else device_name(device) for device in devices
        }


def room(folder: Path) -> int:
    """Free bytes where a folder is, or will be."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        return shutil.disk_usage(there).free
    except OSError:
        return 0
