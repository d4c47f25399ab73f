"""Tokenisers of open_clip models: its own, or one of transformers in its wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from open_clip.tokenizer import SimpleTokenizer, basic_clean, canonicalize_text
from transformers import PreTrainedTokenizerBase

from embq.core.models import Chunking
from embq.worker.embedders.text.splitting import TokenSplitter, counted_splitter, no_splitter
from embq.worker.embedders.text.tokens import PerThread, tokenizer_content, unknown_token

WORD_CACHE_MAX = 200_000
"""Words that a thread's tokeniser may remember; open_clip's cache has no bound, and a billion captions fill it."""


class ClipTokens:
    """Rows of token ids, and their numbers. Safe to share between threads.

    Args:
        tokenizer: what `open_clip.get_tokenizer` gives.
        vocabulary: how many ids the tower has a vector for; None where that is not known.
    """

    def __init__(self, tokenizer: Any, vocabulary: int | None) -> None:
        own = isinstance(tokenizer, SimpleTokenizer)  # writes to its cache of words alone
        self._copies = PerThread(tokenizer, (tokenizer.encoder, tokenizer.decoder, tokenizer.bpe_ranks) if own else ())
        self._vocabulary = vocabulary

    def row(self, text: str) -> torch.Tensor:
        """Token ids of a text as the tower reads them: int64 (context,), cut off or padded.

        Raises SampleError `unknown_token` for an id that the tower has no vector for.
        """
        row: torch.Tensor = self._tokenizer()([text])[0]
        if self._vocabulary is not None and (most := int(row.max())) >= self._vocabulary:
            raise unknown_token(most, self._vocabulary)
        return row

    def is_cut(self, text: str, row: torch.Tensor) -> bool:
        """Whether a text has more tokens than its row."""
        # Counted again only where the row is full: padding is the same token over and over.
        return bool(row[-1] != row[-2]) and self.count(text) > len(row)

    def count(self, text: str) -> int:
        """Tokens of a text with the special ones, nothing cut off; 0 where that cannot be told."""
        tokenizer = self._tokenizer()
        if isinstance(tokenizer, SimpleTokenizer):
            return len(tokenizer.encode(text)) + 2
        inner = _inner_of(tokenizer)
        return 0 if inner is None else len(inner(_cleaned(tokenizer, text)).input_ids)

    def splitter(self, chunking: Chunking, model: str) -> TokenSplitter:
        """The splitter of a model by these tokens; ModelError where they cannot be counted."""
        tokenizer = self._copies.mine()
        if _inner_of(tokenizer) is None and not isinstance(tokenizer, SimpleTokenizer):
            raise no_splitter(model, f"the tokens of its {type(tokenizer).__name__} cannot be counted")
        special = self.count("")
        return counted_splitter(
            lambda text: self.count(text) - special,
            chunking,
            extra=special,
            longest=int(tokenizer.context_length),
            model=model,
        )

    def _tokenizer(self) -> Any:
        tokenizer = self._copies.mine()
        if isinstance(tokenizer, SimpleTokenizer) and len(tokenizer.cache) > WORD_CACHE_MAX:
            tokenizer.cache = {word: word for word in ("<start_of_text>", "<end_of_text>")}
        return tokenizer


def clip_tokenizer_content(tokenizer: Any) -> dict[str, Any]:
    """Settings that decide a tokeniser's output, for the fingerprint."""
    if isinstance(tokenizer, SimpleTokenizer):
        return {
            "vocabulary": sorted(tokenizer.encoder.items()),
            "merges": sorted((" ".join(pair), rank) for pair, rank in tokenizer.bpe_ranks.items()),
            "clean": tokenizer.clean_fn.__name__,
            "context": tokenizer.context_length,
        }
    inner = getattr(tokenizer, "tokenizer", None)
    return {
        "class": type(tokenizer).__name__,
        "context": tokenizer.context_length,
        "clean": getattr(getattr(tokenizer, "clean_fn", None), "__name__", ""),
        "inner": {} if inner is None else tokenizer_content(inner),
    }


def _inner_of(tokenizer: Any) -> Any:
    """The transformers tokeniser in one of open_clip's wrappers, or None."""
    inner = getattr(tokenizer, "tokenizer", None)
    return inner if isinstance(inner, PreTrainedTokenizerBase) else None


def _cleaned(tokenizer: Any, text: str) -> str:
    """A text as open_clip's wrapper gives it to the tokeniser in it."""
    clean: Callable[[str], str] | None = getattr(tokenizer, "clean_fn", None)
    return canonicalize_text(basic_clean(text)) if clean is None else clean(text)
