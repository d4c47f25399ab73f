"""LoRA adapters of PEFT, added to the weights of their model when it is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from embq.core.errors import ModelError
from embq.core.models import ModelSpec
from embq.worker.embedders.config_keys import ModelFiles, shown
from embq.worker.embedders.model_files import check_place

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
"""Names of the two factors of a layer; whatever else an adapter holds is not added up to weights."""


def add_lora(trunk: Any, spec: ModelSpec) -> None:
    """Add the adapter that a spec names in `lora=` to the weights of a trunk in fp32; nothing if it names none.

    Each layer W becomes W + scale * B A, as PEFT's `merge_and_unload` has it.

    Raises ModelError if the adapter is another kind, of another model, or holds more than factors of layers.
    """
    if not (named := spec.param("lora", "")):
        return
    folder = Path(named).expanduser()
    check_place(folder, spec)
    files = ModelFiles(folder, spec)
    config = files.read_object(CONFIG)
    if not config:
        raise ModelError(
            f"{spec}: there is no {CONFIG} in {named}",
            next_step="name the folder of an adapter in lora=; adapters are taken from folders only",
        )
    if config.get("peft_type") != "LORA" or config.get("alora_invocation_tokens"):
        raise files.refused(CONFIG, f"is of a {shown(config.get('peft_type'))} adapter", "use a plain LoRA adapter")
    layers = {} if trunk is None else dict(trunk.named_modules())
    for name, (down, up) in _factors(files).items():
        layer = _layer(layers, name, trunk)
        weight = getattr(layer, "weight", None)
        # Before they are multiplied: two factors of 128 KB may be of a layer of gigabytes.
        shape = (down.shape[1], len(up)) if config.get("fan_in_fan_out") else (len(up), down.shape[1])
        if not isinstance(weight, torch.nn.Parameter) or weight.shape != shape or up.shape[1] != len(down):
            raise ModelError(
                f"{spec}: the adapter changes {name}, of which the model has no weight of that shape",
                next_step=f"use the model for which it was trained: {shown(config.get('base_model_name_or_path'))}",
            )
        change, scale = up.float() @ down.float(), _scale(config, name, rank=len(down), files=files)
        with torch.no_grad():
            weight.add_(change.T if config.get("fan_in_fan_out") else change, alpha=scale)


def _factors(files: ModelFiles) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
    """Layer -> its factors A, shape (rank, in), and B, shape (out, rank)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(files.folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise files.refused(WEIGHTS, f"cannot be read: {error}", "convert the adapter to safetensors") from error
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = FACTOR.fullmatch(name)
        if match is None or tensor.ndim != 2 or not tensor.numel() or not bool(tensor.isfinite().all()):
            raise files.refused(WEIGHTS, f"holds {shown(name)}, which is no factor of a layer", "merge it with PEFT")
        layers.setdefault(match[1], {})[match[2]] = tensor
    if single := [name for name, factors in layers.items() if len(factors) < 2]:
        raise files.refused(WEIGHTS, f"has one factor of {single[0]}", "use the file as it was saved")
    return {name: (factors["A"], factors["B"]) for name, factors in layers.items()}


def _layer(layers: Mapping[str, Any], name: str, trunk: Any) -> Any:
    """The layer of a name that may begin with that of the trunk in a model with a head: `model.layers.0...`."""
    prefix = f"{getattr(trunk, 'base_model_prefix', '')}."
    return layers.get(name, layers.get(name.removeprefix(prefix)))


def _scale(config: Mapping[str, Any], name: str, *, rank: int, files: ModelFiles) -> float:
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise files.refused(CONFIG, f"has {shown(patterns)} as alpha_pattern", "use the file as it was saved")
    own = [value for key, value in patterns.items() if re.fullmatch(rf"(?:.*\.)?{re.escape(key)}", name)]
    alpha = own[0] if own else config.get("lora_alpha", 8)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise files.refused(CONFIG, f"has {shown(alpha)} as lora_alpha", "use the file as it was saved")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
