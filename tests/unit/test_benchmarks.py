"""Benchmarks: the pictures that they are measured on, and the figures that follow from what was measured."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bench import image_feeding, pictures
from bench.image_cpu import Look, kind_of, spent
from bench.image_decoding import Chunks
from bench.image_readers import compared
from bench.index_cases import CASES, chosen
from bench.index_scoring import BLOCK_ROWS, Point, front, ms_at, points, truth_of
from bench.index_scoring import compared as sides_compared
from bench.stages import over_time
from bench.stages_picture import draw
from bench.text import Measured
from bench.text_profile import flop
from embq.core.units import Sample
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import ReadOptions
from embq.worker.meter.stage_times import STAGES, STATES

THEIRS = {"samples": 1000.0, "seconds": 10.0, "steady_samples": 800.0, "steady_seconds": 4.0, "cpu_s": 20.0}
OURS = {"samples": 1000.0, "seconds": 2.0, "cpu_s": 4.0}


def test_readers_are_compared_round_by_round_and_without_the_start_of_the_peer() -> None:
    slow = {"samples": 1000.0, "seconds": 4.0, "cpu_s": 4.0}
    made = [{"embq": OURS, "clip-retrieval": THEIRS}] * 2 + [{"embq": slow, "clip-retrieval": THEIRS}]
    row = compared(made)
    assert (row["embq_per_s"], row["theirs_per_s"], row["theirs_with_start_per_s"]) == (500, 200, 100)
    assert (row["times"], row["times_spread"]) == (2.5, [1.25, 2.5])
    assert (row["embq_cpu_us"], row["theirs_cpu_us"]) == (4000, 20000)


def test_readers_that_did_not_read_the_same_samples_are_not_compared() -> None:
    with pytest.raises(AssertionError, match=r"999.*1000"):
        compared([{"embq": {**OURS, "samples": 999.0}, "clip-retrieval": THEIRS}])


def test_threads_that_share_chunks_prepare_as_many_samples_as_were_asked_for_and_count_them() -> None:
    chunks = Chunks([[Sample(ordinal=0, key="a"), Sample(ordinal=1, key="b")], [Sample(ordinal=2, key="c")]], 7)
    first, second = iter(chunks), iter(chunks)
    had = sum(len(next(turn)) for turn in (first, second, first))
    had += sum(len(chunk) for chunk in first)
    assert (had, chunks.samples, list(second)) == (8, 8, [])


def test_a_share_is_that_of_each_round() -> None:
    run = {"samples": 100, "seconds": 1.0, "cpu": {"decode": 0.1, "writer": 0.01}}
    alone = [{"samples": 100.0, "seconds": seconds, "cpu_s": 0.2} for seconds in (0.5, 1.0, 2.0)]
    row = image_feeding.compared([(one, run) for one in alone])
    assert (row["share"], row["lowest"], row["highest"]) == (1.0, 0.5, 2.0)
    assert (row["decoding_per_s"], row["run_per_s"], row["decoding_cpu_us"]) == (100, 100, 2000)
    assert (row["cpu_us"]["decode"], row["cpu_us"]["writer"], row["cpu_us"]["broker"]) == (1000, 100, 0)


def test_cpu_time_is_that_between_two_moments_and_of_the_worker_its_busiest_threads_decode() -> None:
    def look(at: float, *seconds: float) -> Look:
        keys = [(7, "worker", 71), (7, "worker", 72), (7, "worker", 73), (8, "writer", 81)]
        return Look(at, dict(zip(keys, seconds, strict=False)))

    looks = [look(0.0, 3.0), look(5.0, 4.0, 0.5, 0.1, 1.0), look(10.0, 4.25, 4.5, 5.1, 3.0)]
    looks.append(Look(11.0, {(8, "writer", 81): 3.5}))
    looks.append(look(12.0, 99.0, 99.0, 99.0, 99.0))
    between = spent(looks, began=5.0, ended=11.0, decoders=2)
    assert between == pytest.approx({"decode": 9.0, "worker": 0.25, "writer": 2.5})


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["python", "-m", "embq.worker.process", "--name", "writer"], "worker"),
        (["python", "-m", "embq", "worker", "--run", "r"], "supervisor"),
        (["python", "-m", "embq", "writer", "--run", "r"], "writer"),
        (["python", "-m", "embq", "producer", "--run", "r"], "producer"),
        (["python", "-m", "embq", "run", "worker/a.tar"], "run"),
        (["/x/valkey-server", "/run/server.conf"], "broker"),
        ([], ""),
    ],
)
def test_processes_are_known_by_their_command(command: list[str], kind: str) -> None:
    assert kind_of(command) == kind


# --- texts ---


TEXTS = 64


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    """Two measurements of `encode` and of fp32, which gave the same vectors but for rounding."""
    found = Measured(tmp_path, tmp_path / "texts.jsonl", [str(number) for number in range(TEXTS)])
    vectors = np.random.default_rng(0).standard_normal((TEXTS, 8)).astype(np.float32)
    found.vectors = {"encode": vectors, "fp32": vectors + np.float32(1e-6), "pool-8": vectors[::5]}
    found.seconds = {"encode": [6.0, 8.0], "fp32": [3.0, 4.0]}
    return found


def test_equal_vectors_are_told_from_others(measured: Measured) -> None:
    rows, same = measured.equal()
    assert same
    assert {row["who"]: row["held"] for row in rows} == {"fp32": True, "pool-8": True}
    measured.vectors["fp32"][3, 5] += 1e-3
    assert not measured.equal()[1]


def test_a_ratio_is_that_of_the_medians(measured: Measured) -> None:
    (ratio,) = measured.ratios()
    assert (ratio["ratio"], ratio["lowest"], ratio["highest"], ratio["held"]) == (2.0, 1.5, 2.667, "yes")


def test_the_arithmetic_of_a_text_is_that_of_its_tokens() -> None:
    # 6 layers of 384 with an inner width of 1,536: 2.87 GFLOP for 128 tokens.
    assert flop([128]) == pytest.approx(2.87e9, rel=0.01)
    assert flop([128, 128]) == 2 * flop([128])


# --- stages ---


@given(st.lists(st.tuples(st.floats(0.5, 3), st.floats(0, 1)), min_size=1, max_size=20))
def test_the_shares_between_reports_are_those_that_went_into_them(spans: list[tuple[float, float]]) -> None:
    reports: list[dict[str, Any]] = []
    at = busy = 0.0
    for seconds, share in spans:
        at, busy = at + seconds, busy + seconds * share
        shares = {"busy": busy / at, "starved": 1 - busy / at}
        reports.append(
            {"seconds": at, "causes": {"device": busy / at, "work": 1 - busy / at}, "stages": {"embed": shares}}
        )
    told = over_time(reports)
    assert [round(span["to_s"] - span["from_s"], 6) for span in told] == [round(seconds, 6) for seconds, _ in spans]
    for span, (_, share) in zip(told, spans, strict=True):
        assert span["causes"]["device"] == span["stages"]["embed"]["busy"] == pytest.approx(share, abs=0.002)
        assert sum(span["causes"].values()) == pytest.approx(1, abs=0.004)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    run = {
        "run": "decode-bound",
        "rows_per_s": 600.0,
        "limit": "decoding",
        "device_waits": 0.7,
        "cores_needed": 7,
        "stages": {stage: dict.fromkeys(STATES, 0.3) for stage in STAGES},
        "over_time": [{"from_s": 0.0, "to_s": 1.0, "causes": {"device": 0.3, "decoding": 0.7}}],
    }
    draw(tmp_path / "stages.png", {"size": [1024, 768], "threads": 2, "runs": [run, {**run, "limit": "device"}]})
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")


# --- indexes ---


def point(recall: float, ms: float, *, tuned: bool = False) -> Point:
    return Point(setting="", tuned=tuned, recall=recall, mean_ms=ms, p50_ms=ms, p95_ms=ms, p99_ms=ms)


def test_the_truth_is_that_of_a_full_sort_across_blocks() -> None:
    random = np.random.default_rng(1)
    vectors = random.normal(size=(BLOCK_ROWS + 300, 8)).astype(np.float16)
    queries = random.normal(size=(5, 8)).astype(np.float32)
    truth = truth_of(vectors, queries)
    scores = queries @ vectors.astype(np.float32).T
    assert np.array_equal(truth.ids[:, :10], np.argsort(-scores, axis=1, kind="stable")[:, :10])


def test_right_answers_have_a_recall_of_one_and_copies_of_a_row_count_alike(tmp_path: Path) -> None:
    vectors = np.eye(12, dtype=np.float32)
    vectors[11] = vectors[9]
    queries = np.linspace(2, 1, 12, dtype=np.float32)[None]
    queries[0, 11] = 0
    found = np.arange(10)[None]
    found[0, 9] = 11
    np.save(tmp_path / "0.ids.npy", found)
    np.save(tmp_path / "0.seconds.npy", np.array([0.002]))
    (tmp_path / "answers.json").write_text(json.dumps({"settings": [{"setting": "nprobe=1", "tuned": True}]}))
    (told,) = points([tmp_path], truth_of(vectors, queries), vectors, queries)
    assert (told.recall, told.p50_ms) == (1.0, 2.0)


def test_a_front_holds_what_nothing_is_better_than() -> None:
    kept = front([point(0.8, 1.0), point(0.7, 2.0), point(0.9, 3.0), point(0.9, 2.5)])
    assert [(one.recall, one.p50_ms) for one in kept] == [(0.8, 1.0), (0.9, 2.5)]


def test_times_between_points_are_interpolated_and_those_beyond_are_unknown() -> None:
    kept = [point(0.8, 1.0), point(0.9, 4.0)]
    assert ms_at(0.85, kept) == pytest.approx(2.0)
    assert ms_at(0.5, kept) == 1.0
    assert ms_at(0.91, kept) is None


def test_sides_are_compared_at_recalls_that_both_reach() -> None:
    theirs, ours = [point(0.85, 5.0, tuned=True)], [point(0.8, 0.1), point(0.96, 1.0, tuned=True)]
    told = sides_compared(theirs, ours)
    assert told["difference"] == pytest.approx(0.11)
    assert max(at["recall"] for at in told["at_equal_recall"]) == 0.85


def test_cases_are_named_or_written_out() -> None:
    assert chosen(CASES[0].name) == [CASES[0]]
    (other,) = chosen("minilm:1000:2M:300M")
    assert (other.rows, other.index_memory, other.memory) == (1000, "2M", "300M")


# --- sets of photographs ---


@pytest.mark.parametrize("size", [(256, 256), (512, 384), (1030, 770)])
def test_every_picture_has_the_size_and_no_two_are_the_same(size: tuple[int, int]) -> None:
    made = pictures.jpegs(size, 20, seed=1)
    assert len(set(made)) == len(made) == 20
    for encoded in made:
        image = Image.open(io.BytesIO(encoded))
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", size)
        assert min(high - low for low, high in image.getextrema()) > 20, "a part was left empty, or is one colour"


def test_the_same_seed_gives_the_same_pictures() -> None:
    assert pictures.jpegs((256, 256), 5, seed=3) == pictures.jpegs((256, 256), 5, seed=3)
    assert pictures.jpegs((256, 256), 5, seed=3) != pictures.jpegs((256, 256), 5, seed=4)


def test_pictures_are_photographs_that_compress_as_such() -> None:
    for size, least in (((256, 256), 0.25), ((512, 384), 0.15), ((1024, 768), 0.15)):
        made = pictures.jpegs(size, 16, seed=0)
        assert sum(map(len, made)) / len(made) / (size[0] * size[1]) > least


def test_a_shard_holds_what_was_given_in_order(tmp_path: Path) -> None:
    made = [bytes([n]) * 1000 for n in range(5)]
    paths = pictures.shards(tmp_path / "new", made, per_shard=2)
    assert [path.name for path in paths] == ["00000.tar", "00001.tar", "00002.tar"]
    tar = SOURCES["tar"]
    units = [unit for path in paths for unit in tar.split(str(path), ReadOptions())]
    assert [sample.image for unit in units for sample in tar.read(unit)] == made


def test_few_shards_stand_for_many_under_other_names(tmp_path: Path) -> None:
    shards = pictures.shards(tmp_path / "few", [b"a", b"b", b"c"], per_shard=1)
    paths = pictures.linked(tmp_path / "many", shards, 5)
    assert len(set(paths)) == 5
    assert [path.read_bytes() for path in paths] == [shards[n % 3].read_bytes() for n in range(5)]
    assert sorted((tmp_path / "many").iterdir()) == paths
