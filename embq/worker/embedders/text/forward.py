"""Forward passes of text models: without padding where the model, the device and the precision allow it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from embq.core.errors import DeviceFullError, ModelError, SampleError
from embq.core.models import Chunking, ModelConfig, ModelSpec
from embq.core.service.log import Events
from embq.core.units import Sample
from embq.worker.embedders.base import Cost, padded_tokens
from embq.worker.embedders.device.errors import translated_device_errors
from embq.worker.embedders.device.network import Network
from embq.worker.embedders.device.placement import FLAT_WINDOW, dtype_of, kernels_for_any_shape, on_device, sizes_of
from embq.worker.embedders.device.trial import PROBES, AccuracyCheck, RefusedError, attempt
from embq.worker.embedders.device.tuning import FLAT, PATHS
from embq.worker.embedders.sample_fields import prepare_texts
from embq.worker.embedders.text.flat_attention import AttentionWithinTexts, Kernel
from embq.worker.embedders.text.flat_batch import FlatTexts, TokenRow, flattened
from embq.worker.embedders.text.late_chunking import LateChunk, Windower, no_late_chunks, places_of_chunks
from embq.worker.embedders.text.splitting import TokenSplitter, backend_splitter, no_splitter
from embq.worker.embedders.text.tokens import ONE_TOKEN, TableTokens, Tokens

LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Values of `layer_types` in which tokens meet in no other way than `flat_attention` computes."""


class FlatTrunk:
    """The states of the tokens of a flat batch.

    Args:
        trunk: a transformers model, see `is_flattenable`.
        kernel: computes attention within each text.
    """

    def __init__(self, trunk: Any, kernel: Kernel) -> None:
        self._trunk = trunk
        self._kernel = kernel
        self._attention = AttentionWithinTexts(trunk.config)
        self._padding = _position_of_padding(trunk)

    @property
    def dtype(self) -> torch.dtype:
        """In which the trunk computes now."""
        dtype: torch.dtype = self._trunk.dtype
        return dtype

    def states(self, texts: FlatTexts) -> torch.Tensor:
        """The last hidden states: shape (tokens, dim), in the type of the model."""
        features = {"input_ids": texts.ids, "position_ids": self._positions(texts), "token_type_ids": texts.types}
        row = {name: values[None] for name, values in features.items() if values is not None}
        with self._attention:
            outputs = self._trunk(**row, embq_texts=texts, embq_kernel=self._kernel, return_dict=True)
        states: torch.Tensor = outputs.last_hidden_state[0]
        return states

    def _positions(self, texts: FlatTexts) -> torch.Tensor:
        """Position ids that begin again with each text; int64 of shape (tokens,)."""
        padding = self._padding
        if padding is None:
            return texts.places()
        # RoBERTa counts the tokens that are not padding from there on, and a text may hold a padding token.
        counted = (texts.ids != padding).long()
        sums = counted.cumsum(0)
        offsets = (sums - counted)[texts.starts[:-1].long()]
        return (sums - texts.of_each(offsets)) * counted + padding


def is_flattenable(trunk: Any) -> bool:
    """Whether it is a model of transformers whose texts may lie one after the other: it leaves attention to functions
    that are registered, takes positions, and says of no layer that tokens meet in another way.

    What it does not say, the trial of `TextEmbedder.flatten` finds.
    """
    if not isinstance(trunk, PreTrainedModel) or not trunk._supports_attention_backend:
        return False
    layers = getattr(trunk.config, "layer_types", None) or ()
    return "position_ids" in signature(trunk.forward).parameters and LAYERS.issuperset(layers)


def _position_of_padding(trunk: Any) -> int | None:
    """In models of RoBERTa's kind, whose positions begin after it; None if they begin at 0.

    They alone have it beside a table of positions; sentence-transformers tells them by the same.
    """
    for module in trunk.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and isinstance(getattr(module, "position_embeddings", None), torch.nn.Embedding):
            return padding
    return None


LONGEST_PROBE = 512
"""Words of the longest text that is tried."""
FEW_PROBES, LONGEST_OF_FEW = 8, 32
"""Number of texts that are tried in fp32 on a CPU, and words of the longest on a CPU. In fp32 both ways give the same
vectors, so few show a fault; `PROBES` of up to `LONGEST_PROBE` words would take seconds."""

WORDS = ("the", "device", "reads", "texts", "of", "any", "length", "long", "ones", "beside", "short", "ones")

Head = Callable[[torch.Tensor, FlatTexts], torch.Tensor]
"""Vectors of shape (texts, dim) from the states of their tokens, which have shape (tokens, dim)."""

log = Events("worker")


class FlatForward:
    """From token rows to vectors: one row of all tokens, the trunk, and what makes vectors of its states."""

    def __init__(self, trunk: Any, head: Head, kernel: Kernel, device: torch.device) -> None:
        self._trunk = FlatTrunk(trunk, kernel)
        self.head = head
        self._device = device
        self._dtype = self._trunk.dtype

    @property
    def is_open(self) -> bool:
        """Whether the trunk computes in the type for which the kernel was chosen: not while it recomputes in fp32."""
        return self._trunk.dtype == self._dtype

    def states(self, batch: Sequence[TokenRow]) -> tuple[torch.Tensor, FlatTexts]:
        """(states of all tokens, of shape (tokens, dim), their texts)."""
        texts = flattened(batch, self._device)
        return self._trunk.states(texts), texts

    def run(self, batch: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        """One forward pass: output -> tensor of shape (texts, dim)."""
        return {"text": self.head(*self.states(batch))}


PROBE = "a"
"""Text that is embedded in place of `ONE_TOKEN`, by models that tokenise themselves."""


class TextEmbedder:
    """A text model of transformers or sentence-transformers; `flatten` lets its passes leave out padding.

    A constructor of a subclass takes the fingerprint of the weights in fp32, and ends with `_place`.

    Args:
        tokens: tokeniser that `prepare` applies; None for a model that gets the texts themselves.
        prompt: what is put before each text.
    """

    fingerprint: str
    dims: Mapping[str, int]

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        *,
        tokens: Tokens | TableTokens | None,
        prompt: str,
        batch_size: int,
        token_budget: int,
    ) -> None:
        self._config = config
        self._spec = config.spec
        self._device = device
        self._tokens = tokens
        self._prompt = prompt
        self.batch_size = batch_size
        self.token_budget = token_budget
        self.cost: Cost = padded_tokens
        self.window = sizes_of(device).window
        self._flat: FlatForward | None = None
        self._late_head: Head | None = None

    def _place(self, module: torch.nn.Module) -> None:
        """Move the weights to the device, in the type in which it computes."""
        dtype, example = dtype_of(self._config, self._device), PROBE if self._tokens is None else ONE_TOKEN
        self._network: Network[Any] = Network(module, self._run, device=self._device, dtype=dtype, example=example)
        self.dims = self._network.dims

    def prepare(self, samples: Sequence[Sample]) -> list[TokenRow | str | SampleError]:
        """Token ids, or the text itself where the model tokenises in its own way."""
        if self._tokens is None:
            return [*prepare_texts(samples, list)]
        return [*prepare_texts(samples, self._rows)]

    def length(self, prepared: TokenRow | str | LateChunk) -> int:
        """Its tokens. A text that is tokenised later counts four characters to a token."""
        if isinstance(prepared, LateChunk):
            return prepared.length
        return max(1, len(prepared) // 4 if isinstance(prepared, str) else len(prepared["input_ids"]))

    def embed(self, batch: Sequence[TokenRow | str]) -> Mapping[str, np.ndarray]:
        """Vectors of the batch, in float32."""
        return self._network.embed(batch)

    def embed_in_fp32(self, batch: Sequence[TokenRow | str]) -> Mapping[str, np.ndarray]:
        """The same of the model in fp32."""
        return self._network.embed_in_fp32(batch)

    def use_prompt(self, spec: ModelSpec, task: str = "") -> None:
        """See `embq.worker.embedders.base.PromptedEmbedder`."""
        self._prompt = spec.param("prompt", "")

    def preparing(self, *, prompt_name: str = "", cut: str = "") -> TextEmbedder:
        """See `embq.worker.embedders.base.VariedEmbedder`."""
        other = copy.copy(self)
        if prompt_name:
            other._prompt = self._named_prompt(prompt_name)
        if cut and isinstance(self._tokens, Tokens):
            other._tokens = self._tokens.cutting(cut)
        elif cut and self._tokens is None:
            raise ModelError(f"{self._spec}: the model cuts texts by itself", next_step="leave out the side")
        return other

    def _named_prompt(self, name: str) -> str:
        raise ModelError(f"{self._spec}: {name!r} cannot be the name of a prompt: the model's prompts have none")

    def splitter(self, chunking: Chunking) -> TokenSplitter:
        """The splitter by the model's tokeniser; the prompt before each chunk counts as well."""
        if not isinstance(self._tokens, Tokens):
            raise no_splitter(self._spec, "it does not begin with a plain tokeniser")
        tokens = self._tokens
        return backend_splitter(
            tokens.tokenizer, chunking, prompt=self._prompt, longest=tokens.longest, model=self._spec
        )

    def windower(self) -> Windower:
        """See `embq.worker.embedders.text.late_chunking.PoolsChunks`."""
        if not isinstance(self._tokens, Tokens):
            raise no_late_chunks(self._spec, "it does not begin with a plain tokeniser")
        if self._late_head is None:
            self._late_head = self._trunk_and_head(of_chunks=True)[1]
        if self._late_head is None:
            raise no_late_chunks(self._spec, "it does not pool its last hidden states by their mean")
        return Windower(self._tokens, self._prompt, model=self._spec)

    def flatten(self, kernel: Kernel | None) -> None:
        """Leave out padding from now on, if that makes vectors as good as the padded ones; the log says whether.

        Args:
            kernel: computes attention within each text of a flat batch; None if the device has none for this
                precision.

        Raises DeviceError if the device is broken, perhaps by the kernel.
        """
        if not isinstance(self._tokens, Tokens):
            return
        self._flat = None
        self._flat = self._flat_path(kernel)
        self.cost = padded_tokens if self._flat is None else sum
        window = sizes_of(self._device).window
        self.window = window if self._flat is None else min(FLAT_WINDOW, window)

    def _flat_path(self, kernel: Kernel | None) -> FlatForward | None:
        trunk, head = self._trunk_and_head()
        if kernel is None or head is None or not is_flattenable(trunk):
            why = "kernel" if kernel is None else "architecture" if not is_flattenable(trunk) else "modules"
            log.info("attention", model=self._spec, path="padded", lacks=why)
            return None
        path = FlatForward(trunk, head, kernel, self._device)
        is_exact = self._device.type == "cpu" and self._network.dtype == torch.float32
        longest = LONGEST_OF_FEW if self._device.type == "cpu" else LONGEST_PROBE
        texts = probe_texts(FEW_PROBES if is_exact else PROBES, longest)
        probes = [row for row in self._rows(texts) if isinstance(row, Mapping)]
        try:
            exact = torch.from_numpy(self._network.embed_in_fp32(probes)["text"])
            with translated_device_errors(), torch.inference_mode():
                check = AccuracyCheck(exact if is_exact else self._padded(probes)["text"], exact)
        except DeviceFullError as error:
            log.warning("attention", model=self._spec, path="padded", failed=f"no room for a trial: {error.message}")
            return None

        def tried() -> float:
            with torch.inference_mode():
                vectors = path.run(probes)["text"]
                if why := check.refusal(vectors):
                    raise RefusedError(why)
                return check.ratio(vectors)

        try:
            ratio = attempt(FLAT, tried, lambda: self._padded(probes)["text"].cpu())
        except RefusedError as refusal:
            PATHS.settle(FLAT, is_taken=False)
            log.warning("attention", model=self._spec, path="padded", failed=str(refusal))
            return None
        PATHS.settle(FLAT, is_taken=True)
        log.info("attention", model=self._spec, path="flat", error_ratio=round(ratio, 3))
        return path

    def _rows(self, texts: Sequence[str]) -> Sequence[TokenRow | SampleError]:
        assert self._tokens is not None
        return self._tokens.rows([self._prompt + text for text in texts])

    def _pooled_late(self, batch: Sequence[LateChunk]) -> dict[str, torch.Tensor]:
        """Vectors of chunks, from those of their windows that no pass before has computed."""
        keeps = self._network.is_in_own_type
        windows = list(dict.fromkeys(chunk.window for chunk in batch))
        by_window = {window: window.vectors for window in windows if keeps and window.vectors is not None}
        if new := [window for window in windows if window not in by_window]:
            states, texts = self._states([window.row for window in new])
            places, lengths = places_of_chunks(new)
            starts = np.zeros(len(lengths) + 1, dtype=np.int32)
            np.cumsum(lengths, out=starts[1:])
            at, begins = (on_device(torch.from_numpy(numbers), self._device) for numbers in (places, starts))
            assert self._late_head is not None
            vectors = self._late_head(
                states[at], FlatTexts(ids=texts.ids[at], types=None, starts=begins, lengths=lengths)
            )
            by_window |= zip(new, torch.split(vectors, [len(window.starts) for window in new]), strict=True)
        if keeps:
            for window, own in by_window.items():
                window.vectors = own
        return {"text": torch.stack([by_window[chunk.window][chunk.number] for chunk in batch])}

    def _states(self, rows: Sequence[TokenRow]) -> tuple[torch.Tensor, FlatTexts]:
        """(last hidden states of all tokens, of shape (tokens, dim), their texts)."""
        if self._flat is not None and self._flat.is_open:
            return self._flat.states(rows)
        assert isinstance(self._tokens, Tokens)
        features = self._tokens.padded(rows, self._device)
        trunk, _ = self._trunk_and_head(of_chunks=True)
        with kernels_for_any_shape(self._device):
            states = trunk(**features, return_dict=True).last_hidden_state
        return states[features["attention_mask"].bool()], flattened(rows, self._device)

    def _run(self, batch: Sequence[Any]) -> dict[str, torch.Tensor]:
        if isinstance(batch[0], LateChunk):
            return self._pooled_late(batch)
        if self._flat is not None and self._flat.is_open and not isinstance(batch[0], str):
            return self._flat.run(batch)
        with kernels_for_any_shape(self._device):
            return self._padded(batch)

    def _padded(self, batch: Sequence[Any]) -> dict[str, torch.Tensor]:
        """One forward pass with padding: output -> tensor of shape (texts, dim)."""
        raise NotImplementedError

    def _trunk_and_head(self, *, of_chunks: bool = False) -> tuple[Any, Head | None]:
        """The trunk, and what makes vectors of its flat states; None if the model needs padded states.

        Args:
            of_chunks: the head is for states of chunks without the prompt; None if it does not pool by the mean.
        """
        raise NotImplementedError


def probe_texts(texts: int = PROBES, longest: int = LONGEST_PROBE) -> list[str]:
    """Texts of 1 to `longest` words, long ones beside short ones."""
    counts = np.geomspace(1, longest, texts).astype(int).tolist()
    lines = [" ".join(WORDS[(count + n) % len(WORDS)] for n in range(count)) for count in counts]
    return lines[::2] + lines[1::2][::-1]
