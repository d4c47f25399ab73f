"""Token ids: made on any thread without padding, padded when the batch is known."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import TokenizersBackend

from worker.embedders.base import Truncated

TokenRow = Mapping[str, np.ndarray]
"""One text: `input_ids` and, where the model takes them and some are not 0, `token_type_ids`; int32, (tokens,)."""


OVERFLOW_CHARS_PER_TOKEN = 100
"""Of texts with more characters for each token that is read, the offsets tell what was cut off."""

NO_LIMIT = 1e20
"""The library writes "no limit" as 1e30; it truncates at anything below this."""


class ThreadCopies:
    """One copy of an object per thread, for objects that may not be shared.

    A tokeniser of the tokenizers library that two threads use at once fails with "Already borrowed".
    """

    def __init__(self, original: Any) -> None:
        self._original = original
        self._lock = threading.Lock()
        self._local = threading.local()

    def mine(self) -> Any:
        """This thread's copy."""
        if not hasattr(self._local, "copy"):
            with self._lock:
                self._local.copy = copy.deepcopy(self._original)
        return self._local.copy


class Tokens:
    """A transformers tokeniser that any thread may use.

    Args:
        tokenizer: a `PreTrainedTokenizerBase`; copies of it are used.
        max_length: longest row in tokens with the special ones, or None for the tokeniser's own limit.

    Attributes:
        longest: that limit; None where there is none.
    """

    def __init__(self, tokenizer: Any, max_length: int | None = None) -> None:
        self.tokenizer = tokenizer
        limit = tokenizer.model_max_length if max_length is None else max_length
        backend = _backend(tokenizer, limit)
        self._is_plain = backend is not None
        self._copies = ThreadCopies(tokenizer if backend is None else backend)
        self._max_length = max_length
        self.longest = int(limit) if limit < 1_000_000 else None
        self._pads_left = tokenizer.padding_side == "left"
        # Without a pad token any id will do: the attention mask hides it.
        self._pad_ids = {"input_ids": 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)}
        if "token_type_ids" in tokenizer.model_input_names:
            self._pad_ids["token_type_ids"] = int(tokenizer.pad_token_type_id)
        # They depend on the place in the template only, so one text of some tokens shows whether all are 0.
        self._is_typed = "token_type_ids" in self._pad_ids and any(tokenizer("a b c")["token_type_ids"])

    def rows(self, texts: Sequence[str]) -> list[TokenRow]:
        """One row per text with special tokens, without padding; a `Truncated` one where the text is too long."""
        if not texts:
            return []
        return self._by_library(texts) if self._is_plain else self._by_wrapper(texts)

    def _by_library(self, texts: Sequence[str]) -> list[TokenRow]:
        """Straight from the tokenizers library: the wrapper makes Python lists of five kinds for each row."""
        encoder = self._copies.mine()
        encoder.encode_special_tokens = self.tokenizer.split_special_tokens  # which a copy forgets
        # Without offsets it is faster, but long texts are asked for them.
        short = iter(encoder.encode_batch_fast([text for text in texts if not self._is_long(text)]))
        long = iter(encoder.encode_batch([text for text in texts if self._is_long(text)]))
        rows: list[TokenRow] = []
        for text in texts:
            encoding = next(long if self._is_long(text) else short)
            row = {"input_ids": np.array(encoding.ids, dtype=np.int32)}
            if self._is_typed:
                row["token_type_ids"] = np.array(encoding.type_ids, dtype=np.int32)
            is_full = len(row["input_ids"]) == self.longest
            rows.append(Truncated(row) if is_full and self._is_cut(encoding, text) else row)
        return rows

    def _by_wrapper(self, texts: Sequence[str]) -> list[TokenRow]:
        """By the tokeniser's own Python."""
        encoded = self._copies.mine()(
            list(texts),
            padding=False,
            truncation="longest_first",
            max_length=self._max_length,
            return_attention_mask=False,
        )
        names = [name for name in self._pad_ids if name in encoded and (name == "input_ids" or self._is_typed)]
        rows: list[TokenRow] = [
            {name: np.array(encoded[name][row], dtype=np.int32) for name in names} for row in range(len(texts))
        ]
        # What was cut off; only a tokeniser of the tokenizers library tells.
        for number, encoding in enumerate(encoded.encodings or ()):
            if len(encoding) == self.longest and self._is_cut(encoding, texts[number]):
                rows[number] = Truncated(rows[number])
        return rows

    def _is_long(self, text: str) -> bool:
        return self.longest is not None and len(text) > OVERFLOW_CHARS_PER_TOKEN * self.longest

    def _is_cut(self, encoding: Any, text: str) -> bool:
        """Whether a row of the greatest length lacks some of its text."""
        if not self._is_long(text):
            return bool(encoding.overflowing)
        # Of a long text the list of what was cut off would be copied, some 100 bytes for each token.
        covered = [span for span in encoding.offsets if span != (0, 0)]
        first, last = min(start for start, _ in covered), max(end for _, end in covered)
        return bool(text[:first].strip() or text[last:].strip())

    def padded(self, batch: Sequence[TokenRow], device: torch.device) -> dict[str, torch.Tensor]:
        """The batch as int64 tensors of shape (len(batch), longest row), with its `attention_mask`."""
        longest = max(len(row["input_ids"]) for row in batch)
        shape = (len(batch), longest)
        arrays = {name: np.full(shape, pad, dtype=np.int64) for name, pad in self._pad_ids.items()}
        mask = np.zeros(shape, dtype=np.int64)
        for number, row in enumerate(batch):
            length = len(row["input_ids"])
            span = slice(longest - length, longest) if self._pads_left else slice(0, length)
            for name, array in arrays.items():
                array[number, span] = row.get(name, 0)
            mask[number, span] = 1
        arrays["attention_mask"] = mask
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def _backend(tokenizer: Any, limit: float) -> Any | None:
    """The tokenizers library's own object, as the wrapper would set it up; None where the wrapper does more than that.

    Args:
        limit: longest row in tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kind = type(tokenizer)
    is_plain = isinstance(tokenizer, TokenizersBackend) and all(
        getattr(kind, name) is getattr(TokenizersBackend, name) for name in ("__call__", "_encode_plus")
    )
    if backend is None or not is_plain:
        return None
    backend = copy.deepcopy(backend)
    backend.no_padding()
    backend.no_truncation()
    if limit <= NO_LIMIT:
        backend.enable_truncation(int(limit), strategy="longest_first", direction=tokenizer.truncation_side)
    return backend


def tokenizer_content(tokenizer: Any) -> dict[str, Any]:
    """All that decides a tokeniser's ids, as JSON-ready values, for a fingerprint; no path is in it.

    Padding and truncation are left out: they are given with every call, and the library writes the last call's
    values back into the tokeniser.
    """
    content: dict[str, Any] = {
        "class": type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "max_length": tokenizer.model_max_length,
        "sides": [tokenizer.padding_side, tokenizer.truncation_side],
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content["vocabulary"] = sorted(tokenizer.get_vocab().items())
    else:
        import json

        described = json.loads(backend.to_str())
        content["backend"] = {key: described[key] for key in described if key not in ("padding", "truncation")}
    return content
