"""Cost of adding a tenth: `embq index add`, after the folder has got further rows.

    python -m bench.index_growth [--data bench/cache] [--rows 300000] [--index-memory 60M] [--memory 1G]

An index of `--rows` rows of `minilm` is built; then a second file with a tenth more is put into the folder, and the
command is given again. For comparison all rows are indexed anew. Recall is measured with the same held-out queries
against exact search through all rows, for the index that has grown and for the one that was built anew, in the setting
that each has chosen.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from bench.index_cases import DATA, QUERIES, K, cached
from bench.index_ours import build
from bench.index_scoring import truth_of
from bench.report import table, write
from embq.index.searcher import Searcher
from embq.index.tune.recall import Truth, mean_recall

SHARE = 0.1
BAR = 0.15
"""Part of the time of the build that the addition may take."""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--index-memory", default="60M")
    parser.add_argument("--memory", default="1G")
    options = parser.parse_args()
    folder = options.data.resolve() / "growth"
    shutil.rmtree(folder, ignore_errors=True)
    more = round(options.rows * (1 + SHARE))
    every = np.load(cached(options.data / "minilm" / "vectors.npy"), mmap_mode="r", allow_pickle=False)[:more]
    if len(every) < more:
        raise SystemExit(f"there are {len(every):,} rows, and {more:,} are wanted: --rows {len(every) * 10 // 11}")
    queries = np.load(options.data / "minilm" / "queries.npy", allow_pickle=False)[:QUERIES].astype(np.float32)
    vectors, index, anew = folder / "vectors", folder / "index", folder / "anew"
    vectors.mkdir(parents=True)
    limits = (options.index_memory, options.memory)
    np.save(vectors / "part-0.npy", every[: options.rows])
    built = build(vectors, index, *limits)
    np.save(vectors / "part-1.npy", every[options.rows :])
    grown = build(vectors, index, *limits, adds=True)
    rebuilt = build(vectors, anew, *limits)
    truth = truth_of(every, queries)
    stages: dict[str, dict[str, Any]] = {"built": built, "grown by a tenth": grown, "all built anew": rebuilt}
    rows = [
        {
            "what": name,
            **{figure: one[figure] for figure in ("key", "seconds", "cpu_s", "peak_rss_bytes")},
            "share_of_build": round(one["seconds"] / built["seconds"], 3),
            "cpu_share_of_build": round(one["cpu_s"] / built["cpu_s"], 3),
        }
        for name, one in stages.items()
    ]
    recalls = {
        "grown by a tenth": _recall(index, more, queries, truth),
        "all built anew": _recall(anew, more, queries, truth),
    }
    table(list(rows[0]), [list(row.values()) for row in rows])
    print("recall@10:", json.dumps(recalls), f"; bar for the share: {BAR}")
    print(
        "wrote", write("index_growth", {"rows": options.rows, "added": more - options.rows, "steps": rows, **recalls})
    )


def _recall(index: Path, rows: int, queries: np.ndarray, truth: Truth) -> float:
    searcher = Searcher.open(index)
    assert searcher.n == rows
    return round(mean_recall(searcher.search(queries, K).ids, truth, K), 4)


if __name__ == "__main__":
    main()
