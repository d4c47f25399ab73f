"""The choice of an index: what fits, what it takes, and what is refused with the numbers and the nearest way out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from embq.core.errors import EmbqError, InputError, UsageError
from embq.core.service.progress_line import size_text
from embq.index.index_files.files import from_json, to_json
from embq.index.plan.build_options import BuildOptions, available_memory, bytes_text, parse_bytes, parse_recall
from embq.index.plan.codec_choices import codec_choices
from embq.index.plan.codecs import Codec, codec
from embq.index.plan.costs import Speeds, measure_speeds
from embq.index.plan.index_plan import IndexPlan, describe_plan, make_plan

SPEEDS = Speeds(gflops=50.0, disk_bytes_s=500e6, cores=2)
MB = 1 << 20


def plan(n: int, dim: int = 384, *, unit_length: bool = True, **wish: object) -> IndexPlan:
    return make_plan(n, dim, BuildOptions(**wish), unit_length=unit_length, speeds=SPEEDS)  # type: ignore[arg-type]


def refusal(n: int, dim: int = 384, **wish: object) -> EmbqError:
    with pytest.raises(EmbqError) as caught:
        plan(n, dim, **wish)
    return caught.value


# --- codecs ---


@pytest.mark.parametrize("dim", [64, 100, 384, 512, 1000])
def test_the_bytes_of_a_code_are_those_of_faiss(dim: int) -> None:
    import faiss

    names = [
        "Flat",
        "SQfp16",
        "SQbf16",
        "SQ8",
        "SQ6",
        "SQ4",
        "PQ4x4",
        "PQ4x8",
        "PQ4",
        "OPQ4_32,PQ16x4",
        "PCAR48,RaBitQ",
    ]
    names += [f"RaBitQ{bits}" for bits in range(1, 10)] + [f"EDEN{bits}" for bits in range(1, 9)]
    for name in names:
        known = codec(name, dim)
        index = faiss.index_factory(dim, known.factory(8))
        ivf = faiss.extract_index_ivf(index)
        assert (known.code_bytes, known.coded_dim) == (ivf.code_size, ivf.d), name


@pytest.mark.parametrize("metric", ["cosine", "ip"])
@pytest.mark.parametrize("refine", [True, False])
@pytest.mark.parametrize("dim", [1, 7, 16, 64, 100, 384, 511, 768, 1000])
def test_each_codec_choice_is_smaller_than_the_one_before(dim: int, refine: bool, metric: str) -> None:
    import faiss

    choices = list(codec_choices(dim, metric=metric, refine=refine))
    sizes = [choice.code_bytes for choice in choices]
    assert choices
    for choice in choices:
        assert faiss.extract_index_ivf(faiss.index_factory(dim, choice.factory(4))).code_size == choice.code_bytes
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == len(set(sizes))


def file_bytes(chosen: Codec, rows: int, nlist: int, dim: int) -> int:
    import faiss
    import numpy as np

    index = faiss.index_factory(dim, chosen.factory(nlist))
    vectors = np.random.default_rng(0).random((rows, dim), dtype=np.float32)
    faiss.extract_index_ivf(index).cp.min_points_per_centroid = 1
    index.train(vectors)
    index.add(vectors)
    return int(faiss.serialize_index(index).nbytes)


@pytest.mark.parametrize("name", ["SQ8", "RaBitQ4", "RaBitQ", "PCAR16,RaBitQ", "PQ16x4"])
def test_the_bytes_of_an_index_cover_what_faiss_writes_and_little_more(name: str) -> None:
    chosen = codec(name, 32)
    told, written = chosen.index_bytes(4000, 8, 32), file_bytes(chosen, 4000, 8, 32)
    assert written - 6000 < told < 1.2 * written


# --- what is chosen ---


def test_a_single_vector_is_compared_with_everything() -> None:
    chosen = plan(1)
    assert (chosen.key, chosen.nlist, chosen.slices, chosen.train_rows) == ("IVF1,Flat", 1, 1, 1)


def test_more_memory_never_gives_a_coarser_codec() -> None:
    sizes = [plan(1_000_000, max_index_memory_usage=limit * MB).bytes_per_vector_ram for limit in (25, 40, 60, 80, 130)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("limit", [40, 100, 300, 1000])
def test_what_is_chosen_stays_within_the_memory(limit: int) -> None:
    chosen = plan(1_000_000, max_index_memory_usage=limit * MB)
    assert chosen.bytes_per_vector_ram * chosen.n <= limit * MB


def test_building_stays_within_the_memory_that_is_available() -> None:
    chosen = plan(50_000_000, 768, current_memory_available=1500 * MB, workers=2)
    took = {stage.stage: stage.ram_bytes for stage in chosen.stages}
    assert took["train"] <= 1500 * MB
    assert took["add"] <= 750 * MB
    assert took["merge"] <= 1000 * MB
    assert any("lists instead of" in note for note in chosen.notes)


def test_the_number_of_workers_changes_nothing_where_memory_is_ample() -> None:
    one, four = plan(1_000_000, workers=1), plan(1_000_000, workers=4)
    assert one == replace(four, stages=one.stages)


def test_a_slice_stays_small_whatever_the_size() -> None:
    chosen = plan(2_000_000_000, 768, max_index_memory_usage=1 << 40)
    merge = next(stage for stage in chosen.stages if stage.stage == "merge")
    assert merge.ram_bytes < 1000 * MB
    assert merge.units == chosen.slices


@pytest.mark.parametrize(
    ("asked", "unit_length", "metric"),
    [("ip", True, "cosine"), ("ip", False, "ip"), ("l2", True, "l2"), ("l2", False, "l2")],
)
def test_the_metric_is_what_the_vectors_allow(asked: str, unit_length: bool, metric: str) -> None:
    assert plan(20_000, metric=asked, unit_length=unit_length).metric == metric


def test_several_indices_share_the_vectors() -> None:
    limit = 40 * MB
    assert refusal(5_000_000, max_index_memory_usage=limit).code == "index_memory"
    chosen = plan(5_000_000, max_index_memory_usage=limit, nb_indices_to_keep=8)
    assert chosen.indices == 8
    assert chosen.slices >= 8


def test_a_plan_survives_json() -> None:
    chosen = plan(123_456, workers=2)
    assert from_json(IndexPlan, json.loads(json.dumps(to_json(chosen))), "plan") == chosen


def test_the_printed_plan_has_the_key_the_bytes_and_every_stage() -> None:
    chosen = plan(1_000_000, 512)
    text = describe_plan(chosen)
    assert text.startswith(f"{chosen.key} over 1,000,000 vectors of 512 dimensions")
    total = size_text(chosen.bytes_per_vector_ram * chosen.n)
    assert f"{chosen.bytes_per_vector_ram:,.1f} bytes per vector, {total} in all" in text
    for stage in ("sample", "train", "truth", "add", "merge", "tune"):
        assert f"\n{stage} " in text


def test_the_machine_is_measured() -> None:
    speeds = measure_speeds()
    assert speeds.gflops > 0.1
    assert speeds.disk_bytes_s > 1e4
    assert speeds.cores >= 1


# --- keys of the user ---


@pytest.mark.parametrize(
    ("asked", "built"),
    [
        ("Flat", "IVF1,Flat"),
        ("IVF256,Flat", "IVF256,Flat"),
        ("IVF256,SQ8", "IVF256,SQ8"),
        ("IVF1024,PQ96x4", "IVF1024,PQ96x4"),
        ("OPQ128_512,IVF1024_HNSW32,PQ128x8", "OPQ128_512,IVF1024_HNSW32,PQ128x8"),
        ("PCAR192,IVF512,RaBitQ4", "PCAR192,IVF512,RaBitQ4"),
        ("IVF1024(PCA96,Flat),PQ192x4", "IVF1024(PCA96,Flat),PQ192x4"),
        ("PCAR192,IVF1024(PCA96,Flat),PQ96x4", "PCAR192,IVF1024(PCA96,Flat),PQ96x4"),
    ],
)
def test_a_key_that_can_be_merged_is_built_as_written(asked: str, built: str) -> None:
    import faiss

    chosen = plan(1_000_000, index_key=asked)
    assert chosen.key == built
    assert faiss.index_factory(384, chosen.key) is not None


@pytest.mark.parametrize(
    ("asked", "instead"),
    [
        ("HNSW32", "IVF4096,SQ8"),
        ("HNSW15", "IVF4096,SQ8"),
        ("IVF256,PQ96x4fs", "IVF256,PQ96x4"),
        ("IVF256,RaBitQfs", "IVF256,RaBitQ"),
        ("IVF256,SQ8,RFlat", "--index-key IVF256,SQ8 --refine fp16"),
        ("IVF256,RaBitQ,Refine(SQfp16)", "--index-key IVF256,RaBitQ --refine fp16"),
        ("SQ8", "IVF4096,SQ8"),
        ("IDMap,Flat", "Flat"),
        ("IVF256,PQ100x8", "PQ96x8"),
        ("IVF256,Nonsense", "IVF4096,RaBitQ4"),
        ("Nonsense", "IVF4096,RaBitQ4"),
        ("Nonsense,IVF256,SQ8", "IVF4096,RaBitQ4"),
        ("IMI2x8,PQ96x8", "IVF4096,SQ8"),
        ("PCAR0,IVF256,SQ8", "IVF4096,RaBitQ4"),
        ("OPQ8_0,IVF256,PQ8x8", "IVF4096,RaBitQ4"),
        ("IVF256(PCA0,Flat),SQ8", "IVF4096,RaBitQ4"),
        ("", "chosen by the memory allowed"),
    ],
)
def test_a_key_that_cannot_be_built_is_refused_with_one_that_can(asked: str, instead: str) -> None:
    error = refusal(1_000_000, index_key=asked)
    assert isinstance(error, UsageError)
    assert instead in error.next_step


def test_more_lists_than_vectors_are_lowered_and_said() -> None:
    chosen = plan(500, index_key="IVF1024,SQ8")
    assert chosen.nlist == 8
    assert "1024 lists for 500 vectors" in chosen.notes[0]
    assert chosen.notes[0] in describe_plan(chosen)


# --- what is refused ---


def test_nothing_to_index_is_refused() -> None:
    assert refusal(0).code == "no_embeddings"


def test_a_memory_limit_below_the_smallest_index_is_refused_with_ways_that_work() -> None:
    n, dim, given = 1_000_000, 512, 10 * MB
    error = refusal(n, dim, max_index_memory_usage=given)
    assert isinstance(error, InputError)
    assert error.code == "index_memory"
    for number in ("1,000,000 vectors", "512 dimensions", f"{given:,} bytes"):
        assert number in error.message
    limits = [
        part.split()[1]
        for part in error.next_step.split("; ")
        if "max-index" in part
        for part in [part[part.index("--") :]]
    ]
    assert len(limits) == 2
    for limit in limits:
        assert plan(n, dim, max_index_memory_usage=parse_bytes(limit)).n == n
    keep = int(error.next_step.split("--nb-indices-to-keep ")[1].split(",")[0])
    assert plan(n, dim, max_index_memory_usage=given, nb_indices_to_keep=keep).indices == keep


def test_a_key_that_does_not_fit_is_refused_with_one_that_does() -> None:
    error = refusal(1_000_000, index_key="IVF4096,SQ8", max_index_memory_usage=100 * MB)
    assert error.code == "index_memory"
    key = error.next_step.split("--index-key ")[1].split(", which")[0]
    assert plan(1_000_000, index_key=key, max_index_memory_usage=100 * MB).key == key


def test_a_build_that_no_memory_is_left_for_is_refused_with_what_it_needs() -> None:
    error = refusal(1_000_000, 512, current_memory_available=300 * MB, workers=2)
    assert error.code == "build_memory"
    needed = error.next_step.split("--current-memory-available ")[1].rstrip(".").split(";")[0]
    assert plan(1_000_000, 512, current_memory_available=parse_bytes(needed), workers=2).n == 1_000_000


@pytest.mark.parametrize(
    "wish",
    [
        {"max_index_memory_usage": 0},
        {"current_memory_available": -1},
        {"nb_indices_to_keep": 0},
        {"workers": 0},
        {"metric": "cos"},
        {"refine": "yes"},
        {"recall": 1.5},
        {"recall": 0.0},
        {"recall_at": 0},
        {"max_index_query_time_ms": 0.0},
        {"min_nearest_neighbors_to_retrieve": 0},
    ],
)
def test_an_option_without_meaning_is_refused(wish: dict[str, object]) -> None:
    error = refusal(1000, **wish)
    assert isinstance(error, UsageError)
    assert error.next_step


# --- how sizes and targets are written ---


def test_sizes_are_read_as_autofaiss_writes_them() -> None:
    assert [parse_bytes(text) for text in ("16G", "500MB", "1.5k", "64MiB", "7")] == [
        16 << 30,
        500 * MB,
        1536,
        64 * MB,
        7,
    ]
    for text in ("", "G", "-1G", "1X", "1e9", "nan"):
        with pytest.raises(UsageError):
            parse_bytes(text)


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 99_999_999, 17_179_869_184, 28_117_738_497, 10**13 + 1])
def test_a_printed_size_is_enough_when_it_is_given(count: int) -> None:
    assert count <= parse_bytes(bytes_text(count)) <= count * 1.02 + 1


def test_targets_are_read() -> None:
    assert parse_recall("0.95@10") == (0.95, 10)
    assert parse_recall("0.9") == (0.9, 10)
    assert parse_recall("1@1") == (1.0, 1)
    for text in ("95@10", "0@10", "0.9@0", "@10", "high", "0.9@"):
        with pytest.raises(UsageError):
            parse_recall(text)


def test_the_memory_of_a_container_bounds_a_build(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n")
    own = tmp_path / "own"
    own.write_text("0::/job\n")
    assert available_memory(tmp_path, meminfo, own) == 32 << 30
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_memory(tmp_path, meminfo, own) == 32 << 30
    (tmp_path / "memory.max").write_text(f"{4 << 30}\n")
    assert available_memory(tmp_path, meminfo, own) == (4 << 30) - 1000
    (tmp_path / "job").mkdir()
    (tmp_path / "job/memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "job/memory.current").write_text("0\n")
    assert available_memory(tmp_path, meminfo, own) == 1 << 30  # of a job of Slurm, or a unit of systemd
    meminfo.write_text("MemAvailable: 1000 kB\n")
    assert available_memory(tmp_path, meminfo, own) == 1_024_000
