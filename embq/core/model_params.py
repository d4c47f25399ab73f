"""Typed parameters of a model spec, and those that each family of embq has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from embq.core.errors import ModelError


class Spec(Protocol):
    """A model spec, as far as its parameters go."""

    def param(self, name: str, default: str) -> str:
        """Return the value of one parameter."""
        ...


def whole_number(spec: Spec, name: str, default: int, *, least: int = 1) -> int:
    """A whole number, `least` or more; ModelError if it is not."""
    text = spec.param(name, str(default))
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ModelError(
            f"{spec}: {name} must be a whole number, {least} or more", next_step=f"for example {name}={default}"
        )
    return int(text)


def milliseconds_as_s(spec: Spec, name: str) -> float:
    """A parameter in milliseconds, as seconds (default 0); ModelError if it is not 0 or more."""
    try:
        milliseconds = float(spec.param(name, "0"))
    except ValueError:
        milliseconds = math.nan
    if not (math.isfinite(milliseconds) and milliseconds >= 0):
        raise ModelError(f"{spec}: {name} must be milliseconds, 0 or more", next_step=f"such as {name}=2.5")
    return milliseconds / 1000


def choice(spec: Spec, name: str, default: str, choices: tuple[str, ...]) -> str:
    """A parameter that must be one of `choices`; ModelError lists them if it is not."""
    text = spec.param(name, default)
    if text not in choices:
        raise ModelError(f"{spec}: unknown {name} {text!r}", next_step=f"use {name}= one of {', '.join(choices)}")
    return text


def unit_length(spec: Spec, default: str) -> bool:
    """The parameter `normalize`: whether the model brings its vectors to length 1."""
    return choice(spec, "normalize", default, ("true", "false")) == "true"


def _any_text(_spec: Spec, _name: str) -> None:
    """Accept every value: the model tells, when it is loaded, whether it can be used."""


def _normalize(spec: Spec, _name: str) -> None:
    unit_length(spec, "true")


Check = Callable[[Spec, str], object]
"""(spec, name of a parameter of it): raises ModelError if the value cannot be one."""

_COUNT, _FREE = partial(whole_number, default=32), partial(whole_number, default=0, least=0)
_SIZES: Mapping[str, Check] = {"batch_size": _COUNT, "tokens": partial(whole_number, default=8_192)}
_TEXTS: Mapping[str, Check] = {"max_length": partial(whole_number, default=512), "prompt": _any_text, "lora": _any_text}

SENTENCE: Mapping[str, Check] = {**_SIZES, **_TEXTS, "normalize": _normalize, "prompt_name": _any_text}
ENCODER: Mapping[str, Check] = {
    **_SIZES,
    **_TEXTS,
    "normalize": _normalize,
    "embeds": partial(choice, default="text", choices=("image", "text")),
    "pooling": _any_text,
}
CLIP: Mapping[str, Check] = {
    **_SIZES,
    "normalize": _normalize,
    "init": partial(choice, default="random", choices=("random",)),
    "seed": _FREE,
}
STUB: Mapping[str, Check] = {
    **dict.fromkeys(("ms_per_sample", "ms_per_token", "ms_per_batch"), milliseconds_as_s),
    "batch_size": _COUNT,
    **dict.fromkeys(("tokens", "max_tokens", "pixels"), _FREE),
    "decode": partial(choice, default="0", choices=("0", "1")),
}
