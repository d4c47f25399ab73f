"""What a device is called by its maker, so that measured speeds can be told apart."""

from __future__ import annotations

import os
import platform
import re
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
