"""Finds the devices of this machine with NVML, which makes no CUDA context in the supervisor."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from embq.core import wire
from embq.core.errors import NoDeviceError, UsageError
from embq.core.process.children import run_python
from embq.core.settings import child_environment
from embq.worker.embedders.device.hardware import simulated_speed

DEVICES_NEXT = "use auto, cpu, cuda (every CUDA device), cuda:0 or a list such as cuda:0,cuda:2"
DRIVER = Path("/proc/driver/nvidia/version")
WITHOUT_NVML = {Path("/dev/kfd"): "an AMD GPU", Path("/dev/dxg"): "the GPU of WSL2"}
"""Device file -> the GPU that it stands for, of which NVML may know nothing."""
TORCH_S = 120.0
"""The first import of torch from a cold network disk takes a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device that a process can compute on: a GPU, or an instance of one that is divided (MIG).

    Attributes:
        number: N of "cuda:N", its place among the visible ones.
        visible: value of CUDA_VISIBLE_DEVICES with which a process sees this device alone, as its cuda:0.
        name: its model, such as "NVIDIA H100 PCIe"; "" if it is unknown.
        capability: (major, minor) of what it computes; None if it is unknown, as for ROCm.
        architecture: of an AMD GPU, such as "gfx942:sramecc+:xnack-"; else "".
        memory_bytes: that it has; 0 if it is unknown.
    """

    number: int
    visible: str
    name: str
    capability: tuple[int, int] | None
    memory_bytes: int
    architecture: str = ""

    @property
    def uuid(self) -> str:
        """Its UUID; "" if it is identified by a number, as without NVML."""
        return self.visible if self.visible.startswith(("GPU-", "MIG-")) else ""


def shown(gpu: Gpu) -> dict[str, str]:
    """Environment variables with which a process sees this device and no other."""
    environment = {"CUDA_VISIBLE_DEVICES": gpu.visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if "HIP_VISIBLE_DEVICES" in child_environment():  # ROCm looks at it first
        environment["HIP_VISIBLE_DEVICES"] = gpu.visible
    return environment


def isolated_device(device: str, cuda_visible: str | None) -> tuple[str, dict[str, str]]:
    """(what torch calls a device of this machine in a process that sees no other, what that process's environment
    needs for it)."""
    gpus = {f"cuda:{gpu.number}": gpu for gpu in find_gpus(cuda_visible)} if device.startswith("cuda") else {}
    return ("cuda:0", shown(gpus[device])) if device in gpus else (device, {})


def find_gpus(cuda_visible: str | None) -> tuple[Gpu, ...]:
    """The devices that workers here may use, in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Where NVML does not answer (ROCm, WSL2) torch is asked, in a process of its own. The worker process of a device has
    the last word on it.

    Args:
        cuda_visible: CUDA_VISIBLE_DEVICES, or None if it is not set. It is understood as by CUDA (CUDA C++
            Programming Guide, environment variables): everything behind the first token that names no device is
            ignored, and a device that is named twice hides all. Beyond CUDA, which shows one MIG instance to a
            process, each instance of a list, or of a divided GPU, is a device.
    """
    library = nvml()
    if library is None:
        return _asked_of_torch(cuda_visible) if any(path.exists() for path in (DRIVER, *WITHOUT_NVML)) else ()
    cards = _cards(library)
    chosen = [gpu for _, gpus in cards for gpu in gpus] if cuda_visible is None else _chosen(cuda_visible, cards)
    return tuple(replace(gpu, number=number) for number, gpu in enumerate(chosen))


def find_devices(option: str, cuda_visible: str | None) -> tuple[str, ...]:
    """The devices that `--devices` names: "cuda" is every CUDA device, "auto" the same, or the CPU if there is none.

    Nothing is initialised on a device here: a CUDA context in the supervisor would outlive every worker.

    Args:
        option: "auto", "cuda" or a list of devices.
        cuda_visible: CUDA_VISIBLE_DEVICES, or None if it is not set.

    Raises NoDeviceError if a CUDA device is asked for that is not there, UsageError if a name is unknown.
    """
    requested = ["cuda"] if option == "auto" else [part.strip() for part in option.split(",") if part.strip()]
    for name in requested:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", name) and not simulated_speed(name):
            raise UsageError(f"unknown device {name!r}", next_step=DEVICES_NEXT)
    if not requested:
        raise UsageError("--devices names no device", next_step=DEVICES_NEXT)
    if not any(name.startswith("cuda") for name in requested):
        return tuple(requested)
    gpus = {f"cuda:{gpu.number}": gpu for gpu in find_gpus(cuda_visible)}
    if option == "auto":
        return tuple(gpus) or ("cpu",)
    names: list[str] = []
    for name in requested:
        if name.startswith("cuda") and not gpus:
            raise no_gpu(cuda_visible)
        if name.startswith("cuda:") and name not in gpus:
            here = ", ".join(f"{device} ({gpu.name})" for device, gpu in gpus.items())
            raise NoDeviceError(f"there is no {name} here, only {here}", next_step="name those, or use --devices cuda")
        names += gpus if name == "cuda" else (name,)
    return tuple(names)


def memory_of(gpu: Gpu) -> tuple[int, int]:
    """Bytes that are used of the memory of a GPU, by all programs, and all of it; (0, 0) where NVML does not answer."""
    library = nvml()
    if library is None:
        return 0, 0
    with suppress(library.NVMLError):
        memory = library.nvmlDeviceGetMemoryInfo(library.nvmlDeviceGetHandleByUUID(gpu.visible))
        return int(memory.used), int(memory.total)
    return 0, 0


def nvml() -> Any:
    """NVIDIA's library for the state of its GPUs (package nvidia-ml-py), ready to be asked; None if it is not here
    or finds no driver."""
    try:
        import pynvml as library
    except ImportError:
        return None
    with suppress(library.NVMLError):
        library.nvmlInit()
        return library
    return None


def handles(library: Any) -> Iterator[tuple[int, Any]]:
    """(number, handle) of each GPU that this process may use."""
    for index in range(library.nvmlDeviceGetCount()):
        with suppress(library.NVMLError):  # of another job's GPU, and of one that has fallen off the bus
            yield index, library.nvmlDeviceGetHandleByIndex(index)


def text_of(text: Any) -> str:
    """A text of NVML, which older bindings give as bytes."""
    return text.decode() if isinstance(text, bytes) else str(text)


_Card = tuple[str, list[Gpu]]
"""UUID of a GPU, and what can be computed on: itself, or its MIG instances."""


def _cards(library: Any) -> list[_Card]:
    cards: list[_Card] = []
    with suppress(library.NVMLError):
        for _, handle in handles(library):
            with suppress(library.NVMLError):
                uuid = text_of(library.nvmlDeviceGetUUID(handle))
                is_divided = _is_divided(library, handle)
                cards.append((uuid, _instances(library, handle) if is_divided else [_gpu(library, handle)]))
    return cards


def _is_divided(library: Any, handle: Any) -> bool:
    with suppress(library.NVMLError):
        return bool(library.nvmlDeviceGetMigMode(handle)[0] == library.NVML_DEVICE_MIG_ENABLE)
    return False


def _instances(library: Any, handle: Any) -> list[Gpu]:
    instances = []
    for index in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(library.NVMLError):  # the places of instances are not filled from the first on
            instances.append(_gpu(library, library.nvmlDeviceGetMigDeviceHandleByIndex(handle, index), parent=handle))
    return instances


def _gpu(library: Any, handle: Any, parent: Any = None) -> Gpu:
    name, capability, memory_bytes = "", None, 0
    with suppress(library.NVMLError):
        name = text_of(library.nvmlDeviceGetName(handle))
    with suppress(library.NVMLError):
        major, minor = library.nvmlDeviceGetCudaComputeCapability(handle if parent is None else parent)
        capability = (int(major), int(minor))
    with suppress(library.NVMLError):
        memory_bytes = int(library.nvmlDeviceGetMemoryInfo(handle).total)
    uuid = text_of(library.nvmlDeviceGetUUID(handle))
    return Gpu(number=-1, visible=uuid, name=name, capability=capability, memory_bytes=memory_bytes)


def _chosen(cuda_visible: str, cards: Sequence[_Card]) -> list[Gpu]:
    chosen: list[Gpu] = []
    for token in cuda_visible.split(","):
        named = _named(token.strip(), cards)
        if not named:
            break
        if any(gpu in chosen for gpu in named):
            return []
        chosen += named
    return chosen


def _named(token: str, cards: Sequence[_Card]) -> list[Gpu]:
    """The devices that one token names: by index, UUID or prefix of a UUID; none if it is ambiguous."""
    if number := re.match(r"\d+", token):  # CUDA reads the digits at the beginning, and no further
        index = int(number[0])
        return cards[index][1] if index < len(cards) else []
    if token.startswith("MIG-"):
        matches = [[gpu] for _, gpus in cards for gpu in gpus if gpu.visible.startswith(token)]
    else:
        matches = [gpus for uuid, gpus in cards if token.startswith("GPU-") and uuid.startswith(token)]
    return matches[0] if len(matches) == 1 else []


# Runs where torch may crash. Of ROCm's variables HIP_VISIBLE_DEVICES comes before CUDA_VISIBLE_DEVICES.
_TORCH = """
import json, os, torch
hip = torch.version.hip is not None
shown = (os.environ.get("HIP_VISIBLE_DEVICES") if hip else None) or os.environ.get("CUDA_VISIBLE_DEVICES")
found = []
for i in range(torch.cuda.device_count()):
    of = torch.cuda.get_device_properties(i)
    gpu = {"number": i, "visible": shown.split(",")[i].strip() if shown else str(i), "name": of.name}
    kind = {"capability": None, "architecture": of.gcnArchName} if hip else {"capability": [of.major, of.minor]}
    found.append({**gpu, **kind, "memory_bytes": of.total_memory})
print(json.dumps(found))
"""


@cache
def torch_architectures() -> tuple[str, ...]:
    """Architectures of the installed torch, see `torch.cuda.get_arch_list`; () if torch fails."""
    return tuple(_output_of("import json, torch\nprint(json.dumps(torch.cuda.get_arch_list()))"))


@cache
def _asked_of_torch(cuda_visible: str | None) -> tuple[Gpu, ...]:
    shown = {} if cuda_visible is None else {"CUDA_VISIBLE_DEVICES": cuda_visible}
    return wire.convert(tuple[Gpu, ...], _output_of(_TORCH, **shown), what="list of GPUs")


def _output_of(program: str, **shown: str) -> list[Any]:
    """The JSON list that a Python process prints last; [] if it fails, for reasons that `embq doctor` shows."""
    try:
        environment = child_environment(CUDA_DEVICE_ORDER="PCI_BUS_ID", **shown)
        done = run_python("-c", program, timeout_s=TORCH_S, environment=environment)
        done.check_returncode()
        answer: list[Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []
    return answer


def no_gpu(cuda_visible: str | None) -> NoDeviceError:
    """The error if a CUDA device is asked for and there is none."""
    why, remedy = why_no_gpu(cuda_visible)
    cpu = "--devices cpu"
    if _in_container():
        cpu += ", or in the container stack COMPOSE_FILE=docker-compose.yml:deploy/docker-compose.cpu.yml in .env"
    return NoDeviceError(f"there is no CUDA device here: {why}", next_step=f"{remedy}; for the CPU: {cpu}")


def why_no_gpu(cuda_visible: str | None, *, driver: Path = DRIVER, root: Path = Path("/")) -> tuple[str, str]:
    """(why no worker here would see a CUDA device, what helps)."""
    hidden = len(find_gpus(None)) if cuda_visible is not None else 0
    if cuda_visible is not None and (hidden or not re.match(r"\s*[\dGM]", cuda_visible)):
        why = f"CUDA_VISIBLE_DEVICES={cuda_visible!r} hides them all"
        if not hidden:
            return why, "unset CUDA_VISIBLE_DEVICES, or let it name devices"
        return why, f"unset CUDA_VISIBLE_DEVICES, or let it name each once, by index or UUID: there are {hidden}"
    for path, what in WITHOUT_NVML.items():
        if path.exists():
            return f"this machine has {what} ({path}), and torch sees none", "install the build of torch for it"
    if not driver.exists():
        where = "on the machine itself, outside of the container, " if _in_container(root) else ""
        return "no NVIDIA driver is loaded", f"install the driver {where}until nvidia-smi lists the GPUs there"
    if _in_container(root):
        return (
            "the machine has an NVIDIA driver, and this container was given no GPU",
            "install nvidia-container-toolkit on the machine, run `nvidia-ctk runtime configure --runtime=docker`, "
            "restart Docker, and start the container with the runtime nvidia (or --gpus all)",
        )
    return (
        "an NVIDIA driver is loaded, and it shows no GPU",
        "run nvidia-smi, which says what is wrong with them; after an update of the driver restart the machine",
    )


def _in_container(root: Path = Path("/")) -> bool:
    return any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))
