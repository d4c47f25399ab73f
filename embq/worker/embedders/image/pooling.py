"""Pooling of the outputs of a transformers vision model to one vector per image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from embq.core.errors import ModelError
from embq.core.models import ModelSpec

POOLINGS = ("projection", "pooler", "cls", "mean", "max")
"""The projection to a space of images and texts, the model's own last step, the vector of the class token, or the mean
or maximum of the vectors of the patches."""

BEFORE_PATCHES = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
"""Names in transformers of vectors that stand before those of the patches; the first two are a class token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """A pooling of one model.

    Attributes:
        names: of `POOLINGS`; the vectors of several are put one after the other.
        prefix: vectors that stand before those of the patches.
    """

    names: tuple[str, ...]
    prefix: int

    def __call__(self, given: Any) -> torch.Tensor:
        """The vectors in float32, of shape (n, dim)."""
        return torch.cat([self._vectors(name, given) for name in self.names], dim=1)

    def _vectors(self, name: str, given: Any) -> torch.Tensor:
        if name == "projection":
            return _flat(given.image_embeds if hasattr(given, "image_embeds") else given.pooler_output)
        if name == "pooler":
            return _flat(given.pooler_output)
        states: torch.Tensor = given.last_hidden_state.float()
        if name == "cls":
            return states[:, 0]
        # Convolutions give (n, channels, height, width), transformers (n, tokens, channels).
        patches = states.flatten(2).transpose(1, 2) if states.ndim == 4 else states[:, self.prefix :]
        return patches.mean(dim=1) if name == "mean" else patches.amax(dim=1)


def has_joint_space(kind: Any) -> bool:
    """Whether a class of models embeds images and texts into one space, as CLIP does; chat models do only the first."""
    return hasattr(kind, "get_image_features") and hasattr(kind, "get_text_features")


def given_by(model: Any, numbers: torch.Tensor) -> Any:
    """Outputs of a model for normalised images of shape (n, 3, height, width)."""
    if has_joint_space(type(model)):
        return model.get_image_features(pixel_values=numbers, return_dict=True)
    return model(pixel_values=numbers, return_dict=True)


def asked_pooling(spec: ModelSpec) -> tuple[str, ...]:
    """The parameter `pooling`: names of `POOLINGS`, () if it is not given; ModelError for any other."""
    names = tuple(name for name in spec.param("pooling", "").split("+") if name)
    unknown = [name for name in names if name not in POOLINGS]
    if unknown or (len(names) > 1 and "projection" in names):
        raise ModelError(
            f"{spec}: unknown pooling {'+'.join(unknown or names)!r} of images",
            next_step=f"use pooling= one of {', '.join(POOLINGS)}, or several of the last four, such as cls+mean",
        )
    return names


def pooling_for(
    spec: ModelSpec, model: Any, requested: tuple[str, ...], *, image: torch.Tensor, absent: Sequence[str]
) -> Pooling:
    """The pooling that is asked for, or the one that suits the model.

    Args:
        requested: from `asked_pooling`.
        image: one that is normalised, to try it with: (1, 3, height, width).
        absent: names of weights that the checkpoint lacks.

    Raises ModelError if the model has not what it needs, or returns another vector of an image each time.
    """
    with torch.inference_mode():
        given, again = given_by(model, image), given_by(model, image)
    prefix = {name: weights for name, weights in model.named_parameters() if name.rpartition(".")[2] in BEFORE_PATCHES}
    has = {
        "projection": has_joint_space(type(model)) or hasattr(given, "image_embeds"),
        "pooler": getattr(given, "pooler_output", None) is not None,
        "cls": any(name.endswith(BEFORE_PATCHES[:2]) for name in prefix),
        "mean": True,
        "max": True,
    }
    is_trained = not _is_of_bert(model) and not any(name.startswith("pooler.") for name in absent)
    fit = [name for name in POOLINGS if has[name] and (name != "pooler" or is_trained)]
    names = requested or (fit[0],)
    if lacking := [name for name in names if not has[name]]:
        raise ModelError(
            f"{spec}: its {type(model).__name__} gives nothing for pooling={lacking[0]}",
            next_step=f"use pooling= one of {', '.join(name for name in POOLINGS if has[name])}",
        )
    # Registers are several vectors in one parameter.
    count = sum(weights.shape[-2] if name.endswith("register_tokens") else 1 for name, weights in prefix.items())
    pooling = Pooling(names=names, prefix=count)
    if not torch.allclose(pooling(given), pooling(again), rtol=1e-4, atol=1e-6):
        raise ModelError(
            f"{spec}: its {type(model).__name__} gives an image another vector each time, as one that hides patches",
            next_step="use a model that was made to encode whole images",
        )
    return pooling


def _is_of_bert(model: Any) -> bool:
    """Whether the pooler is a dense layer behind the class token, as BERT's.

    Many checkpoints come without its weights, and those who publish them use the class token itself.
    """
    return isinstance(getattr(getattr(model, "pooler", None), "dense", None), torch.nn.Linear)


def _flat(vectors: torch.Tensor) -> torch.Tensor:
    """In float32 and of shape (n, dim): the poolers of convolutions leave a height and a width of 1."""
    return vectors.float().flatten(1)
