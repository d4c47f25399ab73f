"""Longest text of a model in tokens, and the limit that its spec asks for."""

from __future__ import annotations

from typing import Any

from torch import nn

from embq.core.errors import ModelError
from embq.core.models import ModelSpec
from embq.worker.embedders.spec_params import whole_number

POSITION_TABLES = frozenset({"position_embeddings", "position_embedding", "embed_positions", "wpe"})
"""Attributes of transformers for the table of learned positions."""

NO_LIMIT = 1_000_000
"""Limits from here on are none: the library writes "no limit" as 1e30."""


def positions_held(trunk: Any) -> int | None:
    """Most tokens for which a table of positions has a row each; None if positions are computed, without a limit."""
    held = [
        module.num_embeddings - _rows_before_the_first(module)
        for name, module in trunk.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_TABLES
    ]
    return min(held, default=None)


def _rows_before_the_first(table: nn.Embedding) -> int:
    """RoBERTa's positions start after the padding index: 514 of them hold 512 tokens. BART's table says its offset."""
    offset = getattr(table, "offset", None)
    if isinstance(offset, int):
        return offset
    return 0 if table.padding_idx is None else table.padding_idx + 1


def tokens_held(trunk: Any) -> int | None:
    """Most tokens that a trunk was made for; None if it does not say. More than `positions_held` it cannot read."""
    held = positions_held(trunk)
    if held is not None:
        return held
    # XLNet says -1 for "no limit".
    declared = getattr(trunk.config, "max_position_embeddings", None)
    return declared if isinstance(declared, int) and declared > 0 else None


def asked_length(spec: ModelSpec, held: int | None) -> int | None:
    """The parameter `max_length`, or None without one; ModelError if the model does not hold as many tokens."""
    if not spec.param("max_length", ""):
        return None
    length = whole_number(spec, "max_length", held or 512)
    if held is not None and length > held:
        raise ModelError(f"{spec}: the model reads {held} tokens at most", next_step=f"use max_length={held} or less")
    return length


def reads_ids(trunk: Any) -> bool:
    """Whether a transformers model reads token ids, and not pixels or sounds, or those beside a text."""
    return getattr(trunk, "main_input_name", "") == "input_ids" and not hasattr(trunk.config, "vision_config")


def vocabulary_of(trunk: Any) -> int | None:
    """Vocabulary size of the model; None if it is unknown."""
    try:
        table = trunk.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return int(table.num_embeddings) if isinstance(table, nn.Embedding) else None
