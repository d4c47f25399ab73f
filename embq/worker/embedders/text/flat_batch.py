"""Flat batch: the tokens of several texts in one row, without padding.

Batches travel to the device in this form, and are padded there where attention cannot tell the texts apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from embq.worker.embedders.device.placement import all_on_device

TokenRow = Mapping[str, np.ndarray]
"""One text: `input_ids` and, where the model takes them and some are not 0, `token_type_ids`; int32, (tokens,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTexts:
    """Texts one after the other, on a device.

    Attributes:
        ids: of all tokens; int64 of shape (tokens,).
        types: their token types, or None if all are 0; int64 of shape (tokens,).
        starts: where each text begins, and where the last one ends; int32 of shape (texts + 1,).
        lengths: tokens of each text, on the host.
    """

    ids: torch.Tensor
    types: torch.Tensor | None
    starts: torch.Tensor
    lengths: np.ndarray

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return int(self.lengths.max())

    def places(self) -> torch.Tensor:
        """The place of each token in its text, from 0; int64 of shape (tokens,)."""
        return torch.arange(len(self.ids), device=self.ids.device) - self.of_each(self.starts[:-1])

    def of_each(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat a value per text for each of its tokens; int64 of shape (tokens,)."""
        # The size is passed, because the device would be waited for otherwise.
        counts = self.starts.diff()
        return torch.repeat_interleave(values.long(), counts.long(), output_size=len(self.ids))


def flattened(batch: Sequence[TokenRow], device: torch.device) -> FlatTexts:
    """The texts of a batch, at least one, on a device."""
    rows = [row["input_ids"] for row in batch]
    lengths = np.fromiter(map(len, rows), dtype=np.int32, count=len(rows))
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    is_typed = any("token_type_ids" in row for row in batch)
    types = [row.get("token_type_ids", np.zeros_like(row["input_ids"])) for row in batch] if is_typed else []
    sent = all_on_device([starts, np.concatenate(rows), *([np.concatenate(types)] if types else [])], device)
    return FlatTexts(ids=sent[1].long(), types=sent[2].long() if types else None, starts=sent[0], lengths=lengths)


def padded(texts: FlatTexts, pads: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """The texts as int64 tensors of shape (texts, longest), one for each name in `pads`, with their `attention_mask`.

    Args:
        pads: what is put after a text that is shorter, of `input_ids` and perhaps of `token_type_ids`.
    """
    places = torch.arange(texts.longest, device=texts.ids.device)
    is_text = places < texts.starts.diff()[:, None]
    tokens = (texts.starts[:-1, None] + places).clamp(max=len(texts.ids) - 1)
    values = {"input_ids": texts.ids, "token_type_ids": texts.types}
    features = {}
    for name, pad in pads.items():
        of_tokens = values[name]
        inner = torch.zeros_like(tokens) if of_tokens is None else of_tokens[tokens]
        features[name] = inner.masked_fill(~is_text, pad).long()
    return {**features, "attention_mask": is_text.long()}
