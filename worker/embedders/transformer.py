"""transformers encoders without a sentence-transformers configuration: the trunk, a pooling and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from core.errors import ModelError, SampleError
from core.models import EMBEDS, Chunking, ModelConfig, ModelSpec
from core.units import Sample
from worker.embedders.base import padded_tokens
from worker.embedders.device import (
    device_of,
    dtype_of,
    text_batch_size_of,
    text_window_of,
    token_budget_of,
)
from worker.embedders.fingerprint import fingerprint
from worker.embedders.loading import foreign_failures, model_source, no_progress_bars
from worker.embedders.members import check_modalities, prepare_texts
from worker.embedders.network import Network
from worker.embedders.params import choice, unit_length, whole_number
from worker.embedders.splitting import TokenSplitter, backend_splitter
from worker.embedders.tokens import TokenRow, Tokens, tokenizer_content

EMBEDDER_VERSION = "transformer 1"
"""Its number goes up when the same model and text give another vector."""

POOLINGS = ("mean", "cls", "max", "last")
"""How one vector comes from the vectors of a text's tokens; the first is the default."""


class TransformerEmbedder:
    """Pooled last hidden states of an encoder; pooling and normalisation are computed in float32."""

    def __init__(
        self,
        trunk: Any,
        tokenizer: Any,
        config: ModelConfig,
        device: torch.device,
        *,
        pooling: str,
        unit_length: bool,
        max_length: int | None,
        batch_size: int,
        token_budget: int,
    ) -> None:
        self._spec = config.spec
        self._pooling = pooling
        self._unit_length = unit_length
        self._device = device
        self._tokens = Tokens(tokenizer, max_length)
        self.batch_size = batch_size
        self.token_budget = token_budget
        self.cost = padded_tokens
        self.window = text_window_of(device)
        self.fingerprint = fingerprint(
            config,
            EMBEDDER_VERSION,
            {name: tensor for name, tensor in trunk.state_dict().items() if not name.startswith("pooler.")},
            {
                "trunk": trunk.config.to_dict(),
                "tokenizer": tokenizer_content(tokenizer),
                "pooling": [pooling, unit_length, max_length],
            },
        )
        self._trunk = trunk
        (example,) = self._tokens.rows(["a"])
        self._network = Network(trunk, self._run, device=device, dtype=dtype_of(config, device), example=example)
        self.dims: Mapping[str, int] = self._network.dims

    def prepare(self, samples: Sequence[Sample]) -> list[TokenRow | SampleError]:
        """Token ids of each text."""
        return prepare_texts(samples, self._tokens.rows)

    def length(self, prepared: TokenRow) -> int:
        """Its tokens."""
        return max(1, len(prepared["input_ids"]))

    def embed(self, batch: Sequence[TokenRow]) -> Mapping[str, np.ndarray]:
        """Pooled vectors of the batch."""
        return self._network.embed(batch)

    def embed_in_fp32(self, batch: Sequence[TokenRow]) -> Mapping[str, np.ndarray]:
        """The same of the trunk in fp32."""
        return self._network.embed_in_fp32(batch)

    def splitter(self, chunking: Chunking) -> TokenSplitter:
        """What cuts texts by the model's tokeniser."""
        tokens = self._tokens
        return backend_splitter(tokens.tokenizer, chunking, prompt="", longest=tokens.longest, model=self._spec)

    def _run(self, batch: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        features = self._tokens.padded(batch, self._device)
        states = self._trunk(**features, return_dict=True).last_hidden_state.float()
        vectors = pooled(states, features["attention_mask"], self._pooling)
        return {"text": normalize(vectors, dim=1) if self._unit_length else vectors}


def pooled(states: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """One vector per text: shape (texts, dim) from states (texts, tokens, dim) and a mask (texts, tokens) of 0 and 1.

    "cls" and "last" are the first and the last token that is not padding, on whichever side the padding is. The
    formulas are those of sentence-transformers 6.2, `Pooling.forward`.
    """
    if pooling == "mean":
        weights = mask.unsqueeze(-1).to(states.dtype)
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
    if pooling == "max":
        return states.masked_fill(mask.unsqueeze(-1) == 0, -torch.inf).max(1).values
    positions = torch.arange(mask.shape[1], device=mask.device)
    if pooling == "cls":
        chosen = torch.where(mask > 0, positions, mask.shape[1]).min(1).values
    else:
        chosen = torch.where(mask > 0, positions, -1).max(1).values
    return states[torch.arange(len(states), device=states.device), chosen]


def load(spec: ModelSpec, config: ModelConfig, device: str) -> TransformerEmbedder:
    """The model of an `hf:` spec; ModelError where it cannot be loaded here."""
    spec.check_params("pooling", "normalize", "max_length", "batch_size", "tokens")
    pooling = choice(spec, "pooling", POOLINGS[0], POOLINGS)
    to_unit_length = unit_length(spec, "false")
    check_modalities(config, *EMBEDS[spec.family])
    place = device_of(device)
    dtype_of(config, place)
    source, is_folder = model_source(spec.name, spec)
    with no_progress_bars(), foreign_failures(spec, from_hub=not is_folder):
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=is_folder, trust_remote_code=False)
        trunk, found = AutoModel.from_pretrained(
            source,
            # Explicit, because the default is the type of the checkpoint.
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=is_folder,
            trust_remote_code=False,
            output_loading_info=True,
        )
    _check_weights(spec, trunk, found)
    limit = _longest_text(trunk, tokenizer)
    asked = whole_number(spec, "max_length", limit or 512) if spec.param("max_length", "") else limit
    if limit is not None and asked is not None and asked > limit:
        raise ModelError(f"{spec}: the model reads {limit} tokens at most", next_step=f"use max_length={limit} or less")
    return TransformerEmbedder(
        trunk,
        tokenizer,
        config,
        place,
        pooling=pooling,
        unit_length=to_unit_length,
        max_length=asked,
        batch_size=whole_number(spec, "batch_size", text_batch_size_of(place)),
        token_budget=whole_number(spec, "tokens", token_budget_of(place)),
    )


def _check_weights(spec: ModelSpec, trunk: Any, found: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that leaves part of the trunk random; transformers only warns of it."""
    absent = sorted(str(name) for name in found["missing_keys"] if "pooler." not in str(name))
    absent += sorted(str(name) for name in found["mismatched_keys"])
    if absent:
        raise ModelError(
            f"{spec}: the checkpoint lacks {len(absent)} weights of the model, such as {absent[0]}",
            next_step="use a checkpoint of the architecture that its config.json names",
        )
    if getattr(trunk.config, "is_encoder_decoder", False):
        raise ModelError(
            f"{spec} is an encoder-decoder model", next_step="use a sentence-transformers model of it with st:"
        )


def _longest_text(trunk: Any, tokenizer: Any) -> int | None:
    """Most tokens of one text, special ones included; None where neither tokeniser nor positions set a limit."""
    limits = [tokenizer.model_max_length]
    positions = getattr(trunk.config, "max_position_embeddings", None)
    if positions:
        table = getattr(getattr(trunk, "embeddings", None), "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        # RoBERTa's positions start after the padding index: 514 of them hold 512 tokens.
        limits.append(positions if padding is None else positions - padding - 1)
    limit = min(limits)
    # The library writes "no limit" as 1e30.
    return int(limit) if limit < 1_000_000 else None
