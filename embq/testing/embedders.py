"""Promises of `embq.worker.embedders.base.ChunkableEmbedder` as tests, for a model family of a plug-in.

A test file of the plug-in takes them over and says which model they are about::

    from embq.testing.embedders import *


    @pytest.fixture(scope="module")
    def config() -> ModelConfig:
        return ModelConfig(spec="letters:32", modalities=("text",), precision="fp32")
"""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping

import numpy as np
import pytest
from PIL import Image

from embq.core.errors import ModelError, SampleError
from embq.core.models import Chunking, ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.base import ChunkableEmbedder, Embedder, HasChunks, Truncated
from embq.worker.embedders.registry import load
from embq.worker.embedders.text.splitting import ChunkingEmbedder

TEXTS = (
    "A single word.",
    "encode",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Ünïcödé, 漢字 and emoji 🙂 in one line",
    "Return the base 2 logarithm of x. " * 8,
    "tab\tand\nnew line",
    "x",
)

LONG = "\n\n".join(
    f"Paragraph {number} has a sentence, " + "and words of its own, " * 12 + "and it ends." for number in range(12)
)


@pytest.fixture(scope="module")
def embedder(config: ModelConfig) -> ChunkableEmbedder:
    family: ChunkableEmbedder = load(config, "cpu")  # type: ignore[assignment]
    return family


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    random = np.random.default_rng(0)
    return [Sample(ordinal=n, key=str(n), image=a_jpeg(random), text=text) for n, text in enumerate(TEXTS)]


def a_jpeg(random: np.random.Generator) -> bytes:
    low = random.integers(0, 256, size=(6, 9, 3), dtype=np.uint8)
    picture = Image.fromarray(low).resize((int(random.integers(40, 200)), int(random.integers(40, 200))))
    encoded = io.BytesIO()
    picture.save(encoded, "JPEG", quality=90)
    return encoded.getvalue()


def vectors_of(embedder: Embedder, samples: list[Sample]) -> Mapping[str, np.ndarray]:
    prepared = embedder.prepare(samples)
    assert not [answer for answer in prepared if isinstance(answer, SampleError)]
    return embedder.embed(prepared)


def test_vectors_are_finite_float32_rows_of_the_promised_length(
    embedder: Embedder, config: ModelConfig, samples: list[Sample]
) -> None:
    vectors = vectors_of(embedder, samples)
    assert set(vectors) == set(embedder.dims) == set(config.output_names)
    for modality, rows in vectors.items():
        assert rows.dtype == np.float32
        assert rows.shape == (len(samples), embedder.dims[modality])
        assert np.isfinite(rows).all()
        assert len(np.unique(rows.round(5), axis=0)) == len(samples)
    assert embedder.batch_size >= 1


def test_rows_follow_the_order_and_not_the_company_of_their_samples(embedder: Embedder, samples: list[Sample]) -> None:
    together = vectors_of(embedder, samples)
    order = np.random.default_rng(1).permutation(len(samples))
    shuffled = vectors_of(embedder, [samples[index] for index in order])
    separately = [vectors_of(embedder, [sample]) for sample in samples]
    for modality, rows in together.items():
        np.testing.assert_allclose(shuffled[modality], rows[order], atol=1e-5)
        np.testing.assert_allclose(np.concatenate([vectors[modality] for vectors in separately]), rows, atol=1e-5)


def test_an_empty_batch_gives_no_rows(embedder: Embedder) -> None:
    assert embedder.prepare([]) == []
    assert {modality: rows.shape for modality, rows in embedder.embed([]).items()} == {
        modality: (0, dim) for modality, dim in embedder.dims.items()
    }


def test_four_threads_may_prepare_at_once(embedder: Embedder, samples: list[Sample]) -> None:
    expected = vectors_of(embedder, samples)
    prepared: list[list[object]] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        prepared.extend([embedder.prepare(samples) for _ in range(5)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(prepared) == 20
    for answers in prepared[::5]:
        for modality, rows in embedder.embed(answers).items():
            np.testing.assert_allclose(rows, expected[modality], atol=1e-5)


def test_samples_that_cannot_be_embedded_say_why_and_spare_their_neighbours(
    embedder: Embedder, config: ModelConfig, samples: list[Sample]
) -> None:
    good = samples[0]
    broken = {
        "missing_member": Sample(ordinal=1, key="none"),
        "duplicate_key": Sample(ordinal=2, key="k", text="a", image=good.image, error=("duplicate_key", "twice")),
    }
    if "text" in config.modalities:
        broken["empty_text"] = Sample(ordinal=3, key="empty", text=" \n\t", image=good.image)
        broken["text_not_utf8"] = Sample(ordinal=4, key="surrogate", text="a \ud800 b", image=good.image)
    answers = embedder.prepare([good, *broken.values(), good])
    codes = [answer.code if isinstance(answer, SampleError) else "" for answer in answers]
    assert codes == ["", *broken, ""]
    rows = embedder.embed([answers[0], answers[-1]])
    for name in config.output_names:
        np.testing.assert_allclose(rows[name][0], rows[name][1], atol=1e-6)


def test_each_modality_of_the_config_must_be_there(
    embedder: Embedder, config: ModelConfig, samples: list[Sample]
) -> None:
    complete = samples[0]
    for modality in config.modalities:
        image, text = (None, complete.text) if modality == "image" else (complete.image, None)
        answer = embedder.prepare([Sample(ordinal=0, key="k", image=image, text=text)])[0]
        assert isinstance(answer, SampleError)
        assert answer.code == "missing_member"


def test_two_loads_agree_on_fingerprint_and_vectors(
    embedder: Embedder, config: ModelConfig, samples: list[Sample]
) -> None:
    again = load(config, "cpu")
    assert again.fingerprint == embedder.fingerprint
    assert len(again.fingerprint) == 32
    assert int(again.fingerprint, 16) >= 0
    second = vectors_of(again, samples)
    for modality, rows in vectors_of(embedder, samples).items():
        np.testing.assert_array_equal(rows, second[modality])


def skip_without_chunks(embedder: ChunkableEmbedder, config: ModelConfig) -> None:
    if "text" not in config.modalities:
        pytest.skip("it reads no text")
    if config.members:
        pytest.skip("several models do not agree on chunks; that they say so has a test of its own")
    try:
        embedder.splitter(Chunking(tokens=16))
    except ModelError as error:
        if error.code == "no_chunks":
            pytest.skip("its texts cannot be cut")
        raise


def text_sample(text: str, samples: list[Sample]) -> Sample:
    return Sample(ordinal=7, key="doc#1", text=text, image=samples[0].image, metadata='{"lang":"en"}')


def test_the_chunks_of_a_text_are_read_whole_and_cover_it(
    embedder: ChunkableEmbedder, config: ModelConfig, samples: list[Sample]
) -> None:
    skip_without_chunks(embedder, config)
    cutting = ChunkingEmbedder(embedder, Chunking(tokens=16, overlap=4))
    assert isinstance(cutting, HasChunks)
    chunks = cutting.chunks(text_sample(LONG, samples), lambda: None)
    assert len(chunks) > 10
    assert chunks == cutting.chunks(text_sample(LONG, samples), lambda: None)
    end = 0
    for number, chunk in enumerate(chunks):
        assert chunk.passage is not None
        start, stop = chunk.passage.start, chunk.passage.end
        assert (chunk.key, chunk.ordinal, chunk.metadata) == (f"doc#1#{number}", 7, '{"lang":"en"}')
        assert (chunk.passage.document, chunk.passage.number, chunk.passage.count) == ("doc#1", number, len(chunks))
        assert chunk.text == LONG[start:stop] == LONG[start:stop].strip() != ""
        assert not LONG[end:start].strip()
        end = stop
    assert not LONG[end:].strip()
    prepared = cutting.prepare(chunks)
    assert not [answer for answer in prepared if isinstance(answer, (SampleError, Truncated))]
    rows, separately = cutting.embed(prepared[:2])["text"], vectors_of(embedder, chunks[:1])["text"]
    assert rows.shape == (2, cutting.dims["text"])
    np.testing.assert_allclose(rows[:1], separately, atol=1e-5)


def test_how_texts_are_cut_is_part_of_the_fingerprint(embedder: ChunkableEmbedder, config: ModelConfig) -> None:
    skip_without_chunks(embedder, config)
    cuts = [Chunking(tokens=16), Chunking(tokens=16, overlap=4), Chunking(tokens=15)]
    fingerprints = {ChunkingEmbedder(embedder, chunking).fingerprint for chunking in cuts}
    assert len({embedder.fingerprint, *fingerprints}) == 4
    assert ChunkingEmbedder(embedder, cuts[0]).fingerprint in fingerprints


def test_a_text_without_chunks_says_why(
    embedder: ChunkableEmbedder, config: ModelConfig, samples: list[Sample]
) -> None:
    skip_without_chunks(embedder, config)
    cutting = ChunkingEmbedder(embedder, Chunking(tokens=16))
    for text, code in ((" \n", "empty_text"), ("a \ud800 b", "text_not_utf8")):
        with pytest.raises(SampleError) as caught:
            cutting.chunks(text_sample(text, samples), lambda: None)
        assert caught.value.code == code
