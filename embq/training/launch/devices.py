"""Number of training processes per host: one for each GPU, or as asked for on the CPU."""

from __future__ import annotations

from embq.core.errors import ConfigError, UsageError
from embq.core.process.limits import cores
from embq.core.settings import Settings


def processes_for(device: str, asked: int | None) -> int:
    """Number of processes on this host.

    Args:
        device: "cuda" or "cpu".
        asked: None for every GPU that is visible, or for one process on the CPU.

    Raises ConfigError where there are fewer GPUs than that.
    """
    from embq.worker.supervisor.devices import why_no_gpu

    check_processes(asked)
    if device == "cpu":
        return asked or 1
    visible = Settings.from_environment().cuda_visible
    seen = gpu_count(visible)
    if not seen:
        why, mend = why_no_gpu(visible)
        raise ConfigError(
            f"--device cuda was asked for, and this machine shows no GPU: {why}; it has {cores()} cores",
            next_step=f"{mend}; or train on the cores: --device cpu --num-devices {asked or 1}",
            code="no_device",
        )
    if asked is not None and asked > seen:
        raise ConfigError(
            f"{asked} processes were asked for on GPUs, and this machine shows {seen}",
            next_step=f"--num-devices {seen}, or leave it out to use all of them",
            code="no_device",
        )
    return asked or seen


def gpu_count(cuda_visible: str | None) -> int:
    """GPUs of this host on which processes can train together.

    A divided GPU (MIG) counts as one: CUDA shows a process one instance only, and NCCL joins no two of them.

    Args:
        cuda_visible: CUDA_VISIBLE_DEVICES, or None where it is not set.
    """
    from embq.worker.supervisor.devices import find_gpus

    gpus = find_gpus(cuda_visible)
    return 1 if any(gpu.visible.startswith("MIG-") for gpu in gpus) else len(gpus)


def check_processes(asked: int | None) -> None:
    """UsageError where fewer than one process is asked for."""
    if asked is not None and asked < 1:
        raise UsageError(
            f"--num-devices {asked}: at least one has to train", next_step="give 1 or more, or leave it out"
        )


def thread_share(processes: int, omp_threads: str, available: int) -> int | None:
    """Threads per process, so that the processes of a host use each core once.

    None where OMP_NUM_THREADS says it, or one process may have them all.
    """
    return None if omp_threads or processes == 1 else max(1, available // processes)
