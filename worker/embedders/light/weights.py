"""Weights of a safetensors file, as arrays that lie in the mapped file."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import numpy as np

MOST_HEADER_BYTES = 16 << 20
"""Of the JSON at the beginning; a large model has some hundred kilobytes."""


def mapped_weights(path: Path) -> dict[str, np.ndarray]:
    """Name -> float32 array of each tensor of that type; others are left out. Nothing is read but the header.

    The format: 8 bytes with the length of the header, little-endian; the header, JSON; the numbers. Raises OSError, or
    ValueError where the file is no such file.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        length = int.from_bytes(mapped[:8], "little")
        if not 2 <= length <= min(MOST_HEADER_BYTES, len(mapped) - 8):
            raise ValueError(f"{path} is no safetensors file")
        header = json.loads(mapped[8 : 8 + length])
    numbers = np.asarray(np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length))
    weights = {}
    for name, tensor in header.items():
        if name != "__metadata__" and tensor["dtype"] == "F32":
            start, stop = tensor["data_offsets"]
            if not 0 <= start <= stop <= len(numbers):
                raise ValueError(f"{path} is cut off")
            weights[name] = numbers[start:stop].view(np.float32).reshape(tensor["shape"])
    return weights
