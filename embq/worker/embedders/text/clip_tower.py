"""Text towers of open_clip, cut to the tokens that decide the vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from open_clip import CLIP, CustomTextCLIP
from open_clip.transformer import TextTransformer

from embq.worker.embedders.device.placement import kernels_for_any_shape, on_device
from embq.worker.embedders.text.tokens import vocabulary_of


class CausalTower:
    """A text tower that pools at one token, behind which no token changes anything: the mask is causal.

    So a batch may end at the last token that is pooled, and texts of ten tokens cost a seventh of 77. open_clip's own
    forward takes whole rows only; this one does what it does (`CLIP.encode_text`, `TextTransformer.forward`, of 3.3)
    with positions and mask that are as long as the batch.
    """

    def __init__(self, tower: Any, pool: str, end_id: int) -> None:
        self._tower = tower
        self._pool = pool
        self._end_id = end_id

    def end(self, ids: np.ndarray) -> int:
        """Position of the token that is pooled, of ids of shape (context,)."""
        return int((ids if self._pool == "argmax" else ids == self._end_id).argmax())

    def encode(self, rows: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
        """`encode_text(normalize=False)` for ids of texts, each int64 of shape (context,)."""
        ids, ends = torch.from_numpy(np.stack(rows)), torch.tensor([self.end(row) for row in rows])
        length = int(ends.max()) + 1
        tower = self._tower
        cast = tower.transformer.get_cast_dtype()
        states = tower.token_embedding(on_device(ids[:, :length], device)).to(cast)
        states = states + tower.positional_embedding[:length].to(cast)
        with kernels_for_any_shape(device):
            states = tower.transformer(states, attn_mask=tower.attn_mask[:length, :length])
        pooled: torch.Tensor = tower.ln_final(states[torch.arange(len(ids), device=device), on_device(ends, device)])
        projection = tower.text_projection
        if isinstance(projection, torch.nn.Linear):
            pooled = projection(pooled)
        elif projection is not None:
            pooled = pooled @ projection
        return pooled


def causal_tower(model: Any) -> CausalTower | None:
    """The text tower of an open_clip model; None if it is of another kind, and needs its whole context.

    SigLIP has no mask at all, so that its padding takes part; CoCa puts a token of its own behind the text.
    """
    if type(model) is CLIP:
        tower, pool, end_id = model, model.text_pool_type, getattr(model, "text_eos_id", -1)
    elif type(model) is CustomTextCLIP and type(model.text) is TextTransformer:
        tower = model.text
        if tower.cls_emb is not None or tower.use_pad_mask or tower.output_tokens:
            return None
        pool, end_id = tower.pool_type, tower.eos_id
    else:
        return None
    return CausalTower(tower, pool, end_id) if pool in ("argmax", "eos") and _is_causal(tower.attn_mask) else None


def tower_vocabulary(model: Any) -> int | None:
    """Vocabulary size of an open_clip text tower; None if it is unknown."""
    tower = getattr(model, "text", model)
    table = getattr(tower, "token_embedding", None)
    return vocabulary_of(tower.transformer) if table is None else int(table.num_embeddings)


def _is_causal(mask: torch.Tensor | None) -> bool:
    """Whether no token sees one behind it, and each sees all before it."""
    if mask is None:
        return False
    return torch.equal(mask, torch.full_like(mask, -torch.inf).triu(1))
