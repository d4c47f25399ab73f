"""Texts get the vectors of sentence-transformers, whatever the model is made of, and whichever batches they are in.

The models are tiny, with random weights, and are saved and loaded as large ones are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embq.core.errors import ModelError, SampleError
from embq.core.models import Chunking, ModelConfig
from embq.core.rows.spec import RowSpec
from embq.core.rows.vectors import restored, stored
from embq.core.units import Sample
from embq.worker.embedders.base import Embedder, Truncated
from embq.worker.embedders.registry import load
from tests.support.lazy import lazy
from tests.support.models.text import (
    CORPUS,
    POSITIONS,
    TRUNKS,
    WIDTH,
    bytes_pieces,
    save_sentence_model,
    save_trunk,
    sentence_pieces,
    word_pieces,
)

sentence_transformers = lazy("sentence_transformers")
st = lazy("sentence_transformers.sentence_transformer.modules")
torch = lazy("torch")


TEXTS = (
    "a",
    ".",
    " \t leading and trailing \n",
    "\u200b!",
    "NUL \0 in the middle",
    "The quick brown fox jumps over the lazy dog.",
    "emoji 🙂🚀👩\u200d👩\u200d👧 and flags 🇺🇳",
    "Straße, русский текст, 漢字かな交じり文, العربية, עברית, हिन्दी",
    "e\u0301 is é",
    CORPUS[0],
    "the text goes on and on " * 4_200,
)
"""Nearly empty ones, one token, mixed scripts, and 100,000 characters; `edges` are as long as the model reads."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models as tiny as these spend more on handing work to threads than on the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trunks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> folder of its tiny trunk."""
    root = tmp_path_factory.mktemp("trunks")

    def folder(family: str) -> Path:
        return root / family if (root / family).exists() else save_trunk(root / family, family, seed=1)

    return folder


def reference(folder: Path) -> sentence_transformers.SentenceTransformer:
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    if model.tokenizer is not None and getattr(model.tokenizer, "pad_token", "") is None:
        model.tokenizer.pad_token = model.tokenizer.eos_token
    return model


def loaded(spec: str) -> Embedder:
    return load(ModelConfig(spec=spec, modalities=("text",), precision="fp32"), "cpu")


def vectors_of(embedder: Embedder, texts: Sequence[str], *, batch: int = 4) -> np.ndarray:
    """The vectors of texts that are embedded in another order, `batch` at a time."""
    order = np.random.default_rng(len(texts)).permutation(len(texts))
    prepared = embedder.prepare([Sample(ordinal=n, key=str(n), text=texts[index]) for n, index in enumerate(order)])
    assert not [answer for answer in prepared if isinstance(answer, SampleError)]
    parts = [embedder.embed(prepared[at : at + batch])["text"] for at in range(0, len(prepared), batch)]
    rows = np.concatenate(parts)
    return rows[np.argsort(order)]


def edges(model: sentence_transformers.SentenceTransformer) -> list[str]:
    """Texts of exactly as many tokens as the model reads, and of one more."""
    found = []
    for tokens in (POSITIONS, POSITIONS + 1):
        text = " ".join(["the"] * tokens)
        while len(model.tokenizer(text, truncation=False, verbose=False)["input_ids"]) > tokens:
            text = text.removesuffix(" the")
        assert len(model.tokenizer(text, truncation=False, verbose=False)["input_ids"]) == tokens
        found.append(text)
    return found


def assert_equal(rows: np.ndarray, expected: np.ndarray) -> None:
    """Within what the order of float32 sums changes; and the texts' vectors differ from one another by far more."""
    assert rows.shape == expected.shape
    assert rows.dtype == np.float32
    assert float(np.abs(rows - expected).max()) <= 1e-5 * max(1.0, float(np.abs(expected).max()))
    left, right = rows.astype(np.float64), expected.astype(np.float64)
    cosines = (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
    assert cosines.min() >= 0.999999
    assert np.abs(expected - expected.mean(0)).max(1).min() > 1e-3


# --- families of architectures ---


@pytest.mark.parametrize("family", TRUNKS)
def test_every_family_gets_the_vectors_of_sentence_transformers(
    family: str, trunks: Callable[[str], Path], events: pytest.LogCaptureFixture
) -> None:
    folder = trunks(family)
    model = reference(folder)
    [pooling] = [part.pooling_mode for part in model if isinstance(part, st.Pooling)]
    texts = [*TEXTS, *edges(model)]
    expected = model.encode(texts, batch_size=3, show_progress_bar=False)
    sentence, encoder = loaded(f"st:{folder}"), loaded(f"hf:{folder}?pooling={pooling}")
    assert f"pooling_assumed model=st:{folder} pooling={pooling}" in events.text
    for embedder in (sentence, encoder):
        assert_equal(vectors_of(embedder, texts), expected)
        cut = [isinstance(row, Truncated) for row in embedder.prepare(samples(texts))]
        lengths = [len(ids) for ids in model.tokenizer(texts, truncation=False, verbose=False)["input_ids"]]
        assert cut == [length > POSITIONS for length in lengths]
        assert sum(cut) >= 2
    for batch in (1, len(texts)):
        assert_equal(vectors_of(sentence, texts, batch=batch), expected)


def samples(texts: Sequence[str]) -> list[Sample]:
    return [Sample(ordinal=n, key=str(n), text=text) for n, text in enumerate(texts)]


@pytest.mark.parametrize("family", ["bert", "qwen2", "gpt2"])
def test_a_tokeniser_that_pads_on_the_left_gives_each_text_the_vector_that_it_has_alone(
    family: str, tmp_path: Path
) -> None:
    tokenizer = word_pieces(padding_side="left") if family == "bert" else bytes_pieces(padding_side="left")
    folder = save_trunk(tmp_path / family, family, tokenizer=tokenizer)
    model = reference(folder)
    expected = model.encode(list(TEXTS), batch_size=1, show_progress_bar=False)
    pooling = next(part.pooling_mode for part in model if isinstance(part, st.Pooling))
    for spec in (f"st:{folder}", f"hf:{folder}?pooling={pooling}"):
        assert_equal(vectors_of(loaded(spec), TEXTS), expected)


# --- modules ---

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@pytest.mark.parametrize("pooling", [*POOLINGS, ("lasttoken", "mean", "cls"), ("max", "mean_sqrt_len_tokens")])
def test_every_pooling_and_every_order_of_several_is_that_of_sentence_transformers(
    pooling: str | tuple[str, ...], trunks: Callable[[str], Path], tmp_path: Path
) -> None:
    trunk = trunks("bert")
    folder = save_sentence_model(tmp_path / "model", [st.Transformer(str(trunk)), st.Pooling(WIDTH, pooling)])
    expected = reference(folder).encode(list(TEXTS), batch_size=3, show_progress_bar=False)
    names = pooling if isinstance(pooling, str) else "+".join(pooling)
    assert expected.shape[1] == WIDTH * len(names.split("+"))
    for spec in (f"st:{folder}", f"hf:{trunk}?pooling={names}"):
        assert_equal(vectors_of(loaded(spec), TEXTS), expected)


def test_poolings_that_old_files_switch_on_come_in_the_order_of_sentence_transformers(
    trunks: Callable[[str], Path], tmp_path: Path
) -> None:
    trunk = trunks("bert")
    folder = save_sentence_model(tmp_path / "model", [st.Transformer(str(trunk)), st.Pooling(WIDTH)])
    switches = {
        "word_embedding_dimension": WIDTH,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_cls_token": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_lasttoken": True,
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(switches))
    expected = reference(folder).encode(list(TEXTS), show_progress_bar=False)
    assert_equal(vectors_of(loaded(f"st:{folder}"), TEXTS), expected)
    assert_equal(vectors_of(loaded(f"hf:{trunk}?pooling=cls+mean+last"), TEXTS), expected)


def _dense(**options: Any) -> list[Any]:
    return [st.Pooling(WIDTH), st.Dense(WIDTH, 20, **options)]


def _words() -> st.WordEmbeddings:
    vocabulary = sorted({word for line in CORPUS for word in line.split()})
    weights = torch.randn(len(vocabulary), WIDTH).numpy()
    return st.WordEmbeddings(st.tokenizer.WhitespaceTokenizer(vocabulary, stop_words=[], do_lower_case=True), weights)


WORDY = ("the quick brown fox", "over the lazy dog", "return the base two", "the text is computed")
"""Texts of four known words each: a CNN reads the padding, also in sentence-transformers."""

MODULES: dict[str, Callable[[Path], Sequence[Any]]] = {
    "dense with tanh": lambda trunk: [st.Transformer(str(trunk)), *_dense()],
    "dense without activation": lambda trunk: [st.Transformer(str(trunk)), *_dense(activation_function=None)],
    "dense with gelu, without bias": lambda trunk: [
        st.Transformer(str(trunk)),
        *_dense(activation_function=torch.nn.GELU(), bias=False),
    ],
    "two dense and normalize": lambda trunk: [
        st.Transformer(str(trunk)),
        *_dense(activation_function=None),
        st.Dense(20, 48, activation_function=torch.nn.ReLU()),
        st.Normalize(),
    ],
    "dense over tokens": lambda trunk: [
        st.Transformer(str(trunk)),
        st.Dense(WIDTH, 16, module_input_name="token_embeddings"),
        st.Pooling(16, "max"),
    ],
    "layer norm": lambda trunk: [st.Transformer(str(trunk)), st.Pooling(WIDTH), st.LayerNorm(WIDTH)],
    "dropout": lambda trunk: [st.Transformer(str(trunk)), st.Pooling(WIDTH, "cls"), st.Dropout(0.5), st.Normalize()],
    "weighted layers": lambda trunk: [
        st.Transformer(str(trunk), config_kwargs={"output_hidden_states": True}),
        st.WeightedLayerPooling(WIDTH, num_hidden_layers=2, layer_start=1),
        st.Pooling(WIDTH),
    ],
    "lower case": lambda trunk: [st.Transformer(str(trunk), do_lower_case=True), st.Pooling(WIDTH)],
    "short": lambda trunk: [st.Transformer(str(trunk), max_seq_length=9), st.Pooling(WIDTH)],
    "routes": lambda trunk: [
        st.Transformer(str(trunk)),
        st.Pooling(WIDTH),
        st.Router({"query": [st.Dense(WIDTH, 8)], "document": [st.Normalize()]}, default_route="query"),
    ],
    "routes first": lambda trunk: [
        st.Router.for_query_document(
            [st.Transformer(str(trunk)), st.Pooling(WIDTH)],
            [st.Transformer(str(trunk)), st.Pooling(WIDTH, "max")],
            default_route="document",
        ),
        st.Normalize(),
    ],
    "words and lstm": lambda trunk: [_words(), st.LSTM(WIDTH, 12), st.Pooling(24)],
    "words and cnn": lambda trunk: [_words(), st.CNN(WIDTH, 8), st.Pooling(24, "max")],
    "weighted words": lambda trunk: [
        words := _words(),
        st.WordWeights(words.tokenizer.get_vocab(), {"fox": 3.0, "the": 0.1}),
        st.Pooling(WIDTH),
    ],
    "static": lambda trunk: [st.StaticEmbedding(word_pieces().backend_tokenizer, embedding_dim=WIDTH)],
}


@pytest.mark.parametrize("kind", MODULES)
def test_every_kind_of_module_is_applied_in_its_place(kind: str, trunks: Callable[[str], Path], tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        folder = save_sentence_model(tmp_path / "model", MODULES[kind](trunks("bert")))
    texts = TEXTS if "words" not in kind else WORDY
    expected = reference(folder).encode(list(texts), batch_size=3, show_progress_bar=False)
    assert_equal(vectors_of(loaded(f"st:{folder}"), texts), expected)


def test_a_table_of_vectors_has_its_texts_tokenised_on_threads(tmp_path: Path) -> None:
    """Given a prompt, and a text without a token, then the one is counted and the other is a failure."""
    model = [st.StaticEmbedding(word_pieces(unk_token=None).backend_tokenizer, embedding_dim=WIDTH), st.Normalize()]
    folder = save_sentence_model(tmp_path / "model", model, prompts={"query": "the fox: "}, default_prompt_name="query")
    embedder = loaded(f"st:{folder}")
    assert_equal(vectors_of(embedder, TEXTS), reference(folder).encode(list(TEXTS), show_progress_bar=False))
    plain = loaded(f"st:{folder}?prompt=")
    rows = plain.prepare([Sample(ordinal=n, key=str(n), text=text) for n, text in enumerate(("fox the fox", "\u0301"))])
    assert rows[0]["input_ids"].dtype == np.int32
    assert isinstance(rows[1], SampleError)
    assert rows[1].code == "empty_text"


def test_a_bag_of_words_is_one(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path / "model", [st.BoW(["fox", "the", "text"], {"fox": 2.5})])
    texts = ["the fox", "the text of the fox", "text"]
    expected = reference(folder).encode(texts, show_progress_bar=False)
    np.testing.assert_allclose(vectors_of(loaded(f"st:{folder}"), texts), expected, atol=1e-6)


# --- prompts ---

PROMPTS = {"query": "query: ", "passage": "passage: ", "clustering": "sort: "}


@pytest.fixture(scope="module")
def prompted(trunks: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with prompts that are not pooled, and one of them by default."""
    modules = [st.Transformer(str(trunks("bert"))), st.Pooling(WIDTH, ("mean", "weightedmean"), include_prompt=False)]
    folder = tmp_path_factory.mktemp("prompted") / "model"
    return save_sentence_model(folder, modules, prompts=PROMPTS, default_prompt_name="clustering")


@pytest.mark.parametrize(
    ("query", "method", "options"),
    [
        ("", "encode", {}),
        ("?prompt_name=query", "encode_query", {}),
        ("?prompt_name=document", "encode_document", {}),
        ("?prompt_name=passage", "encode", {"prompt_name": "passage"}),
        ("?prompt=Instruct:%20a%26b%2B", "encode", {"prompt": "Instruct: a&b+"}),
        ("?prompt=", "encode", {"prompt": ""}),
    ],
    ids=["default", "query", "document", "name", "text", "none"],
)
def test_prompts_are_chosen_as_sentence_transformers_chooses_them(
    query: str, method: str, options: dict[str, str], prompted: Path
) -> None:
    expected = getattr(reference(prompted), method)(list(TEXTS), show_progress_bar=False, **options)
    assert_equal(vectors_of(loaded(f"st:{prompted}{query}"), TEXTS), expected)


def test_a_prompt_is_part_of_the_fingerprint_and_so_is_a_length(prompted: Path, trunks: Callable[[str], Path]) -> None:
    queries = ("", "?prompt_name=query", "?prompt_name=passage", "?prompt=query:%20%20", "?prompt=", "?max_length=9")
    assert len({loaded(f"st:{prompted}{query}").fingerprint for query in queries}) == len(queries)
    assert loaded(f"st:{prompted}?max_length={POSITIONS}").fingerprint == loaded(f"st:{prompted}").fingerprint
    encoder = f"hf:{trunks('bert')}"
    found = {loaded(encoder + query).fingerprint for query in ("", "?prompt=a", "?prompt=b", "?max_length=9")}
    assert len(found) == 4
    assert loaded(encoder + "?prompt=").fingerprint in found


@pytest.mark.parametrize("task", ["query", "document"])
@pytest.mark.parametrize("kind", ["routes", "routes first"])
def test_a_prompt_for_queries_or_documents_takes_their_route(
    kind: str, task: str, trunks: Callable[[str], Path], tmp_path: Path
) -> None:
    modules = MODULES[kind](trunks("bert"))
    folder = save_sentence_model(tmp_path / "model", modules, prompts={"query": "query: "})
    encode = {
        "query": sentence_transformers.SentenceTransformer.encode_query,
        "document": sentence_transformers.SentenceTransformer.encode_document,
    }[task]
    expected = encode(reference(folder), list(TEXTS), show_progress_bar=False)
    assert_equal(vectors_of(loaded(f"st:{folder}?prompt_name={task}"), TEXTS), expected)


def test_a_prompt_that_the_model_does_not_have_is_refused_with_those_that_it_has(prompted: Path) -> None:
    with pytest.raises(ModelError) as caught:
        loaded(f"st:{prompted}?prompt_name=summary")
    assert "no prompt 'summary'" in caught.value.message
    assert "clustering, document, passage, query" in caught.value.next_step
    with pytest.raises(ModelError, match="names a prompt and gives another"):
        loaded(f"st:{prompted}?prompt_name=query&prompt=x")


def test_an_empty_prompt_beside_one_with_a_text_is_told_of(prompted: Path, events: pytest.LogCaptureFixture) -> None:
    # encode_document takes the model's "document", which is empty where the files have none, and not "passage".
    loaded(f"st:{prompted}?prompt_name=document")
    assert "prompt_is_empty" in events.text
    assert "clustering,passage,query" in events.text


def test_an_encoder_may_have_a_prompt_and_its_chunks_leave_room_for_it(trunks: Callable[[str], Path]) -> None:
    folder = trunks("bert")
    expected = reference(folder).encode(list(TEXTS), prompt="query: ", show_progress_bar=False)
    assert_equal(vectors_of(loaded(f"hf:{folder}?prompt=query:%20"), TEXTS), expected)
    long = f"hf:{folder}?prompt={'fox%20' * 20}"
    config = ModelConfig(spec=long, modalities=("text",), precision="fp32", chunking=Chunking(tokens=24))
    with pytest.raises(ModelError, match="special tokens and prompt"):
        load(config, "cpu")


# --- lengths and sizes ---


def test_a_length_that_is_asked_for_is_that_of_sentence_transformers(trunks: Callable[[str], Path]) -> None:
    for family in ("bert", "xlm-roberta", "t5", "qwen2"):
        folder = trunks(family)
        model = reference(folder)
        model.max_seq_length = 12
        expected = model.encode(list(TEXTS), batch_size=3, show_progress_bar=False)
        assert_equal(vectors_of(loaded(f"st:{folder}?max_length=12"), TEXTS), expected)


@pytest.mark.parametrize("family", ["bert", "distilbert", "mpnet", "xlm-roberta", "modernbert", "qwen2", "gpt2"])
@pytest.mark.parametrize("kind", ["st", "hf"])
def test_a_length_beyond_the_positions_is_refused(kind: str, family: str, trunks: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=f"reads {POSITIONS} tokens at most") as caught:
        loaded(f"{kind}:{trunks(family)}?max_length={POSITIONS + 1}")
    assert f"max_length={POSITIONS} or less" in caught.value.next_step


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_files_that_say_more_than_the_positions_hold_are_limited_where_sentence_transformers_fails(
    family: str, trunks: Callable[[str], Path], tmp_path: Path, events: pytest.LogCaptureFixture
) -> None:
    folder = save_sentence_model(tmp_path / "model", [st.Transformer(str(trunks(family))), st.Pooling(WIDTH)])
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": POSITIONS + 2}))
    model = reference(folder)
    assert model.max_seq_length == POSITIONS + 2
    too_long, short = "the " * 200, "the quick brown fox"
    with pytest.raises((IndexError, RuntimeError)):
        model.encode([too_long], show_progress_bar=False)
    rows = vectors_of(loaded(f"st:{folder}"), [too_long, short])
    assert f"length_limited model=st:{folder} told={POSITIONS + 2} to={POSITIONS}" in events.text
    model.max_seq_length = POSITIONS
    assert_equal(rows, model.encode([too_long, short], show_progress_bar=False))


def test_the_dimension_that_the_files_say_is_what_is_kept(trunks: Callable[[str], Path], tmp_path: Path) -> None:
    modules = [st.Transformer(str(trunks("bert"))), st.Pooling(WIDTH), st.Normalize()]
    folder = save_sentence_model(tmp_path / "model", modules, truncate_dim=8)
    expected = reference(folder).encode(list(TEXTS), show_progress_bar=False)
    assert expected.shape[1] == 8
    assert_equal(vectors_of(loaded(f"st:{folder}"), TEXTS), expected)


@pytest.mark.parametrize("scale", [0.05, 0.3, 2.0])
def test_stored_codes_are_those_of_sentence_transformers_or_differ_as_documented(scale: float) -> None:
    random = np.random.default_rng(0)
    rows = (random.standard_normal((500, 64)) * scale / 3).astype(np.float32)
    rows[0, :4], limit = [0.0, -0.0, scale, -scale], np.float32(scale)
    bits, _ = stored(rows, RowSpec(dtype="binary"))
    np.testing.assert_array_equal(bits, sentence_transformers.util.quantize_embeddings(rows, precision="ubinary"))

    spec = RowSpec(dtype="int8", normalize=False, int8_range=scale)
    codes, _ = stored(rows, spec)
    ranges = np.stack([np.full(64, -limit), np.full(64, limit)])
    theirs = sentence_transformers.util.quantize_embeddings(rows, precision="int8", ranges=ranges)
    apart = codes.astype(int) - theirs.astype(int)
    assert set(np.unique(apart)) == {0, 1, 2}
    assert codes[0, :4].tolist() == [0, 0, 127, -127]
    assert theirs[0, :2].tolist() == [-1, -1]
    # Half a step, where rounding down and a range of 256 codes are up to a whole one off.
    within = np.clip(rows, -limit, limit)
    assert np.abs(restored(codes, spec) - within).max() <= scale / 254 * 1.001
    assert np.abs((theirs.astype(np.float32) + 128) * (2 * limit / 255) - limit - within).max() > scale / 254 * 1.5


# --- what no model can read ---


def test_a_text_without_a_token_is_a_failure(tmp_path: Path) -> None:
    # Its tokeniser drops control characters, and puts nothing before or after a text.
    tokenizer = word_pieces()
    tokenizer.backend_tokenizer.post_processor = None
    folder = save_trunk(tmp_path / "bert", "bert", tokenizer=tokenizer)
    for kind in ("st", "hf"):
        good, nothing = loaded(f"{kind}:{folder}").prepare(samples(["fox", "\0\x01"]))
        assert not isinstance(good, SampleError)
        assert isinstance(nothing, SampleError)
        assert nothing.code == "empty_text"


def test_a_token_that_the_model_has_no_vector_for_fails_its_text_alone(tmp_path: Path) -> None:
    tokenizer = word_pieces()
    tokenizer.add_tokens(["zebra"])
    folder = save_trunk(tmp_path / "bert", "bert", tokenizer=tokenizer)
    for kind in ("st", "hf"):
        embedder = loaded(f"{kind}:{folder}")
        good, beyond, _ = embedder.prepare(samples(["fox", "a zebra", "fox"]))
        assert isinstance(beyond, SampleError)
        assert beyond.code == "unknown_token"
        assert np.isfinite(embedder.embed([good])["text"]).all()


def test_a_pad_token_that_the_model_has_no_vector_for_does_no_harm(tmp_path: Path) -> None:
    tokenizer = bytes_pieces()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    folder = save_trunk(tmp_path / "qwen2", "qwen2", tokenizer=tokenizer)
    rows = vectors_of(loaded(f"st:{folder}"), TEXTS)
    alone = reference(folder).encode(list(TEXTS), batch_size=1, show_progress_bar=False)
    assert_equal(rows, alone)


@pytest.mark.parametrize("make", [word_pieces, partial(sentence_pieces, begins=True), bytes_pieces])
def test_of_a_very_long_text_the_tokens_that_are_read_are_those_of_the_whole(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from embq.worker.embedders.text import tokens

    tokenizer = make()
    random = np.random.default_rng(5)
    kinds = [*CORPUS[0].split(), "漢字かな", "🙂", "\n", "  ", "x" * 90, "русский", "\0"]
    texts = ["".join(random.choice(kinds) + random.choice(["", " "]) for _ in range(2_500)) for _ in range(6)]
    texts += [" " * 50_000 + "fox " * 100, "fox" + " " * 50_000 + "dog " * 100, "x" * 50_000 + " fox", "漢" * 50_000]
    rows = tokens.Tokens(tokenizer).rows(texts)
    monkeypatch.setattr(tokens, "PART_CHARS_PER_TOKEN", 10**9)
    for part, whole in zip(rows, tokens.Tokens(tokenizer).rows(texts), strict=True):
        assert isinstance(part, Truncated) == isinstance(whole, Truncated)
        np.testing.assert_array_equal(part["input_ids"], whole["input_ids"])
