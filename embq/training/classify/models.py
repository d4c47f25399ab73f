"""Architectures of timm and torchvision by name, with random weights or those of a file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embq.core.errors import InputError, ModelError
from embq.core.storage.beneath import require_regular

if TYPE_CHECKING:
    from torch import Tensor, nn


LIBRARIES = ("timm", "torchvision")
"""In the order in which a bare name is looked for."""
_ONE_HEAD = {"aux_logits": False, "init_weights": True}
_EXTRA_HEADS = {"googlenet": _ONE_HEAD, "inception_v3": _ONE_HEAD}
"""torchvision's models that give more than one output in training by default."""


def full_name(arch: str) -> str:
    """`timm:NAME` or `torchvision:NAME` of an architecture; ModelError with similar names if there is none."""
    library, colon, name = arch.partition(":")
    if not colon:
        library, name = "", arch
    if library not in ("", *LIBRARIES):
        raise ModelError(
            f"--model {arch}: {library!r} is no library of architectures that embq knows",
            next_step="write timm:NAME, torchvision:NAME or NAME",
        )
    names = {library: _names(library) for library in ([library] if library else LIBRARIES)}
    for library, of_library in names.items():
        if name in of_library:
            return f"{library}:{name}"
    near = [f"{library}:{close}" for library in names for close in difflib.get_close_matches(name, names[library], n=2)]
    raise ModelError(
        f"--model {arch}: {' and '.join(names)} {'has' if len(names) == 1 else 'have'} no architecture {name!r}",
        next_step=f"did you mean {' or '.join(near)}?"
        if near
        else "the names: python -c 'import timm; print(*timm.list_models())'",
    )


def built(name: str, *, classes: int, image_size: int) -> nn.Module:
    """The architecture with random weights, drawn from torch's generator.

    Raises ModelError if it cannot be built for these sizes.
    """
    library, _, short = name.partition(":")
    try:
        model: nn.Module = _created(library, short, classes, image_size)
        _try_out(model, classes, image_size)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{name} cannot be built for {classes} classes and images of {image_size} pixels: {error}",
            next_step="give it another --image-size, or take another --model",
        ) from error
    return model


def _try_out(model: nn.Module, classes: int, image_size: int) -> None:
    """ValueError or RuntimeError of a network that cannot take images of this size; many are built for any."""
    import torch

    model.eval()
    with torch.inference_mode():
        output = model(torch.zeros(1, 3, image_size, image_size))
    model.train()
    if not isinstance(output, torch.Tensor) or output.shape != (1, classes):
        raise ValueError("it gives something else than one number for each class")


def load_weights(model: nn.Module, path: Path) -> list[str]:
    """Load a safetensors file into a model; returns the tensors that stay random.

    Those can only be the last layer's, if the file is of other classes. Raises InputError for any other file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        given: Mapping[str, Tensor] = load_file(require_regular(path))
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"--start {path} cannot be read as safetensors: {error}",
            next_step="give a model.safetensors that embq train wrote, or a .safetensors file of timm",
        ) from error
    own = model.state_dict()
    head = _head(model)
    fresh = [name for name in own if name.startswith(head) and name in given and own[name].shape != given[name].shape]
    taken = {name: tensor for name, tensor in given.items() if name not in fresh}
    unlike = [name for name in own if name not in fresh and (name not in taken or own[name].shape != taken[name].shape)]
    unlike += [name for name in taken if name not in own]
    if unlike:
        raise InputError(
            f"--start {path} is of another architecture: {len(unlike)} of its tensors or of the model's have no match, "
            f"such as {unlike[0]}",
            next_step="give the --model that it was trained with",
        )
    model.load_state_dict(taken, strict=False)
    return fresh


def _head(model: nn.Module) -> tuple[str, ...]:
    """Prefix of the last layer's tensors."""
    last = [name for name, module in model.named_modules() if hasattr(module, "weight") and name]
    return (f"{last[-1]}.",) if last else ()


def _names(library: str) -> list[str]:
    """The architectures of a library."""
    if library == "timm":
        import timm

        return list(timm.list_models())
    import torchvision

    return list(torchvision.models.list_models(module=torchvision.models))


def _created(library: str, name: str, classes: int, image_size: int) -> Any:
    size: dict[str, Any] = {}
    if library == "timm":
        import timm

        config = timm.get_pretrained_cfg(name)
        if config is not None and config.fixed_input_size:
            size = {"img_size": image_size}
        return timm.create_model(name, pretrained=False, num_classes=classes, **size)
    import torchvision

    if name.startswith("vit_"):
        size = {"image_size": image_size}
    elif name == "maxvit_t":
        size = {"input_size": (image_size, image_size)}
    return torchvision.models.get_model(name, weights=None, num_classes=classes, **size, **_EXTRA_HEADS.get(name, {}))
