"""The forward pass of BERT (arXiv 1810.04805) for one text in numpy, as transformers' BertModel computes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

KNOWN = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
"""Defaults of BERT's config."""


class Bert:
    """A BERT encoder.

    Args:
        config: of transformers.
        weights: name -> float32 array, as transformers saves them.

    Attributes:
        positions: most tokens that it reads.
        vocabulary: how many token ids it knows.

    Raises ValueError or KeyError where it is another architecture, or where weights are missing.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> None:
        for name, value in KNOWN.items():
            if config.get(name, value) != value:
                raise ValueError(f"{name} is {config[name]!r}")
        self._weights = {name.removeprefix("bert."): array for name, array in weights.items()}
        self._layers = int(config["num_hidden_layers"])
        self._heads = int(config["num_attention_heads"])
        self._eps = float(config.get("layer_norm_eps", 1e-12))
        self._words = self._of("embeddings.word_embeddings.weight")
        self._places = self._of("embeddings.position_embeddings.weight")
        self._types = self._of("embeddings.token_type_embeddings.weight")
        self.vocabulary, self.positions = len(self._words), len(self._places)
        self._of(f"encoder.layer.{self._layers - 1}.output.dense.weight")

    def states(self, ids: np.ndarray) -> np.ndarray:
        """Last hidden states, float32 of shape (tokens, dim).

        Args:
            ids: token ids of shape (tokens,), no padding; all of them are of type 0.
        """
        states = self._words[ids] + self._places[: len(ids)] + self._types[0]
        states = self._normed("embeddings.LayerNorm", states)
        for number in range(self._layers):
            states = self._layer(f"encoder.layer.{number}", states)
        return states

    def _layer(self, name: str, states: np.ndarray) -> np.ndarray:
        query, key, value = (
            self._split(self._linear(f"{name}.attention.self.{part}", states)) for part in ("query", "key", "value")
        )
        weights = query @ key.transpose(0, 2, 1) / np.float32(math.sqrt(query.shape[2]))
        weights -= weights.max(axis=2, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(axis=2, keepdims=True)
        seen = (weights @ value).transpose(1, 0, 2).reshape(states.shape)
        attended = self._linear(f"{name}.attention.output.dense", seen) + states
        attended = self._normed(f"{name}.attention.output.LayerNorm", attended)
        inner = gelu(self._linear(f"{name}.intermediate.dense", attended))
        return self._normed(f"{name}.output.LayerNorm", self._linear(f"{name}.output.dense", inner) + attended)

    def _split(self, block: np.ndarray) -> np.ndarray:
        """(tokens, dim) -> (heads, tokens, dim / heads)."""
        return block.reshape(len(block), self._heads, -1).transpose(1, 0, 2)

    def _linear(self, name: str, states: np.ndarray) -> np.ndarray:
        product: np.ndarray = states @ self._of(f"{name}.weight").T + self._of(f"{name}.bias")
        return product

    def _normed(self, name: str, states: np.ndarray) -> np.ndarray:
        centred = states - states.mean(axis=1, keepdims=True)
        spread = np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + np.float32(self._eps))
        scaled: np.ndarray = centred / spread * self._of(f"{name}.weight") + self._of(f"{name}.bias")
        return scaled

    def _of(self, name: str) -> np.ndarray:
        return self._weights[name]


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the normal distribution function of x, within 3e-7 (Abramowitz and Stegun, 7.1.26)."""
    scaled = np.abs(x) * np.float32(math.sqrt(0.5))
    t = 1.0 / (1.0 + np.float32(0.3275911) * scaled)
    series = np.float32(1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = series * t + np.float32(factor)
    beyond = np.float32(0.5) * series * t * np.exp(-scaled * scaled)
    answer: np.ndarray = x * np.where(x > 0, 1.0 - beyond, beyond)
    return answer
