"""Prompt before each text, chosen from a model's prompts and its spec as sentence-transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from embq.core.errors import ModelError
from embq.core.models import ModelSpec
from embq.core.service.log import Events

CANDIDATES = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Prompt names of `encode_query` and `encode_document`: the first name that the model has."""

log = Events("worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompt before each text.

    Attributes:
        text: stands before the text, without a space of its own; "" for nothing.
        task: "query" or "document", by which some models choose their modules; "" for neither.
    """

    text: str
    task: str = ""


def check_prompt(spec: ModelSpec) -> None:
    """Raise ModelError if a spec names a prompt and has one."""
    if {"prompt_name", "prompt"} <= {name for name, _ in spec.params}:
        raise ModelError(f"{spec} names a prompt and gives another one", next_step="leave out one of the two")


def chosen(spec: ModelSpec, prompts: Mapping[str, str | None], default: str | None) -> Prompt:
    """The prompt of a spec; without one in it, the default of the model.

    Args:
        prompts: name -> text, as the model's files have them.
        default: name of the prompt that `encode` takes; None for none.

    `?prompt_name=query` and `?prompt_name=document` are `encode_query` and `encode_document`; any other name is
    `encode(prompt_name=...)`, and `?prompt=` is `encode(prompt=...)`. Raises ModelError for an unknown name.
    """
    given = dict(spec.params)
    if "prompt" in given:
        return Prompt(text=given["prompt"])
    usual = prompts.get(default) or "" if default else ""
    if "prompt_name" not in given:
        return Prompt(text=usual)
    requested = given["prompt_name"]
    if requested in CANDIDATES:
        name = next((name for name in CANDIDATES[requested] if name in prompts), None)
        if name is not None and not prompts[name] and (alternatives := sorted(key for key in prompts if prompts[key])):
            # As sentence-transformers has it, which finds "document" without a text before "passage" with one.
            log.warning("prompt_is_empty", model=spec, prompt=name, others=",".join(alternatives))
        return Prompt(text=usual if name is None else prompts[name] or "", task=requested)
    if requested not in prompts:
        names = ", ".join(sorted({*prompts, *CANDIDATES}))
        raise ModelError(
            f"{spec}: the model has no prompt {requested!r}",
            next_step=f"use prompt_name= one of {names}, or give the text itself with prompt=",
        )
    return Prompt(text=prompts[requested] or "")
