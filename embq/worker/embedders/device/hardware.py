"""Names, precisions and instructions of devices, without importing torch."""

from __future__ import annotations

import gc
import os
import platform
import re
import sys

from embq.core.process.limits import cpu_field

SIMULATED = re.compile(r"sim:(\d{1,6}(?:\.\d{1,6})?)")
"""A device that only stub models run on: they wait as long as a device would compute that is this many times as fast as
one of speed 1. It shows what a fleet of unequal devices does, on a machine that has none."""

BF16_ARCHITECTURES = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
"""AMD GPUs with matrix instructions that are as fast in bf16 as in fp16 (LLVM's AMDGPU guide; rocBLAS)."""


def simulated_speed(device: str) -> float:
    """The speed of a simulated device such as "sim:2.5"; 0.0 for any other device."""
    match = SIMULATED.fullmatch(device)
    return float(match.group(1)) if match else 0.0


def device_name(device: str) -> str:
    """The model of a device, such as "NVIDIA H200"; a CPU with the number of its cores.

    Args:
        device: "cpu" or "cuda:N", as torch names it, or "sim:SPEED".
    """
    if simulated_speed(device):
        return f"simulated device of speed {simulated_speed(device):g}"
    if device.startswith("cuda"):
        import torch

        try:
            return str(torch.cuda.get_device_name(torch.device(device)))
        except (RuntimeError, AssertionError):
            return device  # a name for people: whether the device works, the model finds out
    model = cpu_field("model name") or platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def precisions_of(capability: tuple[int, int] | None, architecture: str = "") -> tuple[str, ...]:
    """The precisions in which a GPU computes fast, best first.

    Tensor cores compute in fp16 from compute capability 7.0 on and in bf16 from 8.0 on. Before, fp16 has a 64th of the
    rate of fp32 (6.1), or twice (6.0) without the sums in fp32 of tensor cores (CUDA C++ Programming Guide, throughput
    of native arithmetic instructions).

    Args:
        capability: of an NVIDIA GPU; None if it is another one, or unknown.
        architecture: of an AMD GPU, such as "gfx942:sramecc+:xnack-".
    """
    if architecture:
        return ("bf16", "fp16", "fp32") if architecture.startswith(BF16_ARCHITECTURES) else ("fp16", "fp32")
    if capability is None or capability < (7, 0):
        return ("fp32",)
    return ("fp16", "fp32") if capability < (8, 0) else ("bf16", "fp16", "fp32")


def cpu_flags() -> frozenset[str]:
    """The instructions that the CPU has beyond its basic ones, as Linux calls them; empty on other systems."""
    return frozenset(cpu_field("flags|Features").split())


def keep_uncollected() -> None:
    """Have the collector look no more at what is there, a million objects of libraries and the model, until
    `free_memory`: it took a third of the time of what reads and embeds images."""
    gc.collect()
    gc.freeze()


def free_memory(device: str) -> None:
    """Give back what a model held that nobody uses any more, to the device as well.

    Its pipeline refers to itself in circles, so it is there until it is collected; and torch keeps freed device memory,
    which the other processes on the device could not use. Raises DeviceError if the device is broken.
    """
    gc.unfreeze()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and device.startswith("cuda") and torch.cuda.is_initialized():
        from embq.worker.embedders.device.errors import using

        with using(torch.device(device)):
            torch.cuda.empty_cache()
