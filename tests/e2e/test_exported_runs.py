"""Exports of real runs: what tools are given does not depend on how many workers there were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.producer.retry import FailureFilter, retry
from tests.e2e.check import stub
from tests.e2e.session import succeed, write_texts
from tests.support.outputs.build import build, go_on

DIM = 8


def exported(root: Path, source: Path, workers: int, part_rows: int) -> tuple[pa.Table, np.ndarray]:
    """Metadata and vectors of a run with so many workers, sorted and in clip-retrieval's layout."""
    options = ("--workers", str(workers), "--unit-size", "20", "--write-batch-size", str(part_rows))
    out, plain = root / "out", root / "plain"
    succeed("run", source, "-o", out, "-m", f"stub:{DIM}?ms_per_sample=1", *options, "--quiet")
    said = json.loads(
        succeed("export", out, plain, "--output-format", "npy", "--sorted", "--rows-per-file", "250", "--json")
    )
    assert (said["rows"], said["state"]) == (600, "complete")
    tables = [pq.read_table(path) for path in sorted((plain / "metadata").iterdir())]
    matrices = [np.load(path) for path in sorted((plain / "text_emb").iterdir())]
    assert [len(one) for one in matrices] == [table.num_rows for table in tables] == [250, 250, 100]
    return pa.concat_tables(tables), np.concatenate(matrices)


@pytest.mark.slow
def test_sorted_exports_are_equal_whatever_the_number_of_workers(short_tmp: Path) -> None:
    (short_tmp / "a").mkdir()
    (short_tmp / "b").mkdir()
    expected = write_texts(short_tmp / "texts.jsonl", 600)

    one, vectors = exported(short_tmp / "a", short_tmp / "texts.jsonl", 1, 1_000)
    several, same = exported(short_tmp / "b", short_tmp / "texts.jsonl", 3, 40)

    assert one["key"].to_pylist() == list(expected)
    assert np.array_equal(vectors.astype(np.float64), [stub(text, DIM) for text in expected.values()])
    assert np.array_equal(vectors, same)
    assert one.drop_columns(["id"]).equals(several.drop_columns(["id"]))
    assert sorted(several["id"].to_pylist()) == list(range(600))


def test_the_row_of_a_retried_sample_stands_where_its_sample_does(short_tmp: Path) -> None:
    source, out = short_tmp / "texts.jsonl", short_tmp / "out"
    lines = [json.dumps({"id": f"k{n:02d}", "text": f"text {n}"}) for n in range(40)]
    broken = [line if n not in (3, 4, 25) else "#" * len(line) for n, line in enumerate(lines)]
    source.write_text("\n".join(broken) + "\n")
    build(out, [source], unit_samples=10)

    source.write_text("\n".join(lines) + "\n")
    retry(out, FailureFilter(), version="0")
    go_on(out)
    succeed("export", out, short_tmp / "plain", "--output-format", "parquet", "--sorted")

    table = pq.read_table(short_tmp / "plain" / "parts" / "part-00000000.parquet")
    assert table["key"].to_pylist() == [f"k{n:02d}" for n in range(40)]
    assert sorted(table["id"].to_pylist()[position] for position in (3, 4, 25)) == [37, 38, 39]
