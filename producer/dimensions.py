"""How long a model's vectors are, where that is known without loading it, and what cannot be stored of them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from core.errors import UsageError
from core.models import ModelConfig, ModelSpec
from core.rows.spec import RowSpec

LEAVE_THE_LENGTH = {"Transformer", "Pooling", "Normalize", "Dropout", "LayerNorm"}
"""Modules of sentence-transformers after which a vector is as long as its pooling has made it."""


def check_rows(rows: RowSpec, config: ModelConfig) -> None:
    """Refuse what cannot be stored of the vectors of `config`, as far as that is known before it is loaded.

    Raises UsageError where there is nothing to compare, InputError where vectors are too short or of a wrong length.
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
    """How many numbers one vector of the model has; None where only loading tells."""
    match spec.family:
        case "stub":
            return int(spec.name)
        case "minilm":
            return 384
        case "hf":
            return _number(_read(Path(spec.name) / "config.json"), "hidden_size")
        case "st":
            return _sentence(Path(spec.name))
        case "open_clip":
            return _open_clip(spec.name)
    return None


def _sentence(folder: Path) -> int | None:
    """By the pooling, where nothing behind it changes the length and only one pooling is chosen."""
    modules = _read(folder / "modules.json") or []
    names = {str(module.get("type", "")).rpartition(".")[2] for module in modules}
    pooling = _read(folder / "1_Pooling" / "config.json")
    if not names or names - LEAVE_THE_LENGTH or not isinstance(pooling, dict):
        return None
    chosen = sum(value is True for name, value in pooling.items() if name.startswith("pooling_mode_"))
    if chosen > 1 or isinstance(pooling.get("pooling_mode"), list):
        return None
    length = _number(pooling, "word_embedding_dimension") or _number(pooling, "embedding_dimension")
    cut = _number(_read(folder / "config_sentence_transformers.json"), "truncate_dim")
    return length if length is None or cut is None else min(length, cut)


def _open_clip(name: str) -> int | None:
    found = find_spec("open_clip")  # looks for the package and imports nothing of it
    folders = found.submodule_search_locations if found is not None else None
    arch = name.split("/")[0]
    return _number(_read(Path(folders[0]) / "model_configs" / f"{arch}.json"), "embed_dim") if folders else None


def _number(described: Any, name: str) -> int | None:
    value = described.get(name) if isinstance(described, dict) else None
    return value if isinstance(value, int) else None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
