"""The arguments of a training by open_clip, as its `params.txt` keeps them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import InputError

PARAMS = "params.txt"

_OWN_WORDS = frozenset({"model", "pretrained", "image_interpolation", "image_resize_mode", "cache_dir", "train_data"})
"""Arguments that are words: what looks like a number or a list in them is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of a training: name with underscores -> value; what is not there has open_clip's default of nothing."""

    given: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Arguments:
        """Those of a file of lines `name: value`, which open_clip writes with `str`.

        Raises InputError where the file names no model.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path} cannot be read: {error}", next_step="give the folder of the training, or --model"
            ) from error
        pairs = (line.partition(": ") for line in lines)
        given = {name: _value(name, text) for name, mark, text in pairs if mark}
        if not given.get("model"):
            raise InputError(
                f"{path} names no model", next_step="say it: --model NAME, as it was given to the training"
            )
        return cls(given=given)

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name)


def _value(name: str, text: str) -> Any:
    if text == "None":
        return None
    if name in _OWN_WORDS:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
