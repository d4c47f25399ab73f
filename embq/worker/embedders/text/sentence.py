"""Models of sentence-transformers: a folder, a hub id, or all-MiniLM-L6-v2 from its package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers import SimilarityFunction as SimilarityFunction
from sentence_transformers import quantize_embeddings as quantize_embeddings
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, StaticEmbedding, Transformer
from transformers import PreTrainedTokenizerBase

from embq.core.errors import ModelError, SampleError
from embq.core.model_params import SENTENCE, unit_length, whole_number
from embq.core.models import ModelConfig, ModelSpec
from embq.core.service.log import Events
from embq.worker.embedders.device.placement import ACCELERATOR_SIZES, device_of, dtype_of, sizes_of
from embq.worker.embedders.fingerprint import fingerprint
from embq.worker.embedders.loading import complete_weights, model_source, no_progress_bars, translated_model_errors
from embq.worker.embedders.sample_fields import check_modalities
from embq.worker.embedders.text.flat_attention import kernel_for
from embq.worker.embedders.text.flat_batch import flattened
from embq.worker.embedders.text.flat_pooling import flat_head
from embq.worker.embedders.text.forward import Head, TextEmbedder
from embq.worker.embedders.text.int8 import int8_content, int8_trunk
from embq.worker.embedders.text.lora import add_lora
from embq.worker.embedders.text.prompts import Prompt, check_prompt, chosen
from embq.worker.embedders.text.tokens import (
    NO_LIMIT,
    TableTokens,
    Tokens,
    asked_length,
    positions_held,
    reads_ids,
    tokenizer_content,
    tokens_held,
    vocabulary_of,
)

log = Events("worker")


def loaded(spec: ModelSpec, *, keep_length: bool) -> SentenceTransformer:
    """The model in fp32, on the CPU; ModelError if it cannot be loaded, or not be what the spec says.

    Args:
        keep_length: whether its vectors keep the length that they have from the trunk.
    """
    source = model_source(spec)
    with no_progress_bars(), translated_model_errors(spec, from_hub=False), complete_weights(spec):
        model = SentenceTransformer(
            source,
            # Where it is computed it goes in its precision, which is half of this or less.
            device="cpu",
            trust_remote_code=False,
            local_files_only=True,
            # Explicit, because the default is the type of the checkpoint.
            model_kwargs={"dtype": torch.float32, "use_safetensors": True},
        )
        model.float().eval()
    if not model.supports("text"):
        raise ModelError(f"{spec} does not embed texts", next_step="use open_clip: for models of images")
    if not model.module_kwargs:
        # There is no modules.json, and sentence-transformers takes what suits most models.
        modes = [module.pooling_mode for module in model if isinstance(module, Pooling)]
        log.warning("pooling_assumed", model=spec, pooling=",".join(map(str, modes)))
    add_lora(model.transformers_model, spec)
    _limit_length(model, spec)
    if keep_length:
        _leave_out_normalizing(model, spec)
    return model


def _limit_length(model: SentenceTransformer, spec: ModelSpec) -> None:
    """Give the model's tokenisers the length that the spec asks for, and none that the positions do not hold.

    sentence-transformers takes the length that the files say. If it is too long, `encode` fails with an IndexError
    at the first text that is as long; texts that it can embed get the same vector here.
    """
    readers = [
        module
        for module in model.modules()
        if isinstance(module, Transformer) and module.tokenizer is not None and reads_ids(module.model)
    ]
    if not readers and spec.param("max_length", ""):
        raise ModelError(f"{spec}: its first module has no limit that could be set", next_step="leave out max_length")
    for reader in readers:
        requested, held = asked_length(spec, tokens_held(reader.model)), positions_held(reader.model)
        declared = reader.max_seq_length
        if requested is not None:
            reader.max_seq_length = requested
        elif held is not None and (declared is None or declared > held):
            shown = declared if declared is not None and declared < NO_LIMIT else "none"
            log.warning("length_limited", model=spec, told=shown, to=held)
            reader.max_seq_length = held


def _leave_out_normalizing(model: SentenceTransformer, spec: ModelSpec) -> None:
    """Take off the modules at the end that bring vectors to length 1; ModelError if one is inside another module."""
    while len(model) > 1 and isinstance(model[-1], Normalize):
        del model[-1]
    within = [module for part in model for module in part.modules() if module is not part]
    if any(isinstance(module, Normalize) for module in within):
        raise ModelError(
            f"{spec}: its vectors are brought to length 1 inside of another module, where that cannot be left out",
            next_step="leave out --no-normalize and ?normalize=false",
        )


EMBEDDER_VERSION = "sentence 1"
"""Its number goes up when the same model and text give another vector."""


class SentenceEmbedder(TextEmbedder):
    """The vectors of `SentenceTransformer.encode`, with its prompts, truncation and modules, for one modality: text.

    Where the model begins with a plain tokeniser, texts are tokenised in `prepare`, on any thread. Any other first
    module (a chat template, a bag of words) gets the texts themselves, in `embed`, exactly as `encode` passes them.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        config: ModelConfig,
        device: torch.device,
        *,
        prompt: Prompt,
        batch_size: int,
        token_budget: int,
    ) -> None:
        tokens = self._all_tokens = _tokens_of(model, prompt)
        super().__init__(
            config, device, tokens=tokens, prompt=prompt.text, batch_size=batch_size, token_budget=token_budget
        )
        self._model = model
        self._set_prompt(prompt)
        if isinstance(tokens, TableTokens):
            self.cost = sum  # nothing is padded
        content = {
            **_content(model, _asked_prompt(model, ModelSpec.parse(config.identified_as.spec))),
            **int8_content(config),
        }
        self.fingerprint = fingerprint(config, EMBEDDER_VERSION, _weights(model), content)
        if config.precision == "int8":
            self._quantise()
        self._place(model)

    @property
    def similarity_fn_name(self) -> str:
        """Name of the model's own similarity in sentence-transformers."""
        return str(self._model.similarity_fn_name)

    def use_prompt(self, spec: ModelSpec, task: str = "") -> None:
        """See `embq.worker.embedders.base.PromptedEmbedder`."""
        prompt = chosen(spec, self._model.prompts, self._model.default_prompt_name)
        self._set_prompt(replace(prompt, task=task or prompt.task))
        if self._flat is not None and (head := self._trunk_and_head()[1]) is not None:
            self._flat.head = head

    def _named_prompt(self, name: str) -> str:
        spec = ModelSpec.parse(self._spec).without_prompt().with_prompt(name, None)
        text, parts = chosen(spec, self._model.prompts, None).text, self._model.modules()
        if self._tokens is None or any(isinstance(part, Pooling) and not part.include_prompt for part in parts):
            raise ModelError(
                f"{self._spec}: the model needs its prompt beside the text",
                next_step=f"load it with ?prompt_name={name} behind its spec, under a name of its own",
            )
        return text

    def _set_prompt(self, prompt: Prompt) -> None:
        self._prompt, self._task = prompt.text, {"task": prompt.task} if prompt.task else {}
        self._tokens = None if _is_task_bound(self._model[0], prompt) else self._all_tokens
        self._extra = _extra_features(self._tokens, prompt.text) if isinstance(self._tokens, Tokens) else {}

    def _trunk_and_head(self, *, of_chunks: bool = False) -> tuple[Any, Head | None]:
        skipped = 0 if of_chunks else int(self._extra.get("prompt_length", 0))
        return self._model.transformers_model, flat_head(self._model, skipped, by_mean=of_chunks)

    def _quantise(self) -> None:
        if not isinstance(self._tokens, Tokens):
            raise ModelError(
                f"{self._spec}: int8 is for models that begin with a plain tokeniser and a transformers encoder",
                next_step="use fp32 or bf16",
            )
        first = self._model[0]
        first.model = int8_trunk(first.model, self._tokens, self._prompt, self._spec)

    def _padded(self, batch: Sequence[Any]) -> dict[str, torch.Tensor]:
        if isinstance(self._tokens, TableTokens):
            texts = flattened(batch, self._device)
            features: dict[str, Any] = {"input_ids": texts.ids, "offsets": texts.starts[:-1].long()}
        elif self._tokens is None:
            features = self._model.preprocess(list(batch), prompt=self._prompt or None, **self._task)
        else:
            features = {**self._tokens.padded(batch, self._device), **self._extra}
        inputs = {
            name: value.to(self._device) if isinstance(value, torch.Tensor) else value
            for name, value in features.items()
        }
        vectors = self._model(inputs, **self._task)["sentence_embedding"]
        return {"text": vectors[:, : self._model.truncate_dim]}


def load(spec: ModelSpec, config: ModelConfig, device: str) -> SentenceEmbedder:
    """The model of a `minilm` or `st:` spec; ModelError if it cannot be loaded here."""
    spec.check_params(*SENTENCE)
    check_prompt(spec)
    keep_length = not unit_length(spec, "true")
    check_modalities(config, *spec.model_family.embeds)
    place = device_of(device)
    dtype = dtype_of(config, place)
    model = loaded(spec, keep_length=keep_length)
    prompt = chosen(spec, model.prompts, model.default_prompt_name)
    is_table = type(model[0]) is StaticEmbedding
    # What a model raises at its first text is said as well as what it raises while it is loaded.
    with translated_model_errors(spec, from_hub=False):
        embedder = SentenceEmbedder(
            model,
            config,
            place,
            prompt=prompt,
            batch_size=whole_number(spec, "batch_size", sizes_of(place).texts),
            token_budget=whole_number(spec, "tokens", (ACCELERATOR_SIZES if is_table else sizes_of(place)).tokens),
        )
    embedder.flatten(kernel_for(place, dtype))
    return embedder


def _asked_prompt(model: SentenceTransformer, spec: ModelSpec) -> list[str] | None:
    """Text and task of the prompt that a spec asks for; None if it asks for none."""
    if not {"prompt_name", "prompt"} & {name for name, _ in spec.params}:
        return None
    prompt = chosen(spec, model.prompts, model.default_prompt_name)
    return [prompt.text, prompt.task]


def _tokens_of(model: SentenceTransformer, prompt: Prompt) -> Tokens | TableTokens | None:
    """The tokeniser of a first module whose inputs are its plain output; None for any other."""
    first = model[0]
    if type(first) is StaticEmbedding:
        return TableTokens(first.tokenizer, first.num_embeddings)
    plain = (
        isinstance(first, Transformer)
        and isinstance(first.processor, PreTrainedTokenizerBase)
        and first.transformer_task == "feature-extraction"
        and "message" not in first.modality_config
        and not first.processing_kwargs
        and not _is_task_bound(first, prompt)
        and not model._can_flatten_inputs()
    )
    return Tokens(first.processor, vocabulary=vocabulary_of(first.model)) if plain else None


def _is_task_bound(first: Any, prompt: Prompt) -> bool:
    """Whether a first module tokenises in another way for the task of a prompt."""
    bound = isinstance(first, Transformer) and (first.query_length or first.document_length or first.query_expansion)
    return bool(prompt.task and bound)


def _extra_features(tokens: Tokens, prompt: str) -> dict[str, Any]:
    """Inputs of the modules of sentence-transformers beside the tokens: how many of these are the prompt's.

    Some poolings leave them out. Its own count (`Transformer._get_prompt_length`) pads, which not every tokeniser can.
    """
    if not prompt:
        return {"modality": "text"}
    [row] = tokens.rows([prompt])
    if isinstance(row, SampleError):
        return {"modality": "text"}
    ids = row["input_ids"]
    return {"modality": "text", "prompt_length": len(ids) - (int(ids[-1]) in tokens.tokenizer.all_special_ids)}


def _weights(model: SentenceTransformer) -> dict[str, torch.Tensor]:
    """The state dict without the trunk's pooler, which no module reads and which is random where a file lacks it."""
    return {name: tensor for name, tensor in model.state_dict().items() if ".pooler." not in f".{name}"}


def _content(model: SentenceTransformer, asked_prompt: list[str] | None) -> dict[str, Any]:
    first = model[0]
    trunk = model.transformers_model
    modules: list[Any] = list(model.children())
    is_plain = isinstance(first, Transformer) and isinstance(first.processor, PreTrainedTokenizerBase)
    return {
        "modules": [
            [type(module).__name__, module.get_config_dict() if hasattr(module, "get_config_dict") else {}]
            for module in modules
        ],
        "prompts": [model.prompts, model.default_prompt_name] if asked_prompt is None else asked_prompt,
        "lengths": [model.max_seq_length, model.truncate_dim],
        "trunk": trunk.config.to_dict() if trunk is not None else {},
        "tokenizer": tokenizer_content(first.processor) if is_plain else {},
    }
