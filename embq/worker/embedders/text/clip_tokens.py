"""Tokenisers of open_clip models: its own, or one of transformers in its wrapper."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from open_clip.tokenizer import SimpleTokenizer, basic_clean, canonicalize_text, get_clean_fn
from transformers import PreTrainedTokenizerBase

from embq.core.models import Chunking
from embq.worker.embedders.sample_fields import no_panic
from embq.worker.embedders.text.splitting import TokenSplitter, counted_splitter, no_splitter
from embq.worker.embedders.text.tokens import PerThread, tokenizer_content, unknown_token

WORD_CACHE_MAX, WORD_MAX_CHARS = 200_000, 64
"""Words that a tokeniser may remember, and the longest of them."""


class WordIds:
    """Token ids of open_clip's own tokeniser by a cache of words: the same ids, ten times as fast. Thread-safe.

    Its pattern matches no white space and looks at nothing beside a match, so the ids of a cleaned text are those of
    its words, one after the other. Cleaning leaves a text alone, but for white space and case, that is printable ASCII
    without an entity; all other texts go through it.
    """

    def __init__(self, tokenizer: SimpleTokenizer) -> None:
        self.tokenizer = tokenizer
        self._clean = _WITHOUT_REPAIRS[tokenizer.clean_fn]
        self._words: dict[str, tuple[int, ...]] = {}
        self._special = {name: name for name in map(tokenizer.decoder.__getitem__, tokenizer.all_special_ids)}
        self._learning = threading.Lock()  # the tokeniser looks twice into a cache that is replaced here

    def of(self, text: str) -> list[int]:
        """The ids of a text, without the special ones."""
        is_plain = text.isascii() and text.isprintable() and "&" not in text
        words = self._words
        ids: list[int] = []
        for word in (self._clean(text) if is_plain else self.tokenizer.clean_fn(text)).split(" "):
            cached = words.get(word)
            ids += cached if cached is not None else self._learn(word)
        return ids

    def row(self, text: str) -> tuple[np.ndarray, bool]:
        """(the ids of a text as the tower reads them: int64 (context,), cut off or padded with zeros; whether cut)."""
        tokenizer = self.tokenizer
        row = np.zeros(tokenizer.context_length, np.int64)
        tokens = self.of(text)
        ids = [tokenizer.sot_token_id, *tokens[: len(row) - 2], tokenizer.eot_token_id]
        row[: len(ids)] = ids
        return row, len(tokens) + 2 > len(row)

    def _learn(self, word: str) -> tuple[int, ...]:
        tokenizer = self.tokenizer
        ids: list[int] = []
        with self._learning:
            for piece in tokenizer.pat.findall(word):
                letters = "".join(tokenizer.byte_encoder[byte] for byte in piece.encode())
                ids += (tokenizer.encoder[token] for token in tokenizer.bpe(letters).split(" "))
            learned = tuple(ids)
            # Words of a billion captions, or a few of a megabyte, would fill the memory.
            is_long = len(word) > WORD_MAX_CHARS
            if is_long or len(tokenizer.cache) > WORD_CACHE_MAX:
                tokenizer.cache = dict(self._special)
            if not is_long:
                if len(self._words) >= WORD_CACHE_MAX:
                    self._words.clear()
                self._words[word] = learned
        return learned


_WITHOUT_REPAIRS: dict[Callable[[str], str], Callable[[str], str]] = {
    get_clean_fn("lower"): lambda text: " ".join(text.split()).lower(),
    get_clean_fn("whitespace"): lambda text: " ".join(text.split()),
    get_clean_fn("canonicalize"): lambda text: canonicalize_text(text.strip()),
}
"""open_clip's functions that clean a text -> the same without ftfy and HTML entities, for texts that have neither."""


class ClipTokens:
    """Rows of token ids, and their numbers. Safe to share between threads.

    Args:
        tokenizer: what `open_clip.get_tokenizer` returns.
        vocabulary: how many ids the tower has a vector for; None if that is not known.
    """

    def __init__(self, tokenizer: Any, vocabulary: int | None) -> None:
        own = isinstance(tokenizer, SimpleTokenizer) and tokenizer.reduction_fn is None
        self._words = WordIds(tokenizer) if own and tokenizer.clean_fn in _WITHOUT_REPAIRS else None
        self._copies = PerThread(tokenizer)
        # Most tokenisers have no id that their tower lacks.
        is_known = self._words is not None and vocabulary is not None and tokenizer.vocab_size <= vocabulary
        self._vocabulary = None if is_known else vocabulary

    def row(self, text: str) -> tuple[np.ndarray, bool]:
        """(token ids of a text as the tower reads them: int64 (context,), cut off or padded; whether it has more).

        Raises SampleError `unknown_token` for an id that the tower has no vector for, `not_tokenised` for none at all.
        """
        if self._words is not None:
            row, is_cut = self._words.row(text)
        else:
            with no_panic():
                row = self._copies.mine()([text])[0].numpy()
            # Counted again only if the row is full: padding is the same token over and over.
            is_cut = bool(row[-1] != row[-2]) and self.count(text) > len(row)
        if self._vocabulary is not None and (most := int(row.max())) >= self._vocabulary:
            raise unknown_token(most, self._vocabulary)
        return row, is_cut

    def count(self, text: str) -> int:
        """Tokens of a text with the special ones, nothing cut off; 0 if that is unknown."""
        if self._words is not None:
            return len(self._words.of(text)) + 2
        tokenizer = self._copies.mine()
        if isinstance(tokenizer, SimpleTokenizer):
            return len(tokenizer.encode(text)) + 2
        inner = _inner_of(tokenizer)
        return 0 if inner is None else len(inner(_cleaned(tokenizer, text)).input_ids)

    def splitter(self, chunking: Chunking, model: str) -> TokenSplitter:
        """The splitter of a model by these tokens; ModelError if they cannot be counted."""
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
    """A text as open_clip's wrapper passes it to the tokeniser in it."""
    clean: Callable[[str], str] | None = getattr(tokenizer, "clean_fn", None)
    return canonicalize_text(basic_clean(text)) if clean is None else clean(text)
