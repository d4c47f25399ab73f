"""Suggestions for names of models that are no model spec, such as `BAAI/bge-small-en` and `ViT-B-32`.

No model library is imported here.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable
from pathlib import Path

from embq.core.settings import model_cache

MINILM = "all-minilm-l6-v2"
"""The model that `minilm` is, in small letters."""
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_REVISION = re.compile(r"[0-9a-f]{40}")
_OPEN_CLIP_NAME = re.compile(r"(?:ViT|RN|EVA|coca|convnext|xlm|nllb|MobileCLIP|vit_|swin)[\w.@-]{0,96}", re.ASCII)
_OTHER_NAMES = {
    **dict.fromkeys(("sentence_transformers", "sentence_transformer", "sbert"), "st"),
    **dict.fromkeys(("huggingface", "hugging_face", "hf_hub", "transformers"), "hf"),
    "clip": "open_clip",
}
"""Name of a library, in small letters and with underscores -> the family of its models."""
_MARKS = {"modules.json": "st", "open_clip_config.json": "open_clip", "config.json": "hf"}
"""File of a model's folder -> family that reads it, in the order of precedence."""


def with_family(text: str) -> str:
    """The spec with its family, if `text` is a folder or an `org/name` of the hub's cache whose files tell it."""
    name, mark, params = text.partition("?")
    name = name.strip()
    folder, prefix = name, "local-dir:"
    if not os.path.isdir(name):
        if not _HUB_ID.fullmatch(name):
            return text
        folder, prefix = _snapshot(name), "hf-hub:"
    for file, family in _MARKS.items():
        if folder and os.path.isfile(os.path.join(folder, file)):
            return f"{family}:{prefix if family == 'open_clip' else ''}{name}{mark}{params}"
    return text


def _snapshot(name: str) -> str:
    """The folder of a model of the hub in its cache; "" if it is not there."""
    model = model_cache() / f"models--{name.replace('/', '--')}"
    try:
        with open(model / "refs" / "main", encoding="ascii") as file:
            revision = file.read(64).strip()
    except (OSError, ValueError):
        return ""
    return str(model / "snapshots" / revision) if _REVISION.fullmatch(revision) else ""


def suggestions(name: str, families: Iterable[str]) -> list[str]:
    """Return the model specs that `name` may stand for, the likeliest first; none if it is like nothing known.

    Args:
        name: what the user gave, without parameters.
        families: names of the families that there are.
    """
    if name.lower().rpartition("/")[2] == MINILM:
        return ["minilm", f"st:{name if '/' in name else f'sentence-transformers/{name}'}"]
    if (spec := with_family(name)) != name:
        return [spec]
    base, _, tag = name.partition("/")
    if _OPEN_CLIP_NAME.fullmatch(base) or base in _open_clip_names():
        return [f"open_clip:{base}/{tag or 'TAG'}"]
    if _HUB_ID.fullmatch(name):
        return [f"st:{name}", f"hf:{name}"]
    family, colon, rest = name[:100].partition(":")
    family = family.lower().replace("-", "_")
    near = [_OTHER_NAMES[family]] if family in _OTHER_NAMES else difflib.get_close_matches(family, families, 1, 0.6)
    return [match if match == "minilm" else f"{match}{colon}{rest}" for match in near]


def _open_clip_names() -> set[str]:
    """The architectures of the installed open_clip, by its files of configurations."""
    package = importlib.util.find_spec("open_clip")
    if package is None or package.origin is None:
        return set()
    return {path.stem for path in (Path(package.origin).parent / "model_configs").glob("*.json")}
