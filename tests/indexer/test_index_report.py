"""The report of indices that `embq index` builds: infos.json, the picture, and what is told at the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embq.app.cli import entry_point
from embq.core.errors import Exit
from embq.index.index_files.version import read_current
from embq.index.stages.report import NO_LINE, NO_PICTURE, plain, summary

ROWS, DIM = 1_500, 24

AUTOFAISS = [
    "index_key",
    "index_param",
    "index_path",
    "size in bytes",
    "avg_search_speed_ms",
    "99p_search_speed_ms",
    "reconstruction error %",
    "nb vectors",
    "vectors dimension",
    "compression ratio",
    "1-recall@20",
    "1-recall@40",
    "20-recall@20",
    "40-recall@40",
]


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with their texts, as clip-retrieval stores them: a text lies beside its image, and some are missing."""
    root = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(1)
    images = unit(random.normal(size=(60, DIM))[random.integers(60, size=ROWS)] + 0.7 * random.normal(size=(ROWS, DIM)))
    texts = unit(images + random.normal(size=DIM) + 0.3 * random.normal(size=(ROWS, DIM)))
    texts[7::25] = np.nan
    for name, vectors in (("img_emb", images), ("text_emb", texts)):
        (root / name).mkdir()
        np.save(root / name / f"{name}_0.npy", vectors)
    return root


def embq_index(root: Path, to: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and report of a build."""
    status = entry_point.run(["index", str(root), "--output", str(to), "--quiet", *options])
    version = read_current(to)
    infos = json.loads((version.path / "infos.json").read_bytes())
    assert summary(infos, report=version.path)
    return status, infos


@pytest.fixture(scope="module")
def built(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], Path]:
    to = tmp_path_factory.mktemp("index") / "image"
    return *embq_index(pictures, to, "--index-key", "IVF32,SQ8", "--refine", "none", "--recall", "0.9@10"), to


def test_autofaiss_keys_come_first_and_mean_what_they_mean_there(
    built: tuple[int, dict[str, Any], Path],
) -> None:
    _, infos, index = built

    assert list(infos)[:14] == AUTOFAISS
    assert infos["index_key"] == "IVF32,SQ8"
    assert infos["index_param"] == f"nprobe={infos['search']['nprobe']}"
    assert (infos["nb vectors"], infos["vectors dimension"]) == (ROWS, DIM)
    files = [file for file in (index / "files").iterdir() if file.suffix != ".arrow"]
    assert infos["size in bytes"] == sum(file.stat().st_size for file in files)
    assert infos["compression ratio"] == pytest.approx(4 * ROWS * DIM / infos["size in bytes"])
    assert 0.0 < infos["reconstruction error %"] < 3.0  # eight bits lose little
    assert infos["1-recall@40"] == 1.0  # a row finds itself, where its code is as good as this


def test_both_query_sets_are_reported_and_the_worst_one_is_bound_to_the_target(
    built: tuple[int, dict[str, Any], Path],
) -> None:
    status, infos, index = built

    assert status == Exit.DONE
    assert infos["target_met"] is True
    assert set(infos["recall"]) == {"data", "text"} == set(infos["latency_ms"]) == set(infos["qps"])
    assert infos["recall@10"] == min(one["recall@10"] for one in infos["recall"].values()) >= 0.9
    for times in infos["latency_ms"].values():
        assert 0.0 < times["p50"] <= times["p95"] <= times["p99"]
    assert infos["query_sets"]["text"]["left_out"] == 150 - infos["gt_queries"]["text"] > 0, "no missing one was drawn"
    assert infos["query_sets"]["data"]["left_out"] == 0
    assert infos["assign_agreement"] == 1.0
    assert infos["imbalance_factor"] > 1.0
    assert set(infos["build_seconds"]) == {"sample", "train", "queries", "truth", "add", "merge", "tune"}
    assert all(value > 0 for value in infos["peak_rss_bytes"].values())
    picture = index / read_current(index).name / "report.png"
    assert picture.read_bytes()[1:4] == b"PNG" if infos["picture"] == "report.png" else not picture.exists()
    said = summary(infos)
    assert "target     recall@10 >= 0.9 for every set: met" in said
    assert "none were measured" not in said


def test_a_missed_target_is_published_told_and_not_a_success(pictures: Path, tmp_path: Path) -> None:
    options = ("--index-key", "IVF32,RaBitQ", "--refine", "none", "--recall", "0.99@10")

    status, infos = embq_index(pictures, tmp_path / "index", *options)

    assert status == Exit.SOME_FAILED
    assert infos["target_met"] is False
    assert infos["recall@10"] < 0.99
    said = summary(infos)
    assert "MISSED" in said
    assert "--refine fp16" in said


def test_without_matplotlib_there_is_a_report_and_it_says_that_there_is_no_picture(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    options = ("--index-key", "IVF32,SQ8", "--refine", "none", "--recall", "0.5@10")

    _, infos = embq_index(pictures, tmp_path / "index", *options)

    # Where no setting of such a small index was measured to be slower than the best one, there is no line to draw.
    assert infos["picture"] in (NO_PICTURE, NO_LINE)
    assert not list(tmp_path.rglob("report.png"))


def test_where_one_setting_is_all_there_is_no_picture(pictures: Path, tmp_path: Path) -> None:
    _, infos = embq_index(pictures, tmp_path / "index", "--recall", "0.5@10")

    assert infos["picture"] == "none: no two settings could be compared"
    assert not list(tmp_path.rglob("report.png"))


def test_no_number_of_numpy_and_none_that_json_has_not_gets_into_the_report() -> None:
    value = {"a": np.float32(0.5), 3: [np.int64(7), np.bool_(True)], "n": float("nan"), "v": np.arange(2)}

    assert json.loads(json.dumps(plain(value), allow_nan=False)) == {"a": 0.5, "3": [7, True], "n": None, "v": [0, 1]}
