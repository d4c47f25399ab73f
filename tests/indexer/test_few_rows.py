"""The smallest collections: each has an index that finds every row, or one clear refusal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from embq.app.cli.entry_point import run
from embq.index.searcher import Searcher
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


# --- what a code cannot hold, and what has no vectors ---


def indexed(folder: Path, *options: str) -> int:
    return run(["index", str(folder), "--output", str(folder.parent / "index"), "--metric-type", "l2", *options])


@pytest.mark.parametrize("options", [[], ["--refine", "none"], ["--index-key", "IVF2,SQbf16"], ["--index-key", "Flat"]])
def test_numbers_beyond_float16_are_found_where_another_code_holds_them(tmp_path: Path, options: list[str]) -> None:
    vectors = (np.random.default_rng(1).normal(size=(300, 16)) * 1e6).astype(np.float32)
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", vectors)
    assert indexed(tmp_path / "in", "--quiet", *options) == 0
    assert Searcher.open(tmp_path / "index").search(vectors, 1).ids[:, 0].tolist() == list(range(300))


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        (["--index-key", "IVF2,SQfp16"], "--index-key with SQbf16 or Flat"),
        (["--index-key", "IVF2,SQ8", "--refine", "fp16"], "--refine none"),
        (["--index-key", "IVF2,PQ8x4"], "--refine none"),
    ],
)
def test_a_number_beyond_float16_is_refused_with_the_range_wherever_it_stands(
    tmp_path: Path, options: list[str], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = np.random.default_rng(1).normal(size=(300, 16)).astype(np.float32)
    vectors[299, 3] = -65_600
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", vectors)
    assert indexed(tmp_path / "in", *options) == 65
    told = " ".join(capsys.readouterr().err.split())
    assert "1 of 300 vectors" in told
    assert "beyond the range of float16 (65,504)" in told
    assert instead in told
    vectors[299, 3] = -65_504
    np.save(tmp_path / "in" / "a.npy", vectors)
    assert indexed(tmp_path / "in", *options, "--quiet") == 0


def test_rows_for_re_ranking_are_not_kept_where_float16_cannot_hold_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", (np.random.default_rng(1).normal(size=(300, 16)) * 1e6).astype(np.float32))
    assert indexed(tmp_path / "in", "--index-key", "IVF2,PQ8x4", "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["refine"] == "none"
    assert "float16 holds 65,504" in " ".join(plan["notes"])


@pytest.mark.parametrize(
    ("empty", "names", "said"),
    [
        ((0,), "a", "1 (a.npy)"),
        ((0, 16), "acd", "3 (a.npy, c.npy, d.npy)"),
        ((0, 3, 4), "acde", "4 (a.npy, c.npy, d.npy, ...)"),
    ],
)
def test_a_file_without_vectors_among_others_is_left_out_and_told(
    tmp_path: Path, empty: tuple[int, ...], names: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = np.random.default_rng(1).normal(size=(20, 16)).astype(np.float32)
    (tmp_path / "in").mkdir()
    for name, array in (("b", vectors), *((name, np.zeros(empty)) for name in names)):
        np.save(tmp_path / "in" / f"{name}.npy", array)
    assert indexed(tmp_path / "in") == 0
    assert f"files without rows of their own are left out: {said}" in " ".join(capsys.readouterr().out.split())
    assert Searcher.open(tmp_path / "index").search(vectors, 1).ids[:, 0].tolist() == list(range(20))


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float64())])
@pytest.mark.parametrize("missing", [[], None])
def test_a_row_without_a_vector_is_left_out_where_that_is_wanted(
    tmp_path: Path, kind: pa.DataType, missing: list[float] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    vectors = np.random.default_rng(1).normal(size=(20, 16)).astype(np.float32)
    rows = [missing, *vectors.tolist()[:10], *[missing] * (missing is None), *vectors.tolist()[10:]]
    count = len(rows) - len(vectors)
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"embedding": pa.array(rows, kind)}), tmp_path / "in" / "a.parquet")
    assert indexed(tmp_path / "in") == 65
    assert f"{count} of {len(rows)} vectors" in capsys.readouterr().err
    assert indexed(tmp_path / "in", "--drop-invalid") == 0
    said = f"{count} vectors are zero, not finite or missing, and in no list"
    assert said in " ".join(capsys.readouterr().out.split())
    found = Searcher.open(tmp_path / "index").search(vectors, 1).ids[:, 0].tolist()
    assert found == [*range(1, 11), *range(10 + count, 20 + count)]
