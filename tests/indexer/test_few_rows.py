"""The smallest collections: each has an index that finds every row, or one clear refusal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from embq.app.cli.entry_point import run
from embq.indexer.searcher import Searcher
from tests.support.outputs.build import build, write_jsonl


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 60])
def test_an_index_of_a_few_rows_finds_each_by_itself(tmp_path: Path, rows: int) -> None:
    """Given a folder with so few vectors, then `embq index` builds, and each vector's nearest row is itself."""
    vectors = np.random.default_rng(rows).normal(size=(rows, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", vectors)
    assert run(["index", str(tmp_path / "in"), "--output", str(tmp_path / "index"), "--quiet"]) == 0
    searcher = Searcher.open(tmp_path / "index")
    found = searcher.search(vectors, 1)
    assert found.ids[:, 0].tolist() == list(range(rows))
    assert found.scores[:, 0] == pytest.approx(1.0, abs=1e-3)
    assert searcher.rows(found.ids[:, 0])["key"].to_pylist() == [f"a.npy:{row}" for row in range(rows)]


def test_an_index_of_one_of_several_outputs_names_the_command_for_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", [{"id": str(i), "text": f"text {i}"} for i in range(20)])
    out = build(tmp_path / "out", [texts], model=("a=stub:16", "b=stub:8", "c=stub:4"))
    for made, others in (("a", "bc"), ("c", "b"), ("b", "")):
        assert run(["index", str(out), "--vector-name", made, "--quiet"]) == 0
        commands = "; ".join(f"embq index {out} --vector-name {one}" for one in others)
        note = f"note: this index is of {made} alone; for the others of the run: {commands}\n"
        assert (note in capsys.readouterr().err) == bool(others)


def test_a_dry_run_gives_the_plan_and_makes_nothing(tmp_path: Path) -> None:
    """Given --dry-run --json, then the plan is on stdout and no folder is made."""
    from embq.app.cli.entry_point import cli

    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", np.eye(40, dtype=np.float32))
    told = CliRunner().invoke(
        cli, ["index", str(tmp_path / "in"), "--output", str(tmp_path / "index"), "--dry-run", "--json"]
    )
    assert json.loads(told.stdout)["n"] == 40
    assert not (tmp_path / "index").exists()
