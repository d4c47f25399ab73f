"""Typed parameters of a model spec."""

from __future__ import annotations

import math

from embq.core.errors import ModelError
from embq.core.models import ModelSpec


def whole_number(spec: ModelSpec, name: str, default: int, *, least: int = 1) -> int:
    """A whole number, `least` or more; ModelError if it is not."""
    text = spec.param(name, str(default))
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ModelError(
            f"{spec}: {name} must be a whole number, {least} or more", next_step=f"for example {name}={default}"
        )
    return int(text)


def milliseconds_as_s(spec: ModelSpec, name: str) -> float:
    """A parameter in milliseconds, as seconds (default 0); ModelError if it is not 0 or more."""
    try:
        milliseconds = float(spec.param(name, "0"))
    except ValueError:
        milliseconds = math.nan
    if not (math.isfinite(milliseconds) and milliseconds >= 0):
        raise ModelError(f"{spec}: {name} must be milliseconds, 0 or more", next_step=f"such as {name}=2.5")
    return milliseconds / 1000


def choice(spec: ModelSpec, name: str, default: str, choices: tuple[str, ...]) -> str:
    """A parameter that must be one of `choices`; ModelError lists them if it is not."""
    text = spec.param(name, default)
    if text not in choices:
        raise ModelError(f"{spec}: unknown {name} {text!r}", next_step=f"use {name}= one of {', '.join(choices)}")
    return text


def unit_length(spec: ModelSpec, default: str) -> bool:
    """The parameter `normalize`: whether the model brings its vectors to length 1."""
    return choice(spec, "normalize", default, ("true", "false")) == "true"
