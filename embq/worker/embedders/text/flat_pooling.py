"""Pooling of token states to text vectors in flat batches.

The formulas are those of sentence-transformers 6.2 for padded texts, `Pooling.forward`. Its own for flat ones add with
atomics, in an order that changes from run to run; here each sum is one loop over the tokens of a text, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Dropout, LayerNorm, Normalize, Pooling

from embq.worker.embedders.text.flat_batch import FlatTexts
from embq.worker.embedders.text.forward import Head

AFTER_POOLING = (Dense, Dropout, LayerNorm, Normalize)
"""Modules that look at the vectors only, and not at the tokens."""

VECTOR = "sentence_embedding"


def flat_head(model: SentenceTransformer, prompt_length: int, *, by_mean: bool = False) -> Head | None:
    """The modules of a model after its first, for states without padding; None if that may not be the same.

    Args:
        prompt_length: tokens of the prompt that stands before each text; a pooling may leave them out.
        by_mean: None also if it pools in another way.
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
    if not set(modes) <= set(MODES) or (by_mean and modes != ("mean",)):
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
    """Whether a module takes and returns vectors of texts: a Dense layer may be one of tokens."""
    return all(getattr(module, name, VECTOR) == VECTOR for name in ("module_input_name", "module_output_name"))


MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pooled(states: torch.Tensor, texts: FlatTexts, modes: Sequence[str], *, skipped: int = 0) -> torch.Tensor:
    """One vector per text: shape (texts, dim x modes), in the type of `states`, which have shape (tokens, dim).

    Args:
        modes: names of `MODES`; their vectors are put one after the other.
        skipped: this many tokens at the beginning of each text, those of a prompt, are left out.
    """
    tokens = PooledTokens(states, texts, skipped)
    of_mode: dict[str, Callable[[], torch.Tensor]] = {
        "cls": tokens.first,
        "max": tokens.greatest,
        "mean": lambda: tokens.weighted(tokens.mask, 1.0),
        "mean_sqrt_len_tokens": lambda: tokens.weighted(tokens.mask, 0.5),
        "weightedmean": lambda: tokens.weighted(tokens.mask * (tokens.places + 1), 1.0),
        "lasttoken": tokens.last,
    }
    return torch.cat([of_mode[mode]() for mode in modes], dim=-1).to(states.dtype)


class PooledTokens:
    """The tokens of a flat batch, each with its place and whether it counts.

    Attributes:
        places: of each token in its text, from 0; shape (tokens,).
        mask: 1.0 if a token counts, 0.0 if it is skipped; shape (tokens,).
    """

    def __init__(self, states: torch.Tensor, texts: FlatTexts, skipped: int) -> None:
        self._states = states.float()
        self._starts = texts.starts.long()
        self._skipped = skipped
        self.places = texts.places()
        self.mask = (self.places >= skipped).float()

    def first(self) -> torch.Tensor:
        """The first token that counts; the very first one if none does."""
        lengths = self._starts.diff()
        return self._states[self._starts[:-1] + torch.where(lengths > self._skipped, self._skipped, 0)]

    def last(self) -> torch.Tensor:
        """The last token; zeros if it does not count."""
        at = self._starts[1:] - 1
        return self._states[at] * self.mask[at, None]

    def greatest(self) -> torch.Tensor:
        """The greatest value of each dimension."""
        return self._reduced(self._states.masked_fill(self.mask[:, None] == 0, -torch.inf), "max")

    def weighted(self, weights: torch.Tensor, power: float) -> torch.Tensor:
        """The sum over tokens with weights, divided by a power of the sum of the weights."""
        total = self._reduced(weights[:, None], "sum").clamp(min=1e-9)
        return self._reduced(self._states * weights[:, None], "sum") / total**power

    def _reduced(self, values: torch.Tensor, how: str) -> torch.Tensor:
        # Unsafe means unchecked: checking the offsets would wait for the device.
        return torch.segment_reduce(values, how, offsets=self._starts, axis=0, unsafe=True)
