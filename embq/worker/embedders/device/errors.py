"""Translation of what torch raises for a device that is full or broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from embq.core.errors import DeviceError, DeviceFullError, EmbqError

DEVICE_FAULTS = (
    *("CUDA error", "CUDA driver", "CUDA unknown error", "CUDA GPUs", "NVIDIA driver", "HIP error"),
    *("CUBLAS_STATUS", "CUDNN_STATUS", "device-side"),
)
"""Parts of what torch says where a device or its driver is at fault, also while a context is made."""


@contextmanager
def using(device: torch.device) -> Iterator[None]:
    """Make a device the current one of the thread, and turn what it raises into our own errors, see `device_error`.

    In CUDA a stream, an event, page-locked memory and a copy belong to the thread's current device where they name
    none. That is cuda:0 in each thread at first, whatever device the tensors are on.
    """
    with translated_device_errors(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def translated_device_errors() -> Iterator[None]:
    """Turn what torch raises for a device that is full or broken into our own errors, see `device_error`."""
    try:
        yield
    except RuntimeError as error:
        if (translated := device_error(error)) is not None:
            raise translated from error
        raise


def device_error(error: Exception) -> EmbqError | None:
    """The DeviceFullError or DeviceError that a foreign exception stands for; None if the device is not at fault."""
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError) or _says_out_of_memory(error):
        return DeviceFullError(f"the memory of the device is too small: {first}")
    return DeviceError(f"the device failed: {first}") if is_device_fault(error) else None


def _says_out_of_memory(error: Exception) -> bool:
    """cuBLAS and the CPU allocator report it with a plain RuntimeError. So does torch on MIG instances and on Jetson,
    if it fails to ask NVML for what its message would say (pytorch issues 112377, 185240)."""
    parts = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "NVML_SUCCESS == r INTERNAL ASSERT")
    return isinstance(error, RuntimeError) and any(part in str(error) for part in parts)


def is_device_fault(error: Exception) -> bool:
    """Whether a foreign exception says that the device, not the model or the input, is at fault."""
    accelerator_error = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return any(word in str(error) for word in DEVICE_FAULTS)
