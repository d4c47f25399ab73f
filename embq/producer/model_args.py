"""Arguments --model and --precision of a run, as the model config that workers load."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis

from embq.core.cards import gain_of_halves
from embq.core.errors import ModelError, UsageError
from embq.core.models import (
    MODALITIES,
    MODEL_NAME,
    REFERENCE,
    Chunking,
    ModelConfig,
    ModelSpec,
    NamedModel,
    family_of,
)
from embq.core.queue.heartbeats import Device, services
from embq.core.rows.spec import RowSpec
from embq.core.storage import beneath


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSpec:
    """A model of the command line: its name, "" if the run has only one, and its spec."""

    name: str
    spec: ModelSpec


def split_name(text: str) -> tuple[str | None, str]:
    """(name, spec) of `[NAME=]SPEC`; None if there is no name."""
    # The space at the end of a prompt, which is behind a question mark, is part of it.
    stripped = text.lstrip() if "?" in text else text.strip()
    head, equals, rest = stripped.partition("=")
    # Names of a server may have a slash, as ids of the hub; a path may have an equals sign.
    is_name = bool(equals) and not set(":?") & set(head) and ("/" not in head or _is_spec(rest))
    return (head, rest) if is_name else (None, stripped)


def _is_spec(spec: str) -> bool:
    """Whether a text begins like a model spec: with a family."""
    family = re.split(r"[:?]", spec.strip(), maxsplit=1)[0]
    return family_of(family) is not None


def asked_models(texts: Sequence[str]) -> tuple[NamedSpec, ...]:
    """The models of --model, each with a name if there are several.

    Raises ModelError for a spec that is none, UsageError for a name that cannot be one, or that two would have.
    """
    if len(texts) == 1:
        name, spec = split_name(texts[0])
        if name is not None:
            while (inner := split_name(spec))[0] is not None:
                spec = inner[1]
            raise UsageError(
                f"the run has one model, and {name!r} is a name for one of several", next_step=f"-m {spec}"
            )
        return (NamedSpec(name="", spec=_located(ModelSpec.given(spec))),)
    models = [_named_spec(*split_name(text)) for text in texts]
    for name, count in Counter(model.name for model in models).items():
        if count > 1:
            specs = [str(model.spec) for model in models if model.name == name]
            raise UsageError(
                f"{count} models would be called {name!r}",
                next_step="give each a name: " + " ".join(f"--model name{n}={s}" for n, s in enumerate(specs, start=1)),
            )
    return tuple(models)


def config_of(
    models: Sequence[NamedSpec],
    *,
    modalities: tuple[str, ...],
    precision: str,
    chunking: Chunking | None,
    decode: str = REFERENCE,
) -> ModelConfig:
    """The config of a run.

    Args:
        modalities: embedded of its samples; () if the inputs have vanished: then nothing is checked.
        decode: how images become pixels; ignored if none are embedded.

    Raises ModelError if one of several models embeds none of `modalities`, or none of them embeds one of these, and
    UsageError if several models are to cut texts.
    """
    path = decode if "image" in modalities else REFERENCE
    if len(models) == 1:
        spec = str(models[0].spec)
        return ModelConfig(spec=spec, modalities=modalities, precision=precision, chunking=chunking, decode=path)
    if chunking is not None:
        raise UsageError(
            "texts are cut by the tokens of one model, and several are asked for",
            next_step="leave out --chunk-tokens, or make a run of each model",
        )
    members = [_member(model, modalities) for model in models]
    config = ModelConfig.several(members, modalities=modalities, precision=precision, decode=path)
    for modality in modalities:
        if all(output.modality != modality for output in config.outputs):
            raise ModelError(
                f"none of the models embeds {modality}s: {config.spec}",
                next_step=f"leave {modality} out of --modality, or add an open_clip model, which has both",
            )
    return config


def _located(spec: ModelSpec) -> ModelSpec:
    """The spec with absolute paths of folders that are here, so that the run's model is found from other folders."""

    def absolute(name: str, prefix: str = "") -> str:
        path = os.path.abspath(os.path.expanduser(name.removeprefix(prefix)))
        return prefix + path if os.path.isdir(path) and "?" not in path else name

    prefix = "local-dir:" if spec.family == "open_clip" else ""
    named = spec.family in ("st", "hf") or (prefix and spec.name.startswith(prefix))
    params = ((key, absolute(value) if key == "lora" else value) for key, value in spec.params)
    return replace(spec, name=absolute(spec.name, prefix) if named else spec.name, params=tuple(params))


def _named_spec(name: str | None, text: str) -> NamedSpec:
    spec = _located(ModelSpec.given(text))
    chosen = _short(spec) if name is None else name
    why = ""
    if not MODEL_NAME.fullmatch(chosen):
        why = "it has up to 40 small letters, digits and underscores, and begins with a letter"
    elif chosen.endswith(MODALITIES):
        why = "columns are called after a model, and after what it embeds"
    if why:
        raise UsageError(
            f"{chosen!r} cannot be the name of a model: {why}", next_step=f"for example --model {spec.family}1={spec}"
        )
    return NamedSpec(name=chosen, spec=spec)


def _short(spec: ModelSpec) -> str:
    """Default name of a spec: its architecture, the last part of its path or id, or its family."""
    if spec.family in ("minilm", "stub"):
        return spec.family
    is_arch = spec.family == "open_clip" and not spec.name.startswith("local-dir:")
    last = spec.name.partition("/")[0] if is_arch else re.split(r"[/:]", spec.name.rstrip("/"))[-1]
    short = re.sub(r"[^a-z0-9]+", "_", last.lower()).strip("_")
    return (short if short[:1].isalpha() else f"{spec.family}_{short}")[:40].rstrip("_")


def _member(model: NamedSpec, modalities: tuple[str, ...]) -> NamedModel:
    can, own = model.spec.can_embed, model.spec.embedded_of(modalities)
    if modalities and not own:
        raise ModelError(
            f"{model.name}={model.spec} embeds {' and '.join(can)}s, and the run {' and '.join(modalities)}s",
            next_step=f"add --modality {','.join(m for m in MODALITIES if m in (*modalities, *can))}, "
            "or leave the model out",
        )
    return NamedModel(name=model.name, spec=str(model.spec), modalities=own)


LEAVE_THE_LENGTH = {"Transformer", "Pooling", "Normalize", "Dropout", "LayerNorm"}
"""Modules of sentence-transformers that leave the length of the pooled vector as it is."""


def check_rows(rows: RowSpec, config: ModelConfig) -> None:
    """Check that vectors of `config` can be stored as `rows`, as far as that is known before the model is loaded.

    Raises UsageError if there is nothing to compare, InputError if vectors are too short or of a wrong length.
    """
    if rows.similarity and config.modalities and not config.compared:
        raise UsageError(
            f"--similarity compares a row's image with its text, and this run embeds {' and '.join(config.modalities)}",
            next_step="use --modality image,text and a model that embeds both, or leave out --similarity",
        )
    for output in config.outputs:
        dim = vector_dim(ModelSpec.parse(output.spec))
        if dim is not None:
            rows.check(output.spec, dim)


def vector_dim(spec: ModelSpec) -> int | None:
    """Numbers of one vector of the model; None if only loading it tells."""
    match spec.family:
        case "stub":
            return int(spec.name)
        case "minilm":
            return 384
        case "hf":
            return _number(read_json(Path(spec.name) / "config.json"), "hidden_size")
        case "st":
            return _sentence(Path(spec.name))
        case "open_clip":
            return _number(open_clip_config(spec.name), "embed_dim")
    return None


def _sentence(folder: Path) -> int | None:
    """Length of a pooled vector; None if several poolings are chosen or a later module changes the length."""
    modules = read_json(folder / "modules.json") or []
    names = {str(module.get("type", "")).rpartition(".")[2] for module in modules}
    pooling = read_json(folder / "1_Pooling" / "config.json")
    if not names or names - LEAVE_THE_LENGTH or not isinstance(pooling, dict):
        return None
    chosen = sum(value is True for name, value in pooling.items() if name.startswith("pooling_mode_"))
    if chosen > 1 or isinstance(pooling.get("pooling_mode"), list):
        return None
    length = _number(pooling, "word_embedding_dimension") or _number(pooling, "embedding_dimension")
    cut = _number(read_json(folder / "config_sentence_transformers.json"), "truncate_dim")
    return length if length is None or cut is None else min(length, cut)


def open_clip_config(name: str) -> Any:
    """The JSON of an architecture `ARCH/TAG` of open_clip; None if open_clip is not installed or has none."""
    spec = find_spec("open_clip")  # looks for the package and imports nothing of it
    folders = spec.submodule_search_locations if spec is not None else None
    return read_json(Path(folders[0]) / "model_configs" / f"{name.split('/')[0]}.json") if folders else None


def _number(described: Any, name: str) -> int | None:
    value = described.get(name) if isinstance(described, dict) else None
    return value if isinstance(value, int) else None


def read_json(path: Path) -> Any:
    """The JSON of a file; None if it cannot be read."""
    try:
        return json.loads(beneath.read_small(path).decode())
    except (OSError, ValueError, RecursionError):
        return None


PRECISIONS = ("bf16", "fp16", "fp32")
"""Precisions that `auto` chooses from, best first: bf16 is as fast as fp16 and has the range of fp32. int8, which is
for CPUs and some models only and is further from fp32, is never chosen."""

SHOWN_DEVICES = 4
"""Kinds of devices that the reason lists; further ones are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChoice:
    """A precision, and one sentence that gives the reason and the option for another one."""

    precision: str
    reason: str


def choose_precision(devices: Sequence[Device]) -> PrecisionChoice:
    """The first of `PRECISIONS` that every device computes fast.

    A GPU that the torch of its machine has no code for is left out.
    """
    usable = [device for device in devices if device.precisions]
    if not usable:
        return PrecisionChoice(
            precision=PRECISIONS[-1],
            reason=f"precision {PRECISIONS[-1]}: no usable device is registered; for GPUs with tensor cores start the "
            "workers first, or give --precision bf16",
        )
    chosen = next((name for name in PRECISIONS if all(name in device.precisions for device in usable)), PRECISIONS[-1])
    halves = PRECISIONS[:-1]
    faster = next((name for name in halves if any(name in device.precisions for device in usable)), "")
    if not faster or chosen in halves:  # which are equally fast
        reason = f"the fastest float type on every device ({_named(usable)}); --precision chooses another one"
    else:
        able = [device for device in usable if faster in device.precisions]
        unable = [device for device in usable if faster not in device.precisions]
        gain = max(gain_of_halves(device.name) for device in able)
        times = f", up to {gain:.1f} times by data sheets" if gain > 1 else ""
        reason = (
            f"the fastest that all devices have in common; {faster} is faster on {_named(able)}{times}, and not on "
            f"{_named(unable)}: --precision {faster} leaves out what cannot compute in it"
        )
    return PrecisionChoice(precision=chosen, reason=f"precision {chosen}: {reason}")


def registered_devices(client: redis.Redis) -> list[Device]:
    """The devices of all workers that would serve a new run, each once, without those that were given up."""
    return [
        device
        for report in services(client)
        if report.service.role == "worker" and not report.service.run
        for device in {entry.device: entry for entry in report.service.devices if entry.state != "given_up"}.values()
    ]


def _named(devices: Sequence[Device]) -> str:
    """The devices, for people: those of one name are counted."""
    kinds = Counter(device.name or device.device for device in devices)
    shown = [f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.most_common(SHOWN_DEVICES)]
    rest = len(kinds) - len(shown)
    return ", ".join(shown) + (f" and {rest} other kinds" if rest else "")
