"""Weights of a model as a safetensors file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_OF_THE_SYSTEM = re.compile(r"\(os error (\d+)\)")
"""How safetensors, which is written in Rust, says why a file could not be written."""


def save(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors by their names; OSError where the disk does not take them."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Each on its own, because safetensors refuses tensors that share memory.
    own = {name: one.detach().cpu().contiguous().clone() for name, one in weights.items()}
    try:
        save_file(own, path, {"format": "pt"})
    except SafetensorError as error:
        if found := _OF_THE_SYSTEM.search(str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
        raise
