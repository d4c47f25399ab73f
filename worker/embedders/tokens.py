"""Token ids: made on any thread without padding, padded when the batch is known."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from worker.embedders.base import Truncated

TokenRow = Mapping[str, np.ndarray]
"""One text: `input_ids` and, where the model takes them, `token_type_ids`; int32 of shape (tokens,)."""


OVERFLOW_CHARS_PER_TOKEN = 100
"""Of texts with more characters for each token that is read, the offsets tell what was cut off."""


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
        tokenizer: a `PreTrainedTokenizerBase`; it is copied and never used itself.
        max_length: longest row in tokens with the special ones, or None for the tokeniser's own limit.

    Attributes:
        longest: that limit; None where there is none.
    """

    def __init__(self, tokenizer: Any, max_length: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._copies = ThreadCopies(tokenizer)
        self._max_length = max_length
        longest = tokenizer.model_max_length if max_length is None else max_length
        # The library writes "no limit" as 1e30.
        self.longest = int(longest) if longest < 1_000_000 else None
        self._pads_left = tokenizer.padding_side == "left"
        # Without a pad token any id will do: the attention mask hides it.
        self._pad_ids = {
            "input_ids": 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id),
            "token_type_ids": int(tokenizer.pad_token_type_id),
        }

    def rows(self, texts: Sequence[str]) -> list[TokenRow]:
        """One row per text with special tokens, without padding; a `Truncated` one where the text is too long."""
        if not texts:
            return []
        encoded = self._copies.mine()(
            list(texts),
            padding=False,
            truncation="longest_first",
            max_length=self._max_length,
            return_attention_mask=False,
        )
        names = [name for name in self._pad_ids if name in encoded]
        rows: list[TokenRow] = [
            {name: np.asarray(encoded[name][row], dtype=np.int32) for name in names} for row in range(len(texts))
        ]
        # What was cut off; only a tokeniser of the tokenizers library tells.
        for number, encoding in enumerate(encoded.encodings or ()):
            if len(encoding) == self.longest and _is_cut(encoding, texts[number]):
                rows[number] = Truncated(rows[number])
        return rows

    def padded(self, batch: Sequence[TokenRow], device: torch.device) -> dict[str, torch.Tensor]:
        """The batch as int64 tensors of shape (len(batch), longest row), with its `attention_mask`."""
        longest = max(len(row["input_ids"]) for row in batch)
        shape = (len(batch), longest)
        arrays = {name: np.full(shape, self._pad_ids[name], dtype=np.int64) for name in batch[0]}
        arrays["attention_mask"] = np.zeros(shape, dtype=np.int64)
        for number, row in enumerate(batch):
            length = len(row["input_ids"])
            span = slice(longest - length, longest) if self._pads_left else slice(0, length)
            for name, ids in row.items():
                arrays[name][number, span] = ids
            arrays["attention_mask"][number, span] = 1
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def _is_cut(encoding: Any, text: str) -> bool:
    """Whether a row of the greatest length lacks some of its text."""
    if len(text) <= OVERFLOW_CHARS_PER_TOKEN * len(encoding):
        return bool(encoding.overflowing)
    # Of a long text the list of what was cut off would be copied, some 100 bytes for each token.
    covered = [span for span in encoding.offsets if span != (0, 0)]
    first, last = min(start for start, _ in covered), max(end for _, end in covered)
    return bool(text[:first].strip() or text[last:].strip())


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
