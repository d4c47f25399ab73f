"""Late chunking: vectors of chunks from the states of one pass over their document, so that each knows the others.

A chunk's vector is the mean of the states of its own tokens, and goes through the modules that follow the pooling.
After Günther, Mohr, Williams, Wang, Xiao: "Late Chunking: Contextual Chunk Embeddings Using Long-Context Embedding
Models" (arXiv 2409.04701). Of a document that is longer than the model reads, windows are embedded that repeat the end
of the one before, and a chunk is pooled from one of them ("long late chunking" there).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from embq.core.errors import ModelError, SampleError
from embq.core.models import Chunking
from embq.core.units import Sample
from embq.sources.interface import Moved
from embq.worker.embedders.base import ChunkableEmbedder, Prepared
from embq.worker.embedders.sample_fields import no_panic
from embq.worker.embedders.text.flat_batch import TokenRow
from embq.worker.embedders.text.splitting import CHARS_PER_TOKEN, ChunkingEmbedder
from embq.worker.embedders.text.tokens import PerThread, Tokens

if TYPE_CHECKING:
    import torch

CONTEXT = 0.25
"""Part of a window that repeats the end of the one before it."""

MOST_TOKENS = 8_192
"""Tokens of a window of a model that reads any number."""


class Window:
    """A document, or a part of it, that is embedded in one pass.

    Attributes:
        row: its tokens, with those of the prompt and the special ones.
        starts, stops: the tokens of each of its chunks, `row[start:stop]`.
        vectors: of its chunks, shape (chunks, dim), once they have been computed: the others find them here.
    """

    __slots__ = ("row", "starts", "stops", "vectors")

    def __init__(self, row: TokenRow, starts: Sequence[int], stops: Sequence[int]) -> None:
        self.row = row
        self.starts, self.stops = starts, stops
        self.vectors: torch.Tensor | None = None


class LateChunk(NamedTuple):
    """A chunk that waits for its window: the chunk with this number in it."""

    window: Window
    number: int

    @property
    def length(self) -> int:
        """Its share of the tokens of the window: the same for all of them, so that they stay together."""
        return -(-len(self.window.row["input_ids"]) // len(self.window.starts))


@dataclass(slots=True, kw_only=True)
class LateSample(Sample):
    """A chunk with what `prepare` is to answer for it, which takes it out."""

    late: LateChunk | SampleError | None = None


def places_of_chunks(windows: Sequence[Window]) -> tuple[np.ndarray, np.ndarray]:
    """Places of the tokens of all chunks in windows one after the other, int64, and the tokens of each chunk, int32."""
    spans = []
    begin = 0
    for window in windows:
        spans += [(begin + start, begin + stop) for start, stop in zip(window.starts, window.stops, strict=True)]
        begin += len(window.row["input_ids"])
    places = np.concatenate([np.arange(start, stop) for start, stop in spans])
    return places, np.array([stop - start for start, stop in spans], dtype=np.int32)


@runtime_checkable
class PoolsChunks(ChunkableEmbedder, Protocol):
    """A model that gives vectors of `LateChunk`s, if they are in a batch in place of other prepared samples."""

    def windower(self) -> Windower:
        """Makes them; ModelError if the model cannot pool chunks."""
        ...


class LateChunkingEmbedder(ChunkingEmbedder):
    """A model whose samples are chunks of texts that are embedded whole."""

    def __init__(self, embedder: ChunkableEmbedder, chunking: Chunking, *, model: str) -> None:
        if not isinstance(embedder, PoolsChunks):
            raise no_late_chunks(model, "it is none of transformers or sentence-transformers")
        super().__init__(embedder, chunking)
        self._windower = embedder.windower()

    def chunks(self, sample: Sample, on_progress: Moved) -> list[Sample]:
        """See `embq.worker.embedders.base.HasChunks`."""
        pieces = super().chunks(sample, on_progress)
        spans = [(piece.passage.start, piece.passage.end) for piece in pieces if piece.passage is not None]
        late = self._windower.late_chunks(sample.text or "", spans, on_progress)
        with no_panic():
            return [
                LateSample(
                    ordinal=piece.ordinal,
                    key=piece.key,
                    text=piece.text,
                    metadata=piece.metadata,
                    passage=piece.passage,
                    late=chunk,
                )
                for piece, chunk in zip(pieces, late, strict=True)
            ]

    def prepare(self, samples: Sequence[Sample]) -> list[Prepared | SampleError]:
        """See `embq.worker.embedders.base.Embedder`: what `chunks` found for its samples; others are texts as usual."""
        answers: list[Prepared | SampleError] = []
        for sample in samples:
            if isinstance(sample, LateSample) and sample.late is not None:
                answers.append(sample.late)
                sample.late = None  # the sample stays until its row is written, and its window need not
            else:
                answers += self._embedder.prepare([sample])
        return answers


class Windower:
    """Makes the windows of documents. Safe to use from any thread.

    Args:
        tokens: the model's tokeniser, one of the tokenizers library.
        prompt: what the model puts before each text.
        model: the model's spec, for messages.
    """

    def __init__(self, tokens: Tokens, prompt: str, *, model: str) -> None:
        backend = tokens.backend
        if backend is None:
            raise no_late_chunks(model, "its tokeniser is none of the tokenizers library")
        backend = copy.deepcopy(backend)
        backend.no_truncation()
        self._copies = PerThread(backend)
        self._tokens = tokens
        self._prompt = prompt
        self._longest = tokens.longest or MOST_TOKENS

    def late_chunks(
        self, text: str, spans: Sequence[tuple[int, int]], on_progress: Moved
    ) -> Iterator[LateChunk | SampleError]:
        """One for each span of characters, in their order."""
        at = 0
        while at < len(spans):
            begin, stop, encoding = self._widest(text, spans, at)
            [row] = self._tokens.rows_of([encoding])
            if len(row["input_ids"]) > self._longest:
                yield SampleError("chunk_too_long", f"the chunk makes more than {self._longest} tokens")
                at += 1
                continue
            row_or_error = self._tokens.checked(row)
            yield from self._of_window(row_or_error, encoding, spans[at:stop], len(self._prompt) - begin)
            at = stop
            on_progress()

    def _widest(self, text: str, spans: Sequence[tuple[int, int]], at: int) -> tuple[int, int, Any]:
        """The window that begins with chunk `at`: (first character, chunk behind its last one, its encoding)."""
        first, reach = at, CHARS_PER_TOKEN * self._longest
        while first and spans[at][0] - spans[first - 1][0] <= CONTEXT * reach:
            first -= 1
        stop = at + 1
        while stop < len(spans) and spans[stop][1] - spans[first][0] <= reach:
            stop += 1
        while True:
            begin = spans[first][0]
            encoding = self._encode(self._prompt + text[begin : spans[stop - 1][1]])
            if len(encoding) <= self._longest or (stop - at == 1 and first == at):
                return begin, stop, encoding
            if stop - at > 1:
                stop = at + max(1, min(stop - at - 1, int((stop - at) * self._longest / len(encoding))))
            else:
                first = at

    def _encode(self, text: str) -> Any:
        backend = self._copies.mine()
        backend.encode_special_tokens = self._tokens.tokenizer.split_special_tokens  # which a copy forgets
        return backend.encode(text)

    @staticmethod
    def _of_window(
        row: TokenRow | SampleError, encoding: Any, spans: Sequence[tuple[int, int]], shift: int
    ) -> Iterator[LateChunk | SampleError]:
        """The chunks of a window whose text begins `shift` characters before that of the document."""
        if isinstance(row, SampleError):
            yield from [row] * len(spans)
            return
        offsets = np.array(encoding.offsets, dtype=np.int64)
        is_text = np.array(encoding.special_tokens_mask) == 0
        token_places = [
            np.flatnonzero(is_text & (offsets[:, 1] > start + shift) & (offsets[:, 0] < end + shift))
            for start, end in spans
        ]
        filled = [places for places in token_places if len(places)]
        window = Window(row, [int(places[0]) for places in filled], [int(places[-1]) + 1 for places in filled])
        number = 0
        for places in token_places:
            if not len(places):
                yield SampleError("empty_text", "the model's tokeniser finds no token in the chunk")
                continue
            yield LateChunk(window, number)
            number += 1


def no_late_chunks(model: str, why: str) -> ModelError:
    """The error for a model whose states cannot be pooled chunk by chunk."""
    return ModelError(
        f"{model} cannot pool chunks of a whole text: {why}",
        next_step="leave out --late-chunking, or use a model that pools by the mean, such as jina-embeddings-v3",
        code="no_chunks",
    )
