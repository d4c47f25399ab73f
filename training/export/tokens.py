"""The tokeniser of an exported model: the one that it was trained with, in files where open_clip wants files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.errors import ModelError
from training.export.network import model_failures
from training.export.params import Arguments
from training.openclip.models import LOCAL, check_named

TRIED = (
    "a photograph of a red bicycle against a wall",
    "Straße, naïve café — Ελληνικά, русский текст, 漢字, 🙂",
    "it's 100% “quoted” &amp; <b>bold</b>, don't",
    "word " * 200,
)
"""Texts by which two tokenisers are compared: signs, cases, entities, and one longer than any context."""


def tokenizer_of(arguments: Arguments) -> Any:
    """The tokeniser that a training had; ModelError where its files are not here, or could run code."""
    import open_clip

    with model_failures(f"{arguments['model']} (its tokeniser)"):
        check_named(arguments["model"], arguments["cache_dir"])
        return open_clip.get_tokenizer(
            arguments["model"], cache_dir=arguments["cache_dir"], context_length=arguments["force_context_length"]
        )


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Put a tokeniser's files into the folder; open_clip's own one needs none.

    Raises ModelError where `open_clip.get_tokenizer` of the folder then gives other tokens.
    """
    import open_clip
    import torch

    with model_failures("the tokeniser"):
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(str(folder))
        check_named(f"{LOCAL}{folder}")
        found = open_clip.get_tokenizer(f"{LOCAL}{folder}")
        same = all(torch.equal(tokenizer([text]), found([text])) for text in TRIED)
    if not same:
        raise ModelError(
            f"the training's tokeniser ({type(tokenizer).__name__}) is not the one that open_clip finds by the "
            f"folder's files ({type(found).__name__}): texts would get other tokens",
            next_step='name the tokeniser in the configuration of the model: "hf_tokenizer_name" of its text_cfg',
        )
