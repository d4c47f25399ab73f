"""Number of training processes per host: one for each GPU, or as asked for on the CPU."""

from __future__ import annotations

from embq.core.errors import ConfigError
from embq.core.process.limits import cores
from embq.core.settings import Settings


def processes_for(device: str, count: int | None) -> int:
    """Number of processes on this host.

    Args:
        device: "cuda" or "cpu".
        count: None for every GPU that is visible, or for one process on the CPU.

    Raises ConfigError if there are fewer GPUs than that.
    """
    from embq.worker.supervisor.devices import why_no_gpu

    if device == "cpu":
        return count or 1
    visible = Settings.from_environment().cuda_visible
    gpus = gpu_count(visible)
    if not gpus:
        why, fix = why_no_gpu(visible)
        raise ConfigError(
            f"--device cuda was asked for, and this machine shows no GPU: {why}; it has {cores()} cores",
            next_step=f"{fix}; or train on the cores: --device cpu --num-devices {count or 1}",
            code="no_device",
        )
    if count is not None and count > gpus:
        raise ConfigError(
            f"{count} processes were asked for on GPUs, and this machine shows {gpus}",
            next_step=f"--num-devices {gpus}, or leave it out to use all of them",
            code="no_device",
        )
    return count or gpus


def gpu_count(cuda_visible: str | None) -> int:
    """GPUs of this host on which processes can train together.

    A divided GPU (MIG) counts as one: CUDA shows a process one instance only, and NCCL joins no two of them.

    Args:
        cuda_visible: CUDA_VISIBLE_DEVICES, or None if it is not set.
    """
    from embq.worker.supervisor.devices import find_gpus

    gpus = find_gpus(cuda_visible)
    return 1 if any(gpu.visible.startswith("MIG-") for gpu in gpus) else len(gpus)


def threads_of(processes: int, available: int) -> dict[str, str]:
    """OMP_NUM_THREADS with which the processes of a host use each core once; empty for one process, which has them all.

    Args:
        available: cores of the host.
    """
    return {} if processes == 1 else {"OMP_NUM_THREADS": str(max(1, available // processes))}
