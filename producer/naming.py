"""The models of a run as the user names them -> the config that workers load."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import ModelError, UsageError
from core.models import MODALITIES, REFERENCE, Chunking, ModelConfig, ModelSpec, NamedModel

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Names of models: columns begin with them, and readers of all formats take such columns without quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A model as it was asked for: its name, or "" where the run has no other, and its spec."""

    name: str
    spec: ModelSpec


def split_name(text: str) -> tuple[str | None, str]:
    """(name, spec) of `[NAME=]SPEC`; None where there is no name."""
    # The space at the end of a prompt, which is behind a question mark, is part of it.
    whole = text.lstrip() if "?" in text else text.strip()
    head, equals, rest = whole.partition("=")
    return (head, rest) if equals and not set(":?/") & set(head) else (None, whole)


def asked_models(texts: Sequence[str]) -> tuple[Asked, ...]:
    """The models that --model names, each with a name where there are several.

    Raises ModelError for a spec that is none, UsageError for a name that cannot be one, or that two would have.
    """
    if len(texts) == 1:
        name, spec = split_name(texts[0])
        if name is not None:
            raise UsageError(
                f"the run has one model, and {name!r} is a name for one of several", next_step=f"-m {spec}"
            )
        return (Asked(name="", spec=ModelSpec.parse(spec)),)
    asked = [_asked(*split_name(text)) for text in texts]
    for name, count in Counter(model.name for model in asked).items():
        if count > 1:
            specs = [str(model.spec) for model in asked if model.name == name]
            raise UsageError(
                f"{count} models would be called {name!r}",
                next_step="give each a name: " + " ".join(f"--model name{n}={s}" for n, s in enumerate(specs, start=1)),
            )
    return tuple(asked)


def config_of(
    asked: Sequence[Asked],
    *,
    modalities: tuple[str, ...],
    precision: str,
    chunking: Chunking | None,
    decode: str = REFERENCE,
) -> ModelConfig:
    """The config of a run.

    Args:
        modalities: what is embedded of its samples; () where the inputs have vanished, and then nothing is checked.
        decode: how images become pixels; it is left aside where none are embedded.

    Raises ModelError where one of several models embeds none of `modalities`, or none of them embeds one of these, and
    UsageError where several models are to cut texts.
    """
    path = decode if "image" in modalities else REFERENCE
    if len(asked) == 1:
        spec = str(asked[0].spec)
        return ModelConfig(spec=spec, modalities=modalities, precision=precision, chunking=chunking, decode=path)
    if chunking is not None:
        raise UsageError(
            "texts are cut by the tokens of one model, and several are asked for",
            next_step="leave out --chunk-tokens, or make a run of each model",
        )
    members = [_member(model, modalities) for model in asked]
    config = ModelConfig.several(members, modalities=modalities, precision=precision, decode=path)
    for modality in modalities:
        if all(output.modality != modality for output in config.outputs):
            raise ModelError(
                f"none of the models embeds {modality}s: {config.spec}",
                next_step=f"leave {modality} out of --modality, or add an open_clip model, which has both",
            )
    return config


def _asked(name: str | None, text: str) -> Asked:
    spec = ModelSpec.parse(text)
    chosen = _short(spec) if name is None else name
    why = ""
    if not _NAME.fullmatch(chosen):
        why = "it has up to 40 small letters, digits and underscores, and begins with a letter"
    elif chosen.endswith(MODALITIES):
        why = "columns are called after a model, and after what it embeds"
    if why:
        raise UsageError(
            f"{chosen!r} cannot be the name of a model: {why}", next_step=f"for example --model {spec.family}1={spec}"
        )
    return Asked(name=chosen, spec=spec)


def _short(spec: ModelSpec) -> str:
    """A name from a spec: its architecture, the last part of its path or id, or its family."""
    if spec.family in ("minilm", "stub"):
        return spec.family
    is_arch = spec.family == "open_clip" and not spec.name.startswith("local-dir:")
    said = spec.name.partition("/")[0] if is_arch else re.split(r"[/:]", spec.name.rstrip("/"))[-1]
    short = re.sub(r"[^a-z0-9]+", "_", said.lower()).strip("_")
    return (short if short[:1].isalpha() else f"{spec.family}_{short}")[:40].rstrip("_")


def _member(model: Asked, modalities: tuple[str, ...]) -> NamedModel:
    can, own = model.spec.can_embed, model.spec.embedded_of(modalities)
    if modalities and not own:
        raise ModelError(
            f"{model.name}={model.spec} embeds {' and '.join(can)}s, and the run {' and '.join(modalities)}s",
            next_step=f"add --modality {','.join(m for m in MODALITIES if m in (*modalities, *can))}, "
            "or leave the model out",
        )
    return NamedModel(name=model.name, spec=str(model.spec), modalities=own)
