"""Text models of transformers without a sentence-transformers configuration: trunk and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch.nn.functional import normalize
from transformers import (
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForTextEncoding,
    AutoTokenizer,
)

from embq.core.errors import ModelError
from embq.core.model_params import ENCODER, unit_length, whole_number
from embq.core.models import ModelConfig, ModelSpec
from embq.worker.embedders.device.placement import device_of, dtype_of, sizes_of
from embq.worker.embedders.fingerprint import fingerprint
from embq.worker.embedders.loading import lacks_weights, model_source, read_model, translated_model_errors
from embq.worker.embedders.text.flat_attention import kernel_for
from embq.worker.embedders.text.flat_batch import TokenRow
from embq.worker.embedders.text.flat_pooling import pooled
from embq.worker.embedders.text.forward import Head, TextEmbedder
from embq.worker.embedders.text.int8 import int8_content, int8_trunk
from embq.worker.embedders.text.lora import add_lora
from embq.worker.embedders.text.tokens import (
    NO_LIMIT,
    Tokens,
    asked_length,
    reads_ids,
    tokenizer_content,
    tokens_held,
    vocabulary_of,
)

EMBEDDER_VERSION = "transformer 1"
"""Its number goes up when the same model and text give another vector."""

POOLINGS = ("mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Poolings of token vectors to one vector; the first is the default."""

ALIASES = {"last": "lasttoken"}


class TransformerEmbedder(TextEmbedder):
    """Pooled last hidden states of a trunk; pooling and normalisation are computed in float32.

    Args:
        pooling: one of `POOLINGS`, or several with plus signs, whose vectors are put one after the other.
        max_length: longest row in tokens; None for no limit.
        prompt: what is put before each text.
    """

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
        prompt: str,
        batch_size: int,
        token_budget: int,
    ) -> None:
        tokens = Tokens(tokenizer, max_length, vocabulary=vocabulary_of(trunk))
        super().__init__(config, device, tokens=tokens, prompt=prompt, batch_size=batch_size, token_budget=token_budget)
        self._pooling = Pooling(trunk.config.hidden_size, pooling.split("+"))
        self._unit_length = unit_length
        fixed_prompt = ModelSpec.parse(config.identified_as.spec).param("prompt", "")
        self.fingerprint = fingerprint(
            config,
            EMBEDDER_VERSION,
            {name: tensor for name, tensor in trunk.state_dict().items() if not name.startswith("pooler.")},
            {
                "trunk": trunk.config.to_dict(),
                "tokenizer": tokenizer_content(tokenizer),
                "pooling": [pooling, unit_length, max_length],
                **({"prompt": fixed_prompt} if fixed_prompt else {}),
                **int8_content(config),
            },
        )
        trunk.config.use_cache = False  # of decoders, which no pass here goes on from
        if config.precision == "int8":
            trunk = int8_trunk(trunk, tokens, prompt, config.spec)
        self._trunk = trunk
        self._place(trunk)

    def _trunk_and_head(self, *, of_chunks: bool = False) -> tuple[Any, Head | None]:
        mode = self._pooling.pooling_mode
        modes = (mode,) if isinstance(mode, str) else tuple(mode)
        if of_chunks and modes != ("mean",):
            return self._trunk, None
        return self._trunk, lambda states, texts: self._finished(pooled(states.float(), texts, modes))

    def _padded(self, batch: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        assert isinstance(self._tokens, Tokens)
        features = self._tokens.padded(batch, self._device)
        states = self._trunk(**features, return_dict=True).last_hidden_state.float()
        result = self._pooling({"token_embeddings": states, "attention_mask": features["attention_mask"]})
        return {"text": self._finished(result["sentence_embedding"])}

    def _finished(self, vectors: torch.Tensor) -> torch.Tensor:
        return normalize(vectors, dim=1) if self._unit_length else vectors


def load(spec: ModelSpec, config: ModelConfig, device: str) -> TransformerEmbedder:
    """The model of an `hf:` spec for texts; ModelError if it cannot be loaded here."""
    spec.check_params(*ENCODER)
    pooling = _pooling_of(spec)
    to_unit_length = unit_length(spec, "false")
    place = device_of(device)
    dtype = dtype_of(config, place)
    source = model_source(spec)
    with translated_model_errors(spec, from_hub=False):
        trunk = _trunk(spec, source, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    add_lora(trunk, spec)
    held = tokens_held(trunk)
    declared = tokenizer.model_max_length if tokenizer.model_max_length < NO_LIMIT else None
    limit = min((bound for bound in (held, declared) if bound is not None), default=None)
    # What a model raises at its first text is said as well as what it raises while it is loaded.
    with translated_model_errors(spec, from_hub=False):
        embedder = TransformerEmbedder(
            trunk,
            tokenizer,
            config,
            place,
            pooling=pooling,
            unit_length=to_unit_length,
            max_length=asked_length(spec, limit) or limit,
            prompt=spec.param("prompt", ""),
            batch_size=whole_number(spec, "batch_size", sizes_of(place).texts),
            token_budget=whole_number(spec, "tokens", sizes_of(place).tokens),
        )
    embedder.flatten(kernel_for(place, dtype))
    return embedder


def _pooling_of(spec: ModelSpec) -> str:
    """The parameter `pooling`: names of `POOLINGS` with plus signs; ModelError for any other."""
    names = [ALIASES.get(name, name) for name in spec.param("pooling", POOLINGS[0]).split("+")]
    for name in names:
        if name not in POOLINGS:
            raise ModelError(
                f"{spec}: unknown pooling {name!r}",
                next_step=f"use pooling= one of {', '.join(POOLINGS)}, or several of them, such as pooling=mean+max",
            )
    return "+".join(names)


def _trunk(spec: ModelSpec, source: str, **where: bool) -> Any:
    """The model without a head, in float32; of an encoder-decoder its encoder. ModelError for what reads no texts."""
    config = AutoConfig.from_pretrained(source, **where)
    # Of T5 and its kind, AutoModel would be encoder and decoder; of others the two are the same.
    kind = AutoModelForTextEncoding if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING else AutoModel
    is_t5gemma = config.model_type == "t5gemma"
    if is_t5gemma:
        config.is_encoder_decoder = False  # or its encoder refuses to be loaded alone
    trunk, account = read_model(kind, source, config=config, **where)
    if not reads_ids(trunk):
        raise ModelError(
            f"{spec} does not embed texts alone",
            next_step="add --modality image if it is a model of images; for images and texts use open_clip:",
        )
    decodes = kind is AutoModel and bool(getattr(config, "is_encoder_decoder", False))
    # transformers only warns of weights that it made up. Nothing reads a pooler.
    absent = sorted(
        str(name)
        for name in {*account["missing_keys"], *account["mismatched_keys"]}
        if "pooler." not in str(name) and not (decodes and "decoder." in str(name))
    )
    if absent:
        raise lacks_weights(spec, absent)
    return trunk.get_encoder() if decodes or is_t5gemma else trunk
