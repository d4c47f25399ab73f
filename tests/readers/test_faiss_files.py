"""Exported indexes are read by faiss 1.13, autofaiss and clip-retrieval; `make test-readers` makes the environment."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embq.app.cli import entry_point
from embq.core.rows.spec import RowSpec
from embq.index.change.deletes import delete
from embq.index.faiss_file import write_faiss_file
from embq.index.index_files.version import read_current
from embq.index.searcher import Searcher
from tests.support.outputs.build import build, write_tar
from tests.support.outputs.index import build_index
from tests.support.servers.tls import free_ports

PYTHON = Path(os.environ.get("EMBQ_READERS_PYTHON", ".venv-readers/bin/python")).absolute()
HERE = Path(__file__).parent
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
ROWS, DIM, GONE, STARTING_S = 600, 32, 17, 60

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is not there: make test-readers"),
    pytest.mark.timeout(300),
]


def look(reader: str, folder: Path) -> dict[str, Any]:
    """What a program finds in a folder."""
    done = subprocess.run(
        [PYTHON, HERE / "look.py", reader, folder], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # faiss itself prints to stdout, which its library flushes behind the answer.
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    answer: dict[str, Any] = json.loads(line)
    return answer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with captions, an index of each, and one image deleted from its index."""
    folder = tmp_path_factory.mktemp("run")
    members = [(f"s{i:03d}.{end}", f"{end} {i}".encode()) for i in range(ROWS) for end in ("jpg", "txt")]
    root = build(
        folder / "out",
        [write_tar(folder / "a.tar", members)],
        model=f"stub:{DIM}",
        modalities=("image", "text"),
        rows=RowSpec(normalize=True),
        format="npy",
        unit_samples=100,
    )
    key = ("--index-key", "PCAR16,IVF8(PCA8,Flat),PQ8x4", "--refine", "fp16", "--recall", "0.3@10")
    build_index(root, *key, output="image")
    build_index(root, "--index-key", "IVF8,SQ8", "--refine", "none", "--recall", "0.5@10", output="text")
    delete(root / "index" / "image", [f"s{GONE:03d}"])
    return root


def queries(run: Path, folder: str) -> np.ndarray:
    """Vectors of rows of the run."""
    return np.concatenate([np.load(path) for path in sorted((run / folder).glob("*.npy"))])[:40].astype(np.float32)


def found(run: Path, output: str, *, refine: bool | None, k: int = 10) -> list[list[int]]:
    """Ids that a search finds for the first rows."""
    folder = "img_emb" if output == "image" else "text_emb"
    searcher = Searcher.open(run / "index" / output, memory="mmap")
    ids: list[list[int]] = searcher.search(queries(run, folder), k, refine=refine).ids.tolist()
    return ids


@pytest.mark.parametrize(("output", "refine"), [("image", False), ("image", True), ("text", False)])
def test_faiss_alone_answers_as_a_search_does(run: Path, tmp_path: Path, output: str, refine: bool) -> None:
    write_faiss_file(run / "index" / output, tmp_path / "knn.index", refine=refine)
    np.save(tmp_path / "queries.npy", queries(run, "img_emb" if output == "image" else "text_emb"))
    answer = look("faiss_file", tmp_path)
    wanted = found(run, output, refine=None if refine else False)
    assert answer["ids"] == answer["mapped"] == wanted
    assert not any(GONE in row for row in wanted) or output == "text"


def test_shards_are_merged_by_the_index_combiner(run: Path, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    assert len(write_faiss_file(run / "index" / "image", tmp_path / "shards" / "knn.index", shards=3).files) == 3
    np.save(tmp_path / "queries.npy", queries(run, "img_emb"))
    assert look("index_combiner", tmp_path) == {"ids": found(run, "image", refine=False), "rows": ROWS - 1}


def test_autofaiss_scores_the_file_as_its_report_does(run: Path, tmp_path: Path) -> None:
    write_faiss_file(run / "index" / "text", tmp_path / "knn.index")
    (tmp_path / "embeddings").symlink_to(run / "text_emb")
    scores = look("autofaiss_score", tmp_path)["scores"]
    infos = json.loads((read_current(run / "index" / "text").path / "infos.json").read_text())
    for name in ("1-recall@20", "20-recall@20", "40-recall@40"):
        assert scores[name] == pytest.approx(infos[name], abs=0.1)
    assert scores["vectors dimension"] == DIM


@pytest.fixture(scope="module")
def url(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The back end of clip-retrieval over an exported folder."""
    folder = tmp_path_factory.mktemp("back") / "served"
    assert entry_point.run(["index", "export", str(run), str(folder), "--output-format", "clip-back"]) == 0
    port = free_ports(1)[0]
    log = folder.with_name("log")
    with open(log, "w") as file:
        server = subprocess.Popen(
            [PYTHON, HERE / "clip_server.py", folder / "indices_paths.json", str(port)],
            stdout=file,
            stderr=file,
            env=ENVIRONMENT,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + STARTING_S
        while not answers(f"{address}/indices-list"):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        yield address
    finally:
        server.kill()
        server.wait()


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(json.loads(answer.read()))
    except OSError:
        return False


@pytest.mark.parametrize(("output", "folder"), [("image", "img_emb"), ("text", "text_emb")])
def test_clip_back_serves_the_folder_to_its_own_client(run: Path, url: str, output: str, folder: str) -> None:
    vector = queries(run, folder)[9]
    asked = {
        "client": {"indice_name": "out", "modality": output, "num_images": 10, "deduplicate": False},
        "queries": [{"embedding_input": vector.tolist()}],
    }
    done = subprocess.run(
        [PYTHON, HERE / "clip_client.py", url],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    (rows,) = told["answers"]
    assert [row["id"] for row in rows] == found(run, output, refine=None)[9]
    assert (rows[0]["key"], rows[0]["caption"], rows[0]["image_path"]) == ("s009", "txt 9", "s009")
    assert rows[0]["similarity"] == pytest.approx(1 if output == "image" else 0, abs=2e-3)
    assert [row["metadata"]["key"] for row in told["metadata"]] == [f"s{row['id']:03d}" for row in rows]
