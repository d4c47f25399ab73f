"""What sentence-transformers makes of the states of tokens, for flat batches."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Dropout, LayerNorm, Normalize, Pooling

from worker.embedders.flat import FlatTexts
from worker.embedders.flat_path import Head
from worker.embedders.flat_pooling import MODES, pooled

AFTER_POOLING = (Dense, Dropout, LayerNorm, Normalize)
"""Modules that look at the vectors only, and not at the tokens."""

VECTOR = "sentence_embedding"


def flat_head(model: SentenceTransformer, prompt_length: int) -> Head | None:
    """The modules of a model after its first, for states without padding; None where that may not be the same.

    Args:
        prompt_length: tokens of the prompt that stands before each text; a pooling may leave them out.
    """
    modules: list[Any] = list(model)
    first, *rest = modules
    states_only = first.module_output_name == "token_embeddings" and first.modality_config.get("text") == {
        "method": "forward",
        "method_output_name": "last_hidden_state",
    }
    if not states_only or not rest or type(rest[0]) is not Pooling:
        return None
    pooling, *after = rest
    if not all(type(module) in AFTER_POOLING and _reads_vectors(module) for module in after):
        return None
    modes = (pooling.pooling_mode,) if isinstance(pooling.pooling_mode, str) else tuple(pooling.pooling_mode)
    if not set(modes) <= set(MODES):
        return None
    skipped = 0 if pooling.include_prompt else prompt_length

    def head(states: torch.Tensor, texts: FlatTexts) -> torch.Tensor:
        features = {VECTOR: pooled(states, texts, modes, skipped=skipped)}
        for module in after:
            features = module(features)
        vectors: torch.Tensor = features[VECTOR]
        return vectors[:, : model.truncate_dim]

    return head


def _reads_vectors(module: torch.nn.Module) -> bool:
    """Whether a module takes and gives vectors of texts: a Dense layer may be one of tokens."""
    return all(getattr(module, name, VECTOR) == VECTOR for name in ("module_input_name", "module_output_name"))
