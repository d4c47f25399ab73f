"""A sentence-transformers folder with a BERT, pooling and normalisation, in numpy, for one text at a time.

It reads the files alone and ignores what else a library may read in them, so callers compare it with the library's own
vectors first, see `embq.worker.embedders.query.loading`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from embq.core.errors import SampleError
from embq.core.models import ModelSpec
from embq.core.storage.beneath import read_small, require_regular
from embq.core.units import Sample
from embq.worker.embedders.model_files import weights_header
from embq.worker.embedders.sample_fields import no_panic, text_of
from embq.worker.embedders.text.prompts import chosen

KNOWN = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
"""Defaults of BERT's config."""


class Bert:
    """The forward pass of BERT (arXiv 1810.04805) for one text in numpy, as transformers' BertModel computes it.

    Args:
        config: of transformers.
        weights: name -> float32 array, as transformers saves them.

    Attributes:
        positions: most tokens that it reads.
        vocabulary: how many token ids it knows.

    Raises ValueError or KeyError if it is another architecture, or where weights are missing.
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
        context = (weights @ value).transpose(1, 0, 2).reshape(states.shape)
        attended = self._linear(f"{name}.attention.output.dense", context) + states
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


def mapped_weights(path: Path) -> dict[str, np.ndarray]:
    """Name -> float32 array of each tensor of that type; others are left out. Nothing is read but the header.

    Raises as `weights_header`, and ValueError if the file is cut off.
    """
    header, begin = weights_header(path)
    numbers = np.asarray(np.memmap(path, dtype=np.uint8, mode="r", offset=begin))
    weights = {}
    for name, tensor in header.items():
        if name != "__metadata__" and tensor["dtype"] == "F32":
            start, stop = tensor["data_offsets"]
            if not 0 <= start <= stop <= len(numbers):
                raise ValueError(f"{path} is cut off")
            weights[name] = numbers[start:stop].view(np.float32).reshape(tensor["shape"])
    return weights


POOLING_FLAGS = {"pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean"}
"""Spelling of the pooling before sentence-transformers 6."""

KINDS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
"""The modules of a folder, in order."""


class LightSentence:
    """Vectors of texts.

    Args:
        folder: as sentence-transformers saves a model.
        spec: its parameters count as they do in `embq.worker.embedders.text.sentence`.

    Raises OSError, ValueError, KeyError or TypeError if the folder holds anything else, ModelError for a prompt
    that the model does not have.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        kinds = [module["type"].rpartition(".")[2] for module in _json(folder / "modules.json")]
        paths = [module["path"] for module in _json(folder / "modules.json")]
        if kinds not in KINDS or paths[0] not in ("", "."):
            raise ValueError(f"its modules are {', '.join(kinds)}")
        self._unit_length = kinds[-1] == "Normalize" and spec.param("normalize", "true") == "true"
        self._pooling = _pooling(_json(folder / paths[1] / "config.json"))
        self._bert = Bert(_json(folder / "config.json"), mapped_weights(folder / "model.safetensors"))
        settings = _json(folder / "config_sentence_transformers.json")
        self._prompt = chosen(spec, settings.get("prompts") or {}, settings.get("default_prompt_name")).text
        self._tokenizer = _tokenizer(folder / "tokenizer.json")
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self._longest(folder, spec))

    def text(self, text: str) -> np.ndarray:
        """Its vector, float32 of shape (dim,); SampleError as `sample_fields.text_of` raises it."""
        checked = text_of(Sample(ordinal=0, key="", text=text))
        with no_panic():
            ids = np.array(self._tokenizer.encode(self._prompt + checked).ids)
        if not len(ids):
            raise SampleError("empty_text", "the model's tokeniser finds no token in the text")
        if int(ids.max()) >= self._bert.vocabulary:
            raise SampleError("unknown_token", f"the tokeniser makes token {ids.max()}, which the model does not have")
        vector = _pooled(self._bert.states(ids), self._pooling)
        if self._unit_length:
            vector = vector / max(np.linalg.norm(vector), np.float32(1e-12))
        return np.asarray(vector, dtype=np.float32)

    def prepare_image(self, data: bytes) -> Any:
        """Raise SampleError: the model embeds texts only."""
        raise SampleError("missing_member", "the model embeds texts only")

    def image(self, prepared: Any) -> np.ndarray:
        """See `prepare_image`."""
        return np.empty(0, np.float32)

    def _longest(self, folder: Path, spec: ModelSpec) -> int:
        limit = _json(folder / "sentence_bert_config.json").get("max_seq_length")
        limit = limit or _json(folder / "tokenizer_config.json").get("model_max_length") or self._bert.positions
        return min(int(spec.param("max_length", str(int(limit)))), self._bert.positions)


def _pooling(config: dict[str, Any]) -> str:
    flags = [mode for flag, mode in POOLING_FLAGS.items() if config.get(flag)]
    mode = config.get("pooling_mode") or (flags[0] if len(flags) == 1 else "")
    if mode not in POOLING_FLAGS.values() or not config.get("include_prompt", True):
        raise ValueError(f"its pooling is {mode or flags}")
    return str(mode)


def _pooled(states: np.ndarray, mode: str) -> np.ndarray:
    pooled: np.ndarray = {"cls": states[0], "max": states.max(axis=0), "mean": states.mean(axis=0)}[mode]
    return pooled


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(require_regular(path)))
    except Exception as error:  # tokenizers raises no type of its own
        raise ValueError(f"{path.name}: {error}") from error


def _json(path: Path) -> Any:
    return json.loads(read_small(path))
