"""Initial models of trainings by open_clip, and safe names for them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embq.core.errors import ConfigError, ModelError
from embq.worker.embedders.model_files import SMALL_FILES, check_settings

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
        optimizer: settings of AdamW that open_clip would choose wrongly, or by a name; empty where its choice is right.
        weights: a file of the folder with which the training begins; None for random weights.
    """

    name: str
    optimizer: Mapping[str, float]
    weights: Path | None = None


def checked_name(model: str, cache: str | None = None, *, weights: bool = True) -> str:
    """The name by which open_clip loads the files of a folder, or of a repository of the hub, that were checked.

    A repository is the folder of its snapshot: by its name open_clip would look it up again, and it may have other
    files by then. Any other name is returned as it is.

    Args:
        cache: folder of the hub's cache; None for the usual one.
        weights: whether they are fetched as well.

    Raises ModelError where the files could run code, OSError where the repository is not there.
    """
    if model.startswith(LOCAL):
        check_settings(Path(model.removeprefix(LOCAL)), model, "open_clip")
    if not model.startswith(HUB):
        return model
    from huggingface_hub import snapshot_download

    repository = model.removeprefix(HUB)
    folder = Path(snapshot_download(repository, cache_dir=cache, allow_patterns=list(SMALL_FILES)))
    check_settings(folder, model, "open_clip")
    if weights:
        from open_clip.pretrained import download_pretrained_from_hf

        with suppress(FileNotFoundError):  # as open_clip, which warns, begin with random weights if there are none
            download_pretrained_from_hf(repository, cache_dir=cache, revision=folder.name)
    return f"{LOCAL}{folder}"


def initial_model(model: str) -> InitialModel:
    """The model of a name of open_clip's, of a folder, or of the hub; ModelError where it does not exist."""
    if model.startswith(HUB):
        return InitialModel(name=model, optimizer={})
    folder = Path(model.removeprefix(LOCAL))
    # A folder may be called as an architecture is, such as that of its training.
    if model.startswith((LOCAL, ".", "/", "~")) or (folder / CONFIG).is_file():
        return _of_folder(folder)
    known = _architectures()
    if model.replace("/", "-") not in known:
        near = difflib.get_close_matches(model, known, n=4, cutoff=0.4)
        raise ModelError(
            f"--model {model}: open_clip has no such architecture, and there is no folder of this name with {CONFIG}",
            next_step=f"near matches: {', '.join(near)}" if near else f"such as ViT-B-32, or a folder with {CONFIG}",
        )
    return InitialModel(name=model, optimizer={})


def _of_folder(folder: Path) -> InitialModel:
    folder = folder.expanduser()
    check_settings(folder, f"--model {folder}", "open_clip")
    try:
        described = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        vision: Mapping[str, Any] = described["model_cfg"]["vision_cfg"]
    except OSError as error:
        raise ModelError(
            f"--model {folder}: {CONFIG} cannot be read there: {error.strerror}",
            next_step=f"name a folder that holds {CONFIG}, or an architecture of open_clip's such as ViT-B-32",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
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
