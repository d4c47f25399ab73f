"""Splitting of long texts into chunks by a model's tokens, at borders of paragraphs, sentences and words.

`semantic-text-splitter` finds the borders. It gets one piece of a text after the other, so that a very long one shows
progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from embq.core.errors import ModelError, SampleError
from embq.core.models import Chunking
from embq.core.units import Passage, Sample, content_hash
from embq.sources.interface import Moved
from embq.worker.embedders.base import MAX_CHUNKS, ChunkableEmbedder, Prepared, Splitter
from embq.worker.embedders.sample_fields import no_panic, text_of

if TYPE_CHECKING:
    import numpy as np

LIBRARY = "semantic-text-splitter"

RULES = "pieces 1"
"""Its number goes up when the rules of this file cut the same text in another way."""

PIECE_CHARS = 16 * 1024
"""Characters that the library gets at once: 0.05 s of work; 1 s without words, and that grows with the square."""

PIECE_CHUNKS = 8
"""A piece holds at least this many chunks, at `CHARS_PER_TOKEN`: at the end of a piece one is cut twice."""

CHARS_PER_TOKEN = 4

LEAST_TOKENS = 8
"""A chunk has room for this many tokens of its own: no character makes more."""

Count = Callable[[Sequence[str]], Sequence[int]]
"""Number of tokens of each text as the model sees it, with special tokens and prompt, nothing cut off."""


class TokenSplitter:
    """Chunks of at most `chunking.tokens` tokens, special tokens and prompt included.

    Args:
        make: a splitter of the library from the most tokens of a chunk and of its overlap, both without special tokens.
        count: checks what comes out: the library adds up neither special tokens nor the prompt.
        extra: special tokens, and those of the prompt.
        longest: most tokens that the model reads; None for no limit.
        model: the model's spec, for messages.
    """

    def __init__(
        self,
        chunking: Chunking,
        make: Callable[[int, int], Any],
        count: Count,
        *,
        extra: int,
        longest: int | None,
        model: str,
    ) -> None:
        if longest is not None and chunking.tokens > longest:
            raise ModelError(
                f"{model} reads {longest} tokens at most, and chunks of {chunking.tokens} are asked for",
                next_step=f"use --chunk-tokens {longest} or less",
                code="chunks_too_long",
            )
        room = chunking.tokens - extra
        if room < max(LEAST_TOKENS, chunking.overlap + 1):
            raise ModelError(
                f"chunks of {chunking.tokens} tokens leave room for {max(0, room)} of the text: {extra} of {model} are "
                f"special tokens and prompt",
                next_step=f"use --chunk-tokens {extra + max(LEAST_TOKENS, 2 * chunking.overlap)} or more",
                code="chunks_too_short",
            )
        self.identity = [RULES, LIBRARY, version(LIBRARY)]
        self._tokens = chunking.tokens
        self._count = count
        self._splitter = make(room, chunking.overlap)
        self._piece_chars = max(PIECE_CHARS, PIECE_CHUNKS * CHARS_PER_TOKEN * chunking.tokens)

    def spans(self, text: str, on_progress: Moved) -> list[tuple[int, int]]:
        """See `Splitter`."""
        spans: list[tuple[int, int]] = []
        at = 0
        while at < len(text):
            piece = text[at : at + self._piece_chars]
            # The library and Python do not agree on every character that is white space.
            cut = [(at + start, chunk) for start, chunk in self._splitter.chunk_indices(piece) if chunk.strip()]
            is_last = at + len(piece) == len(text)
            at += len(piece)
            if not is_last and len(cut) > 1 and cut[-1][0] > cut[0][0]:
                # The last chunk ends where the piece does, and perhaps in the middle of a word: it is cut again.
                at = cut.pop()[0]
            spans += self._fitting(text, [_trimmed(text, start, start + len(chunk)) for start, chunk in cut])
            if len(spans) > MAX_CHUNKS:
                raise SampleError("too_many_chunks", f"the text has more than {MAX_CHUNKS:,} chunks")
            on_progress()
        return spans

    def _fitting(self, text: str, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The spans, in halves if one has more tokens than it may."""
        counts = self._count([text[start:end] for start, end in spans]) if spans else []
        for (start, end), count in zip(spans, counts, strict=True):
            if count <= self._tokens:
                yield start, end
                continue
            if end - start < 2:
                raise SampleError("chunk_too_long", f"the character at {start} makes more tokens than a chunk may have")
            middle = (start + end) // 2
            halves = [_trimmed(text, start, middle), _trimmed(text, middle, end)]
            yield from self._fitting(text, [half for half in halves if half[0] < half[1]])


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The span without white space at its ends."""
    chunk = text[start:end]
    return start + len(chunk) - len(chunk.lstrip()), max(start, end - len(chunk) + len(chunk.rstrip()))


class ChunkingEmbedder:
    """A model whose samples are chunks of texts; what decides where they are cut is part of its fingerprint."""

    def __init__(self, embedder: ChunkableEmbedder, chunking: Chunking) -> None:
        self._embedder = embedder
        self._splitter: Splitter = embedder.splitter(chunking)
        self.dims = embedder.dims
        self.batch_size = embedder.batch_size
        self.token_budget = embedder.token_budget
        self.cost = embedder.cost
        self.window = embedder.window
        self.fingerprint = content_hash([embedder.fingerprint, chunking.describe(), list(self._splitter.identity)])

    def prepare(self, samples: Sequence[Sample]) -> list[Prepared | SampleError]:
        """See `embq.worker.embedders.base.Embedder`; the model itself does it."""
        return self._embedder.prepare(samples)

    def length(self, prepared: Prepared) -> int:
        """See `embq.worker.embedders.base.Embedder`; the model itself does it."""
        return self._embedder.length(prepared)

    def embed(self, batch: Sequence[Prepared]) -> Mapping[str, np.ndarray]:
        """See `embq.worker.embedders.base.Embedder`; the model itself does it."""
        return self._embedder.embed(batch)

    def embed_in_fp32(self, batch: Sequence[Prepared]) -> Mapping[str, np.ndarray]:
        """See `embq.worker.embedders.base.Embedder`; the model itself does it."""
        return self._embedder.embed_in_fp32(batch)

    def chunks(self, sample: Sample, on_progress: Moved) -> list[Sample]:
        """See `embq.worker.embedders.base.HasChunks`."""
        if sample.error is not None:
            raise SampleError(*sample.error)
        text = text_of(sample)
        with no_panic():
            spans = self._splitter.spans(text, on_progress)
        if not spans:
            raise SampleError("empty_text", "the text has nothing that could be a chunk")
        chunks = []
        for number, (start, end) in enumerate(spans):
            passage = Passage(document=sample.key, number=number, count=len(spans), start=start, end=end)
            chunks.append(replace(sample, key=passage.key, text=text[start:end], passage=passage))
        return chunks


def backend_splitter(
    tokenizer: Any, chunking: Chunking, *, prompt: str, longest: int | None, model: str
) -> TokenSplitter:
    """A splitter for a transformers tokeniser; ModelError if it has no fast backend.

    Args:
        tokenizer: a `PreTrainedTokenizerBase`; it is copied.
        prompt: what the model puts before each text.
    """
    from semantic_text_splitter import TextSplitter
    from tokenizers import Tokenizer

    from embq.worker.embedders.text.tokens import PerThread

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise no_splitter(model, "its tokeniser is none of the tokenizers library")
    counting = Tokenizer.from_str(backend.to_str())
    counting.no_truncation()
    counting.no_padding()
    copies = PerThread(counting)

    def count(texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in copies.mine().encode_batch_fast([prompt + text for text in texts])]

    return TokenSplitter(
        chunking,
        lambda room, overlap: TextSplitter.from_huggingface_tokenizer(counting, room, overlap),
        count,
        extra=count([""])[0],
        longest=longest,
        model=model,
    )


def counted_splitter(
    count_one: Callable[[str], int], chunking: Chunking, *, extra: int, longest: int, model: str
) -> TokenSplitter:
    """A splitter for a tokeniser that only Python can ask: `count_one` counts a text's tokens without special ones."""
    from semantic_text_splitter import TextSplitter

    return TokenSplitter(
        chunking,
        lambda room, overlap: TextSplitter.from_callback(count_one, room, overlap),
        lambda texts: [count_one(text) + extra for text in texts],
        extra=extra,
        longest=longest,
        model=model,
    )


def no_splitter(model: str, why: str) -> ModelError:
    """The error for a model whose texts cannot be cut by its own tokens."""
    return ModelError(
        f"{model} cannot cut texts into chunks: {why}",
        next_step="cut the texts beforehand and leave out --chunk-tokens, or use another model",
        code="no_chunks",
    )
