"""What a device is called by its maker, so that measured speeds can be told apart; and giving its memory back."""

from __future__ import annotations

import gc
import os
import platform
import re
import sys
from pathlib import Path


def device_name(device: str) -> str:
    """The model of a device, such as "NVIDIA H200"; a CPU with the number of its cores.

    Args:
        device: "cpu" or "cuda:N", as torch names it.
    """
    if device.startswith("cuda"):
        import torch

        try:
            return str(torch.cuda.get_device_name(torch.device(device)))
        except (RuntimeError, AssertionError):
            return device  # a name for people: whether the device works, the model finds out
    try:
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        model = None
    return f"{model.group(1).strip() if model else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def free_memory() -> None:
    """Give back what a model held that nobody uses any more, to the device as well.

    Its pipeline refers to itself in circles, so it is there until it is collected; and torch keeps freed device memory,
    which the other processes on the device could not use.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
