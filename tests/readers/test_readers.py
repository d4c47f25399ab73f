"""Outputs are read unchanged by the programs that people use them with; `make test-readers` makes their environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embq.compat.autofaiss import build_index
from embq.core.errors import Exit
from embq.core.run.reader import row_tables
from embq.worker.embedders.stub import stub_vector
from tests.e2e.session import ended
from tests.support.outputs.build import write_tar

PYTHON = Path(os.environ.get("EMBQ_READERS_PYTHON", ".venv-readers/bin/python")).absolute()
LOOK = Path(__file__).with_name("look.py")
ROWS, DIM = 600, 16
PARTS = ["--write-batch-size", "250", "--unit-size", "50"]

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is not there: make test-readers"),
    pytest.mark.timeout(300),
]


def look(reader: str, folder: Path) -> dict[str, Any]:
    """Findings of a program in a folder."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        [PYTHON, LOOK, reader, folder], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def embed(root: Path, source: Path, *options: str) -> Path:
    status, stdout, stderr = ended("run", source, "-o", root, "-m", f"stub:{DIM}", *PARTS, *options, "--quiet")
    assert status == Exit.DONE, stdout + stderr
    return root


@pytest.fixture(scope="module")
def text_of() -> dict[str, str]:
    return {f"k{i:04d}": f"text number {i} \u00e9" for i in range(ROWS)}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, text_of: dict[str, str]) -> Path:
    path = tmp_path_factory.mktemp("in") / "texts.jsonl"
    lines = (json.dumps({"id": key, "text": text, "url": f"http://x/{key}"}) for key, text in text_of.items())
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def npy(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    return embed(tmp_path_factory.mktemp("npy") / "out", texts, "--output-format", "npy")


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    return embed(tmp_path_factory.mktemp("parquet") / "out", texts)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with captions, from shards."""
    folder = tmp_path_factory.mktemp("tars")
    for shard in range(6):
        members = []
        for i in range(shard * 100, shard * 100 + 100):
            members += [(f"s{i:04d}.jpg", f"image {i}".encode()), (f"s{i:04d}.txt", f"caption {i}".encode())]
        write_tar(folder / f"{shard}.tar", members)
    root = tmp_path_factory.mktemp("pairs") / "out"
    return embed(root, folder / "{0..5}.tar", "--output-format", "npy", "--modality", "image,text")


def wanted(keys: list[str], content_of: dict[str, str]) -> np.ndarray:
    """The vectors that belong to keys, as they are stored."""
    return np.array([stub_vector(content_of[key].encode(), DIM) for key in keys], np.float16).astype(np.float32)


def assert_each_key_has_its_own_vector(found: dict[str, Any], text_of: dict[str, str]) -> None:
    assert sorted(found["keys"]) == sorted(text_of)
    assert np.array_equal(np.array(found["vectors"], np.float32), wanted(found["keys"], text_of))
    assert found["ids"] == list(range(ROWS))


@pytest.mark.parametrize("reader", ["embedding_reader_parquet", "duckdb_parquet", "pandas_parquet"])
def test_parquet_is_read(parquet: Path, text_of: dict[str, str], reader: str) -> None:
    assert len(list((parquet / "parts").iterdir())) >= 3
    assert_each_key_has_its_own_vector(look(reader, parquet), text_of)


def test_npy_is_read_beside_its_metadata(npy: Path, text_of: dict[str, str]) -> None:
    assert len(list((npy / "text_emb").iterdir())) >= 3
    assert_each_key_has_its_own_vector(look("embedding_reader_parquet_npy", npy), text_of)


@pytest.mark.parametrize("folder", ["", "text_emb"])
def test_the_vectors_of_npy_are_read_in_the_order_of_their_ids(npy: Path, text_of: dict[str, str], folder: str) -> None:
    found = look("embedding_reader_npy", npy / folder)
    assert (found["count"], found["dimension"]) == (ROWS, DIM)
    keys = look("clip_back", npy)["keys"]
    assert np.array_equal(np.array(found["vectors"], np.float32), wanted(keys, text_of))


def test_an_index_of_autofaiss_over_npy_finds_each_vector_under_its_own_id(npy: Path) -> None:
    assert look("autofaiss_npy", npy / "text_emb")["neighbours"] == list(range(ROWS))


def test_an_index_of_autofaiss_over_parquet_finds_each_vector_under_its_own_id(parquet: Path) -> None:
    assert look("autofaiss_parquet", parquet)["neighbours"] == list(range(ROWS))


def test_build_index_answers_as_autofaiss_does_on_the_same_array(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    vectors, queries = (random.random((count, 32), np.float32) for count in (900, 20))
    np.save(tmp_path / "vectors.npy", vectors)
    np.save(tmp_path / "queries.npy", queries)
    theirs = look("autofaiss_build_index", tmp_path)
    index, infos = build_index(vectors, save_on_disk=False, verbose=40)
    scores, ids = index.search(queries, 10)
    assert ids.tolist() == theirs["ids"]
    assert np.allclose(scores, theirs["scores"], rtol=1e-5)
    assert list(infos)[:10] == theirs["infos"]


def test_the_back_end_finds_the_metadata_of_a_vector_by_its_number(npy: Path, text_of: dict[str, str]) -> None:
    found = look("clip_back", npy)
    assert found["ids"] == list(range(ROWS))
    assert found["columns"][:2] == ["caption", "url"]
    assert found["captions"] == [text_of[key] for key in found["keys"]]
    assert found["one_schema"]
    assert found["unnamed"] == []


def test_images_and_their_captions_stand_in_the_same_rows(pairs: Path) -> None:
    found = look("clip_back", pairs)
    assert found["columns"][:2] == ["image_path", "caption"]
    assert found["image_paths"] == found["keys"]
    numbers = [int(key.removeprefix("s")) for key in found["keys"]]
    assert sorted(numbers) == list(range(ROWS))
    assert found["captions"] == [f"caption {number}" for number in numbers]
    for folder, what in (("img_emb", "image"), ("text_emb", "caption")):
        content_of = {key: f"{what} {number}" for key, number in zip(found["keys"], numbers, strict=True)}
        vectors = look("embedding_reader_npy", pairs / folder)["vectors"]
        assert np.array_equal(np.array(vectors, np.float32), wanted(found["keys"], content_of))
        assert look("autofaiss_npy", pairs / folder)["neighbours"] == list(range(ROWS))


def test_duckdb_gives_parts_of_workers_their_ids(texts: Path, tmp_path: Path) -> None:
    options = ("-m", "stub:16384", "--dtype", "float32", "--unit-size", "400", "--quiet")  # units of 26 and 13 MB
    status, stdout, stderr = ended("run", texts, "-o", tmp_path / "out", *options)
    assert status == Exit.DONE, stdout + stderr
    names = sorted(path.name.count(".") for path in (tmp_path / "out" / "parts").iterdir())
    assert names == [1, 2], "one of the writer, one of a worker"
    rows = [
        (table["id"].to_pylist(), table["key"].to_pylist()) for table in row_tables(tmp_path / "out", ["id", "key"])
    ]
    expected = [list(pair) for ids, keys in rows for pair in zip(ids, keys, strict=True)]
    assert look("duckdb_parts_of_workers", tmp_path / "out")["rows"] == expected
