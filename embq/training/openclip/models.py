"""Initial models of trainings by open_clip, and safe names for them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embq.core.errors import ConfigError, ModelError
from embq.core.storage.beneath import read_small
from embq.worker.embedders.model_files import OPEN_CLIP_WEIGHTS, SMALL_FILES, check_settings, towers_of_hub

CONFIG = "open_clip_config.json"
LOCAL = "local-dir:"
HUB = "hf-hub:"
WEIGHTS = (".safetensors", ".bin", ".pth")
"""Files of a folder that open_clip takes for its weights."""

OF_TRANSFORMERS = {"beta1": 0.9, "beta2": 0.98, "eps": 1e-6}
OF_OTHERS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
"""open_clip's defaults for names with and without "vit" (Radford et al. 2021, table 19: ViT and ResNet)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialModel:
    """The model that a training starts with.

    Attributes:
        name: for open_clip's `--model`.
        optimizer: settings of AdamW that open_clip would choose wrongly, or by a name; empty if its choice is right.
        weights: a file of the folder with which the training begins; None for random weights.
    """

    name: str
    optimizer: Mapping[str, float]
    weights: Path | None = None


def checked_model(model: str, cache: str | None = None, *, weights: bool = True) -> str:
    """The name by which open_clip loads the very files that were checked: for a model of the hub, `local-dir:` and the
    folder of its commit in the hub's cache. An architecture's name is returned as it is.

    Raises ModelError if the files could run code, or the hub's cannot be had.

    Args:
        model: a name as open_clip has it; of the hub also `hf-hub:ORG/NAME@COMMIT`.
        cache: folder of the hub's cache; None for the usual one.
        weights: whether the weights of a model of the hub are wanted.
    """
    if not model.startswith((LOCAL, HUB)):
        return model
    folder = Path(model.removeprefix(LOCAL))
    if of_hub := model.startswith(HUB):
        folder = _snapshot(model.removeprefix(HUB), model, cache, OPEN_CLIP_WEIGHTS if weights else ())
    check_settings(folder, model, "open_clip")
    for tower in towers_of_hub(folder, model):
        check_settings(_snapshot(tower, model, cache), f"{model}: {tower}", "hf")
    if of_hub and weights and not any((folder / name).is_file() for name in OPEN_CLIP_WEIGHTS):
        raise ModelError(f"{model} has no {OPEN_CLIP_WEIGHTS[0]}", next_step="use a model with weights in safetensors")
    return f"{LOCAL}{folder}"


def pinned(model: str, cache: str | None = None) -> str:
    """`hf-hub:ORG/NAME@COMMIT` of a model of the hub, other names as they are; raises as `checked_model`."""
    path = checked_model(model, cache, weights=False)
    return f"{model}@{Path(path).name}" if model.startswith(HUB) and "@" not in model else model


def _snapshot(repository: str, model: str, cache: str | None, weights: Sequence[str] = ()) -> Path:
    from huggingface_hub import snapshot_download

    name, _, commit = repository.partition("@")
    patterns = [*SMALL_FILES, *weights]
    try:
        return Path(snapshot_download(name, revision=commit or None, cache_dir=cache, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{model}: {repository} cannot be had from the model hub: {str(error).partition('.')[0]}",
            next_step="check the name and the way to the hub, or copy the cache (HF_HOME) of a machine that has it",
        ) from error


def initial_model(model: str) -> InitialModel:
    """The model of a name of open_clip's, of a folder, or of the hub; ModelError if it does not exist."""
    if model.startswith(HUB):
        return InitialModel(name=pinned(model), optimizer={})
    folder = Path(model.removeprefix(LOCAL))
    # A folder may be called as an architecture is, such as that of its training.
    if model.startswith((LOCAL, ".", "/", "~")) or (folder / CONFIG).is_file():
        return _of_folder(folder)
    architectures = _architectures()
    if model.replace("/", "-") not in architectures:
        near = difflib.get_close_matches(model, architectures, n=4, cutoff=0.4)
        raise ModelError(
            f"--model {model}: open_clip has no such architecture, and there is no folder of this name with {CONFIG}",
            next_step=f"near matches: {', '.join(near)}" if near else f"such as ViT-B-32, or a folder with {CONFIG}",
        )
    return InitialModel(name=model, optimizer={})


def _of_folder(folder: Path) -> InitialModel:
    folder = folder.expanduser()
    check_settings(folder, f"--model {folder}", "open_clip")
    try:
        described = json.loads(read_small(folder / CONFIG))
        vision: Mapping[str, Any] = described["model_cfg"]["vision_cfg"]
    except OSError as error:
        raise ModelError(
            f"--model {folder}: {CONFIG} cannot be read there: {error.strerror}",
            next_step=f"name a folder that holds {CONFIG}, or an architecture of open_clip's such as ViT-B-32",
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"--model {folder}: {CONFIG} has no model_cfg with a vision_cfg: {error}",
            next_step="write it as `embq train export` does, or as the open_clip models of the hub have it",
        ) from error
    name = str(vision.get("timm_model_name", ""))
    # open_clip looks for "vit" in the name, which here is the path of a folder.
    is_transformer = "vit" in name.lower() if name else isinstance(vision.get("layers", 12), int)
    weights = [path for path in sorted(folder.iterdir()) if path.suffix in WEIGHTS]
    return InitialModel(
        name=f"{LOCAL}{folder.resolve()}",
        optimizer=OF_TRANSFORMERS if is_transformer else OF_OTHERS,
        weights=weights[0] if weights else None,
    )


def _architectures() -> list[str]:
    """Names of open_clip's architectures, without importing it and torch."""
    spec = find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("open_clip is not installed here", next_step="pip install 'embq[train]'")
    return sorted(path.stem for path in (Path(spec.submodule_search_locations[0]) / "model_configs").glob("*.json"))
