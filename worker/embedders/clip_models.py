"""Which model of open_clip a spec names, and how it is made."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import open_clip
import torch

from core.errors import ModelError
from core.model_spec import ModelSpec
from core.service.log import Events
from worker.embedders.loading import model_source
from worker.embedders.params import choice, whole_number

log = Events("worker")


def maker(spec: ModelSpec) -> tuple[Callable[[], tuple[Any, Any, Any]], str]:
    """What makes (model, training transform, evaluation transform) of a spec, and the name of its tokeniser."""
    create = open_clip.create_model_and_transforms
    if spec.name.startswith("local-dir:"):
        spec.check_params("batch_size", "tokens", "normalize")
        folder, _ = model_source(spec.name.removeprefix("local-dir:"), spec)
        # Without weights in the folder, open_clip would go on with random ones.
        if not any(file.suffix in (".safetensors", ".bin", ".pth") for file in Path(folder).iterdir()):
            raise ModelError(f"{spec}: the folder holds no weights", next_step="add open_clip_model.safetensors")
        name = f"local-dir:{folder}"
        return (lambda: create(name, weights_only=True)), name
    if spec.param("init", ""):
        spec.check_params("init", "seed", "batch_size", "tokens", "normalize")
        choice(spec, "init", "random", ("random",))
        arch, seed = _known_arch(spec, spec.name.replace("/", "-")), whole_number(spec, "seed", 0, least=0)
        return (lambda: _random_model(spec, arch, seed)), arch
    spec.check_params("batch_size", "tokens", "normalize")
    arch, _, tag = spec.name.rpartition("/")
    if not arch:
        arch, tag = tag, ""
    arch = _known_arch(spec, arch.replace("/", "-"))
    _check_tag(spec, arch, tag)
    return (lambda: create(arch, pretrained=tag, weights_only=True)), arch


def _random_model(spec: ModelSpec, arch: str, seed: int) -> tuple[Any, Any, Any]:
    """A model with random weights that depend on the seed only; the process's random state stays as it is."""
    log.warning("model_weights_are_random", model=spec)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed the CUDA devices too.
        torch.default_generator.manual_seed(seed)
        made: tuple[Any, Any, Any] = open_clip.create_model_and_transforms(
            arch, pretrained=None, pretrained_image=False, pretrained_text=False
        )
    return made


def _known_arch(spec: ModelSpec, arch: str) -> str:
    known = open_clip.list_models()
    if arch in known:
        return arch
    raise ModelError(f"{spec}: open_clip has no architecture {arch!r}", next_step=_near(arch, known))


def _check_tag(spec: ModelSpec, arch: str, tag: str) -> None:
    """Refuse tags that are unknown, or trained with another activation, which open_clip only warns of."""
    known = open_clip.list_pretrained_tags_by_model(arch)
    if tag not in known:
        missing = f"has no weights {tag!r}" if tag else "needs the tag of its weights"
        raise ModelError(
            f"{spec}: {arch} {missing}",
            next_step=_near(tag, known) if known else f"use open_clip:{arch}?init=random for random weights",
        )
    made_with = bool(open_clip.get_pretrained_cfg(arch, tag).get("quick_gelu", False))
    built_with = bool((open_clip.get_model_config(arch) or {}).get("quick_gelu", False))
    if made_with != built_with:
        other = f"{arch}-quickgelu" if made_with else arch.removesuffix("-quickgelu")
        raise ModelError(
            f"{spec}: QuickGELU is {'on' if made_with else 'off'} in these weights, but not so in {arch}",
            next_step=f"use open_clip:{other}/{tag}",
        )


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=4, cutoff=0.4) or sorted(known)[:4]
    return f"near matches: {', '.join(near)}"
