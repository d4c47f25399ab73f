"""The NVIDIA GPUs of this machine, found without a CUDA context, which would outlive every worker in the supervisor."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from core.errors import NoDeviceError

NVIDIA_SMI_S = 20.0
"""A driver that was just loaded takes seconds for each GPU."""
DEVICES, DRIVER = Path("/dev"), Path("/proc/driver/nvidia")


def gpu_count(cuda_visible: str | None, devices: Path = DEVICES) -> int:
    """CUDA devices that a worker here would see.

    Args:
        cuda_visible: CUDA_VISIBLE_DEVICES, or None where it is not set.
    """
    if cuda_visible is not None:
        return len(_chosen(cuda_visible))
    return len([path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])


def _chosen(cuda_visible: str) -> list[str]:
    return [part.strip() for part in cuda_visible.split(",") if part.strip() not in ("", "-1")]


def no_gpu(cuda_visible: str | None) -> NoDeviceError:
    """The error where a CUDA device is asked for and there is none."""
    why, mend = why_no_gpu(cuda_visible)
    cpu = "docker compose -f docker-compose.yml -f docker-compose.cpu.yml up -d" if _in_container() else "--devices cpu"
    return NoDeviceError(f"there is no CUDA device here: {why}", next_step=f"{mend}; for the CPU: {cpu}")


def why_no_gpu(
    cuda_visible: str | None, *, devices: Path = DEVICES, driver: Path = DRIVER, root: Path = Path("/")
) -> tuple[str, str]:
    """(why no worker here would see a CUDA device, what helps)."""
    if cuda_visible is not None:
        why = f"CUDA_VISIBLE_DEVICES={cuda_visible!r} hides them all"
        return why, "unset CUDA_VISIBLE_DEVICES, or let it name devices"
    if not (driver / "version").exists():
        where = "on the machine itself, outside of the container, " if _in_container(root) else ""
        return "no NVIDIA driver is loaded", f"install the driver {where}until nvidia-smi lists the GPUs there"
    if _in_container(root):
        return (
            "the machine has an NVIDIA driver, and this container was given no GPU",
            "install nvidia-container-toolkit on the machine, run `nvidia-ctk runtime configure --runtime=docker`, "
            "restart Docker, and start the container with the runtime nvidia (or --gpus all)",
        )
    return (
        f"an NVIDIA driver is loaded, and {devices} has no nvidia0",
        "run nvidia-smi, which makes the device files or says what is wrong with the GPU",
    )


def _in_container(root: Path = Path("/")) -> bool:
    return any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))


def gpu_names(cuda_visible: str | None) -> list[str]:
    """The model of each visible GPU, such as "NVIDIA H200", in the order of their numbers; [] where nobody knows.

    Of unequal GPUs CUDA puts the fastest first unless CUDA_DEVICE_ORDER says otherwise, nvidia-smi the first slot: once
    a worker process has a model on its device, its own report tells the name for certain.
    """
    listed = _listed()
    if cuda_visible is None:
        return [name for _, _, name in listed]
    names = []
    for part in _chosen(cuda_visible):
        found = [name for index, uuid, name in listed if part == index or (part.startswith("GPU-") and part in uuid)]
        names.append(found[0] if found else "")
    return names


def _listed() -> list[tuple[str, str, str]]:
    """(index, UUID, name) of each GPU, as nvidia-smi says."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=NVIDIA_SMI_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",", 2)] for line in done.stdout.splitlines()]
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3] if done.returncode == 0 else []
