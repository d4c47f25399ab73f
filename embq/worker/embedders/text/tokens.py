"""Tokenisation on any thread, without padding, as batches are padded later; how long a model's texts may be."""

from __future__ import annotations

import copy
import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TokenizersBackend

from embq.core.errors import ModelError, SampleError
from embq.core.model_params import whole_number
from embq.core.models import ModelSpec
from embq.worker.embedders.base import Truncated
from embq.worker.embedders.sample_fields import no_panic
from embq.worker.embedders.text.flat_batch import TokenRow, flattened, padded

ONE_TOKEN: TokenRow = {"input_ids": np.zeros(1, dtype=np.int32)}
"""Embedded once, when a model has been loaded: whether it can, and how long its vectors are."""

PART_CHARS_PER_TOKEN = 100
"""Texts with more characters for each token that is read are tokenised in part first, and mostly in part alone."""

POSITION_TABLES = frozenset({"position_embeddings", "position_embedding", "embed_positions", "wpe"})
"""Attributes of transformers for the table of learned positions."""

NO_LIMIT = 1_000_000
"""Limits from here on are none: the library writes "no limit" as 1e30."""


class PerThread:
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


def unknown_token(token: int, vocabulary: int) -> SampleError:
    """The failure of a text of which the tokeniser makes a token that the model has no vector for."""
    message = f"the tokeniser makes token {token} of the text, and the model has {vocabulary}"
    return SampleError("unknown_token", message)


class Tokens:
    """A transformers tokeniser that any thread may use.

    Args:
        tokenizer: a `PreTrainedTokenizerBase`; copies of it are used.
        max_length: longest row in tokens with the special ones, or None for the tokeniser's own limit.
        vocabulary: how many ids the model has a vector for; None if that is not known.

    Attributes:
        longest: that limit; None if there is none.
        backend: the object of the tokenizers library that does all of it; None if there is none.
    """

    def __init__(self, tokenizer: Any, max_length: int | None = None, *, vocabulary: int | None = None) -> None:
        self.tokenizer = tokenizer
        limit = tokenizer.model_max_length if max_length is None else max_length
        self.longest = int(limit) if limit is not None and limit < NO_LIMIT else None
        self.backend = _backend(tokenizer, self.longest)
        self._copies = PerThread(tokenizer if self.backend is None else self.backend)
        self._max_length = max_length
        self._vocabulary = vocabulary
        # Without a pad token that the model knows any id will do: the attention mask hides it.
        pad_id = tokenizer.pad_token_id
        has_pad = pad_id is not None and (vocabulary is None or pad_id < vocabulary)
        self._pad_ids = {"input_ids": int(pad_id) if has_pad else 0}
        if "token_type_ids" in tokenizer.model_input_names:
            self._pad_ids["token_type_ids"] = int(tokenizer.pad_token_type_id)
        # They depend on the place in the template only, so one text of some tokens shows whether all are 0.
        self._is_typed = "token_type_ids" in self._pad_ids and any(tokenizer("a b c")["token_type_ids"])

    def cutting(self, side: str) -> Tokens:
        """The same tokeniser that cuts texts that are too long at their end on a side, "left" or "right"."""
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.truncation_side = side
        return Tokens(tokenizer, self._max_length, vocabulary=self._vocabulary)

    def rows(self, texts: Sequence[str]) -> list[TokenRow | SampleError]:
        """One row per text with special tokens, without padding; a `Truncated` one where the text is too long.

        In place of a row without a token SampleError `empty_text`, of one with an id that the model has no vector for
        SampleError `unknown_token`, of a text at which the tokeniser panics SampleError `not_tokenised`.
        """
        return _despite_panics(texts, self._rows)

    def _rows(self, texts: Sequence[str]) -> list[TokenRow | SampleError]:
        rows = self._by_library(texts) if self.backend is not None else self._by_wrapper(texts)
        return all_checked(rows, self._vocabulary)

    def _by_library(self, texts: Sequence[str]) -> list[TokenRow]:
        """Straight from the tokenizers library: the wrapper makes Python lists of five kinds for each row."""
        encoder = self._copies.mine()
        encoder.encode_special_tokens = self.tokenizer.split_special_tokens  # which a copy forgets
        encodings = encoder.encode_batch_fast([self._part(text) for text in texts])
        for place, text in enumerate(texts):
            if self._is_long(text) and len(encodings[place].overflowing) < 2:
                [encodings[place]] = encoder.encode_batch_fast([text])
        return [
            Truncated(row) if len(row["input_ids"]) == self.longest and encoding.overflowing else row
            for row, encoding in zip(self.rows_of(encodings), encodings, strict=True)
        ]

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
            if len(encoding) == self.longest and encoding.overflowing:
                rows[number] = Truncated(rows[number])
        return rows

    def rows_of(self, encodings: Sequence[Any]) -> list[TokenRow]:
        """The rows of what `backend` made of texts."""
        ids = int_arrays([encoding.ids for encoding in encodings])
        if not self._is_typed:
            return [{"input_ids": row} for row in ids]
        types = int_arrays([encoding.type_ids for encoding in encodings])
        return [{"input_ids": row, "token_type_ids": other} for row, other in zip(ids, types, strict=True)]

    def checked(self, row: TokenRow) -> TokenRow | SampleError:
        """The row, or why the model cannot embed it."""
        return checked(row, self._vocabulary)

    def _is_long(self, text: str) -> bool:
        return self.longest is not None and len(text) > PART_CHARS_PER_TOKEN * self.longest

    def _part(self, text: str) -> str:
        """The text, or so much of a long one, from the end that is kept, as most likely makes more than is read.

        `_by_library` uses it only if it makes over twice as many tokens: then the place where the text was cut, and
        where a token may be another one than in the whole text, is far from what is kept. Of a text of 10 MB the whole
        would take seconds, and some 100 bytes for each of its tokens.
        """
        if self.longest is None or not self._is_long(text):
            return text
        chars = PART_CHARS_PER_TOKEN * self.longest
        if self.tokenizer.truncation_side == "left":
            return (text[-chars:].split(maxsplit=1) or [text])[-1]
        return (text[:chars].rsplit(maxsplit=1) or [text])[0]

    def padded(self, batch: Sequence[TokenRow], device: torch.device) -> dict[str, torch.Tensor]:
        """The batch as int64 tensors of shape (len(batch), longest row) on a device, with its `attention_mask`.

        Always padded on the right, whatever the tokeniser says. The mask hides padding on either side alike, but on
        the left it would move the texts to other positions, and a text's vector would depend on the longest of its
        batch, wherever a model counts positions from the first column.
        """
        return padded(flattened(batch, device), self._pad_ids)


class TableTokens:
    """The tokeniser of a model that is a table of vectors, without special tokens or a limit. For any thread.

    Args:
        tokenizer: of the tokenizers library; copies of it are used.
        vocabulary: how many ids the model has a vector for.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._copies = PerThread(tokenizer)
        self._vocabulary = vocabulary

    def rows(self, texts: Sequence[str]) -> list[TokenRow | SampleError]:
        """See `Tokens.rows`."""
        return _despite_panics(texts, self._rows)

    def _rows(self, texts: Sequence[str]) -> list[TokenRow | SampleError]:
        encoded = self._copies.mine().encode_batch_fast(list(texts), add_special_tokens=False)
        return all_checked([{"input_ids": ids} for ids in int_arrays([row.ids for row in encoded])], self._vocabulary)


def _despite_panics(
    texts: Sequence[str], rows: Callable[[Sequence[str]], list[TokenRow | SampleError]]
) -> list[TokenRow | SampleError]:
    """`rows` of the texts, in halves if one of them makes the tokeniser panic, until that one is alone."""
    if not texts:
        return []
    try:
        with no_panic():
            return rows(texts)
    except SampleError as error:
        if len(texts) == 1:
            return [error.with_traceback(None)]
    middle = len(texts) // 2
    return _despite_panics(texts[:middle], rows) + _despite_panics(texts[middle:], rows)


def int_arrays(lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Lists of numbers as int32 arrays in one piece of memory.

    By struct, because numpy takes twice as long to read a list, and holds the interpreter's lock meanwhile.
    """
    ends = list(itertools.accumulate(map(len, lists)))
    numbers = np.frombuffer(bytearray().join([struct.pack(f"{len(row)}i", *row) for row in lists]), np.int32)
    return [numbers[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def all_checked(rows: Sequence[TokenRow], vocabulary: int | None) -> list[TokenRow | SampleError]:
    """The rows, or why the model cannot embed them; see `checked`."""
    ids = [row["input_ids"] for row in rows]
    if all(map(len, ids)) and (vocabulary is None or int(np.concatenate(ids).max()) < vocabulary):
        return list(rows)
    return [checked(row, vocabulary) for row in rows]


def checked(row: TokenRow, vocabulary: int | None) -> TokenRow | SampleError:
    """The row, or why a model with `vocabulary` vectors cannot embed it."""
    ids = row["input_ids"]
    if not len(ids):
        return SampleError("empty_text", "the model's tokeniser finds no token in the text")
    if vocabulary is not None and (most := int(ids.max())) >= vocabulary:
        return unknown_token(most, vocabulary)
    return row


def _backend(tokenizer: Any, limit: int | None) -> Any | None:
    """The tokenizers library's own object, as the wrapper would set it up; None if the wrapper does more than that.

    Args:
        limit: longest row in tokens; None for no limit.
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
    if limit is not None:
        backend.enable_truncation(limit, strategy="longest_first", direction=tokenizer.truncation_side)
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


def positions_held(trunk: Any) -> int | None:
    """Most tokens for which a table of positions has a row each; None if positions are computed, without a limit."""
    held = [
        module.num_embeddings - _rows_before_the_first(module)
        for name, module in trunk.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_TABLES
    ]
    return min(held, default=None)


def _rows_before_the_first(table: nn.Embedding) -> int:
    """RoBERTa's positions start after the padding index: 514 of them hold 512 tokens. BART's table says its offset."""
    offset = getattr(table, "offset", None)
    if isinstance(offset, int):
        return offset
    return 0 if table.padding_idx is None else table.padding_idx + 1


def tokens_held(trunk: Any) -> int | None:
    """Most tokens that a trunk was made for; None if it does not say. More than `positions_held` it cannot read."""
    held = positions_held(trunk)
    if held is not None:
        return held
    # XLNet says -1 for "no limit".
    declared = getattr(trunk.config, "max_position_embeddings", None)
    return declared if isinstance(declared, int) and declared > 0 else None


def asked_length(spec: ModelSpec, held: int | None) -> int | None:
    """The parameter `max_length`, or None without one; ModelError if the model does not hold as many tokens."""
    if not spec.param("max_length", ""):
        return None
    length = whole_number(spec, "max_length", held or 512)
    if held is not None and length > held:
        raise ModelError(f"{spec}: the model reads {held} tokens at most", next_step=f"use max_length={held} or less")
    return length


def reads_ids(trunk: Any) -> bool:
    """Whether a transformers model reads token ids, and not pixels or sounds, or those beside a text."""
    return getattr(trunk, "main_input_name", "") == "input_ids" and not hasattr(trunk.config, "vision_config")


def vocabulary_of(trunk: Any) -> int | None:
    """Vocabulary size of the model; None if it is unknown."""
    try:
        table = trunk.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return int(table.num_embeddings) if isinstance(table, nn.Embedding) else None
