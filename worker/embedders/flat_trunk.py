"""Encoders on flat batches: the states of tokens without any padding."""

from __future__ import annotations

from typing import Any

import torch

from worker.embedders.flat import FlatTexts
from worker.embedders.flat_attention import Kernel, attention_within_texts

ARCHITECTURES = ("bert", "distilbert", "roberta", "xlm-roberta", "camembert", "electra", "modernbert")
"""What `model_type` may be: each takes positions, hands further arguments down to its attention, has no other place
where tokens of a row meet, and is compared with its padded self in the tests."""


class FlatTrunk:
    """The states of the tokens of a flat batch.

    Args:
        trunk: a transformers model, one of `ARCHITECTURES`.
        kernel: computes attention within each text.
    """

    def __init__(self, trunk: Any, kernel: Kernel) -> None:
        self._trunk = trunk
        self._kernel = kernel

    @property
    def dtype(self) -> torch.dtype:
        """In which the trunk computes now."""
        dtype: torch.dtype = self._trunk.dtype
        return dtype

    def states(self, texts: FlatTexts) -> torch.Tensor:
        """The last hidden states: shape (tokens, dim), in the type of the model."""
        features = {"input_ids": texts.ids, "position_ids": self._positions(texts), "token_type_ids": texts.types}
        row = {name: values[None] for name, values in features.items() if values is not None}
        with attention_within_texts(self._trunk.config):
            made = self._trunk(**row, embq_texts=texts, embq_kernel=self._kernel, return_dict=True)
        states: torch.Tensor = made.last_hidden_state[0]
        return states

    def _positions(self, texts: FlatTexts) -> torch.Tensor:
        """Position ids that begin again with each text; int64 of shape (tokens,)."""
        padding = _position_of_padding(self._trunk)
        if padding is None:
            return texts.places()
        # RoBERTa counts the tokens that are not padding from there on, and a text may hold a padding token.
        counted = (texts.ids != padding).long()
        sums = counted.cumsum(0)
        before = (sums - counted)[texts.starts[:-1].long()]
        return (sums - texts.of_each(before)) * counted + padding


def is_flattenable(trunk: Any) -> bool:
    """Whether the architecture is one whose texts may lie one after the other."""
    config = getattr(trunk, "config", None)
    return getattr(config, "model_type", "") in ARCHITECTURES and not getattr(config, "is_decoder", False)


def _position_of_padding(trunk: Any) -> int | None:
    """In models of RoBERTa's kind, whose positions begin after it; None where they begin at 0."""
    padding = getattr(trunk.embeddings, "padding_idx", None)
    return padding if isinstance(padding, int) else None
