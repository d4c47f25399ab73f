"""`build_index` with the arguments and examples of autofaiss' documentation, searched by faiss alone."""

from __future__ import annotations

import glob
import inspect
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.app.cli.entry_point import cli, run
from embq.compat.autofaiss import UNSUPPORTED, build_index, build_index_command
from embq.core.errors import EmbqError, Exit, InputError, TryLaterError, UsageError
from embq.index.index_files.files import index_lock
from tests.indexer.indexes_that_grow import rows
from tests.support.lazy import lazy

faiss = lazy("faiss")


NAMES = [
    "embeddings",
    "index_path",
    "index_infos_path",
    "ids_path",
    "save_on_disk",
    "file_format",
    "embedding_column_name",
    "id_columns",
    "index_key",
    "index_param",
    "max_index_query_time_ms",
    "max_index_memory_usage",
    "min_nearest_neighbors_to_retrieve",
    "current_memory_available",
    "use_gpu",
    "metric_type",
    "nb_cores",
    "make_direct_map",
    "should_be_memory_mappable",
    "distributed",
    "temporary_indices_folder",
    "verbose",
    "nb_indices_to_keep",
]
"""Arguments of `build_index` of autofaiss 2.18, in its order."""
KEYS = (
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
)
RANDOM = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Examples use relative paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def build(embeddings: Any, **options: Any) -> Any:
    return build_index(embeddings, verbose=logging.ERROR, **options)


def nearest(vectors: np.ndarray, queries: np.ndarray, k: int = 5) -> np.ndarray:
    """Ids of the largest inner products."""
    return np.argsort(-(queries.astype(np.float64) @ vectors.T.astype(np.float64)), axis=1)[:, :k]


def test_the_arguments_are_those_of_autofaiss() -> None:
    found = inspect.signature(build_index).parameters
    assert list(found) == [*NAMES, "drop_invalid"]
    assert (found["max_index_memory_usage"].default, found["current_memory_available"].default) == ("16G", "32G")
    assert set(UNSUPPORTED) < set(NAMES)
    page = Path(__file__).parents[2].joinpath("docs/how-to/index/from-autofaiss.md").read_text(encoding="utf-8")
    assert not [name for name in NAMES if f"`{name}`" not in page]


def test_one_of_several_folders_may_be_empty(here: Path) -> None:
    for name in ("empty", "full"):
        Path(name).mkdir()
    np.save("full/0.npy", RANDOM.random((100, 32)).astype(np.float32))
    assert build(["empty", "full"], save_on_disk=False)[0].ntotal == 100
    with pytest.raises(InputError, match="no files"):
        build(["empty"], save_on_disk=False)
    Path("empty/notes.txt").touch()
    with pytest.raises(InputError, match="empty holds no files that end in"):
        build(["empty", "full"], save_on_disk=False)


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_a_row_of_zeros_is_indexed_and_others_that_cannot_be_have_a_way_out(
    here: Path, capsys: pytest.CaptureFixture[str], metric: str
) -> None:
    embeddings = RANDOM.standard_normal((300, 32)).astype(np.float32)
    embeddings[7] = 0.0
    index, _ = build(embeddings, save_on_disk=False, metric_type=metric)
    assert index.ntotal == 300
    assert 7 in (index.search(embeddings[7:8], 300)[1] if metric == "l2" else index.search(embeddings[:1], 300)[1])
    embeddings[8] = np.nan
    with pytest.raises(InputError, match="1 of 300 vectors") as raised:
        build(embeddings, save_on_disk=False, metric_type=metric)
    assert raised.value.code == "bad_vectors"
    assert build(embeddings, save_on_disk=False, metric_type=metric, drop_invalid=True)[0].ntotal == 299
    Path("e").mkdir()
    np.save("e/0.npy", embeddings)
    command = ["build_index", "--embeddings", "e", "--index_path", "k.index", "--index_infos_path", "i.json"]
    command += ["--metric_type", metric]
    assert run(command) == Exit.BAD_INPUT
    assert "--drop-invalid" in capsys.readouterr().err
    assert run([*command, "--drop_invalid"]) == Exit.DONE
    assert faiss.read_index("k.index").ntotal == 299


def test_an_array_becomes_an_index_in_memory(here: Path) -> None:
    embeddings = np.float32(RANDOM.random((100, 512)))
    index, infos = build(embeddings, save_on_disk=False)
    numbers = {"nb_indices_to_keep": np.int64(1), "nb_cores": np.int64(1), "max_index_query_time_ms": np.float32(9)}
    assert build(embeddings, save_on_disk=False, **numbers)[0].ntotal == 100
    queries = np.float32(RANDOM.random((3, 512)))
    found, ids = index.search(queries, 5)
    assert np.array_equal(ids, nearest(embeddings, queries))
    assert np.allclose(found[:, 0], (queries @ embeddings.T).max(axis=1), rtol=1e-5)
    assert tuple(infos)[:10] == KEYS
    assert json.loads(json.dumps(infos)) == infos
    assert not list(here.iterdir())


def test_files_of_npy_become_a_file_and_its_infos(here: Path) -> None:
    embeddings = RANDOM.random((1000, 100))
    (here / "embeddings").mkdir()
    np.save("embeddings/part1.npy", embeddings)
    index, infos = build(
        embeddings="embeddings",
        index_path="my_index_folder/knn.index",
        index_infos_path="my_index_folder/index_infos.json",
        max_index_memory_usage="4G",
        current_memory_available="4G",
    )
    assert sorted(path.name for path in Path("my_index_folder").iterdir()) == ["index_infos.json", "knn.index"]
    my_index = faiss.read_index(glob.glob("my_index_folder/*.index")[0])
    query = np.float32(RANDOM.random((1, 100)))
    assert np.array_equal(my_index.search(query, 5)[1], nearest(embeddings, query))
    assert (my_index.ntotal, index.ntotal, infos["nb vectors"]) == (1000, 1000, 1000)
    assert json.loads(Path("my_index_folder/index_infos.json").read_text()) == infos
    assert infos["size in bytes"] == Path(infos["index_path"]).stat().st_size


def test_an_index_is_mapped_and_rows_of_several_folders_have_the_ids_of_sorted_paths(here: Path) -> None:
    embeddings = np.float32(RANDOM.random((300, 20)))
    for name, start in (("b", 200), ("a", 0)):
        (here / name).mkdir()
        np.save(here / name / "x.npy", embeddings[start : start + 200])
    index, _ = build(
        ["b", here / "a"], should_be_memory_mappable=True, index_path="i/knn.index", max_index_query_time_ms=50
    )
    again = faiss.read_index("i/knn.index", faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    for one in (index, again):
        assert np.array_equal(one.search(embeddings[:9], 5)[1], nearest(embeddings, embeddings[:9]))


def test_columns_of_parquet_files_are_written_with_the_ids(here: Path) -> None:
    (here / "data").mkdir()
    embeddings = np.float32(RANDOM.random((60, 8)))
    for part in range(2):
        here_rows = range(30 * part, 30 * part + 30)
        table = pa.table({"id": [f"k{row}" for row in here_rows], "n": here_rows, "v": list(embeddings[here_rows])})
        pq.write_table(table, here / f"data/{part}.parquet")
    options = {"file_format": "parquet", "embedding_column_name": "v", "id_columns": ["id", "n"], "ids_path": "ids"}
    for _ in range(2):
        build("data", **options)
    found = pq.read_table("ids").to_pylist()
    assert found == [{"id": f"k{row}", "n": row, "i": row} for row in range(60)]
    (here / "ids" / "mine").touch()
    (here / "knn.index").write_bytes(b"mine")
    with pytest.raises(UsageError, match="ids holds mine"):
        build("data", **options)
    assert (here / "knn.index").read_bytes() == b"mine", "it is refused before it builds"
    with index_lock(here / ".knn.index.embq"), pytest.raises(TryLaterError, match="another embq process"):
        build("missing")
    shutil.rmtree(here / ".knn.index.embq")
    assert sorted(path.name for path in here.iterdir()) == ["data", "ids", "index_infos.json", "knn.index"]


def test_several_indices_answer_together_as_one(here: Path) -> None:
    vectors = rows(600, 1).astype(np.float32)
    index, infos = build(
        vectors, index_key="IVF8,Flat", nb_indices_to_keep=3, index_path="k.index", index_infos_path="i.json"
    )
    assert (index, [Path(path).name for path in infos]) == (None, ["k.index0", "k.index1", "k.index2"])
    assert json.loads(Path("i.json1").read_text()) == list(infos.values())[1]
    assert sum(one["nb vectors"] for one in infos.values()) == 600
    found = [faiss.read_index(path).search(vectors[:9], 5) for path in sorted(infos)]
    scores, ids = (np.concatenate(part, axis=1) for part in zip(*found, strict=True))
    best = np.argsort(-np.where(ids < 0, -np.inf, scores), axis=1)[:, :5]
    assert np.mean(np.take_along_axis(ids, best, axis=1) == nearest(vectors, vectors[:9])) > 0.9


@pytest.mark.parametrize(("count", "kept"), [(3, 3), (10, 3), (50, 3), (50, 7), (200, 3), (200, 40)])
def test_a_small_collection_is_kept_in_as_many_indices_as_asked(here: Path, count: int, kept: int) -> None:
    vectors = rows(count, 1).astype(np.float32)
    _, infos = build(vectors, nb_indices_to_keep=kept, index_path="k.index")
    assert len(infos) == kept
    found = [faiss.read_index(path) for path in infos]
    assert sum(one.ntotal for one in found) == count
    for one in found:
        one.nprobe = one.nlist
    answers = [one.search(vectors, 1) for one in found]
    best = np.argmax([scores[:, 0] for scores, _ in answers], axis=0)
    assert np.array([ids[:, 0] for _, ids in answers])[best, range(count)].tolist() == [*range(count)]


def test_vectors_are_reconstructed_by_a_direct_map(here: Path) -> None:
    vectors = np.asfortranarray(rows(300, 2), dtype=np.float64)
    options = {"index_key": "Flat", "metric_type": "l2", "nb_cores": 1, "make_direct_map": True}
    index, infos = build(vectors, **options)
    mapped, _ = build(vectors, should_be_memory_mappable=True, index_path="mapped.index", **options)
    for one in (index, faiss.read_index("knn.index"), mapped, faiss.read_index("mapped.index")):
        assert np.allclose(one.reconstruct(7), vectors[7], atol=1e-6)
    assert index.search(np.float32(vectors[:1]), 2)[0][0, 0] == pytest.approx(0, abs=1e-6)
    assert (infos["index_key"], index.metric_type) == ("IVF1,Flat", faiss.METRIC_L2)
    assert infos["size in bytes"] == Path(infos["index_path"]).stat().st_size
    with pytest.raises(UsageError, match=r"direct map of .* rows takes"):
        build(vectors, **options, max_index_memory_usage="1K")


def test_an_interrupted_call_is_continued_by_the_same_call(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "data").mkdir()
    np.save("data/x.npy", rows(50, 3))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("embq.index.faiss_file.write_faiss_file", killed)
        with pytest.raises(KeyboardInterrupt):
            build("data")
    assert len(list(here.glob(".*"))) == 1
    with monkeypatch.context() as patched:
        patched.setattr("embq.index.stages.runners.InProcess.run", killed)  # all units are done
        index, _ = build("data")
    assert index.ntotal == 50
    assert sorted(path.name for path in here.iterdir()) == ["data", "index_infos.json", "knn.index"]


@pytest.mark.parametrize(
    ("options", "next_step"),
    [
        ({"index_param": "nprobe=3"}, "set_index_parameters"),
        ({"use_gpu": True}, "embq worker"),
        ({"distributed": "pyspark"}, "redis://"),
        ({"temporary_indices_folder": "hdfs://root/tmp/other"}, "folder of this machine"),
        ({"index_path": "s3://bucket/knn.index"}, "path of this machine"),
        ({"index_infos_path": "gs://bucket/infos.json"}, "path of this machine"),
        ({"ids_path": "s3://bucket/ids", "id_columns": ["id"], "file_format": "parquet"}, "folder of this machine"),
        ({"id_columns": ["id"]}, "file_format='parquet'"),
        ({"ids_path": "ids"}, "file_format='parquet'"),
        ({"index_path": None}, "give both"),
        ({"nb_indices_to_keep": 2, "save_on_disk": False}, "save_on_disk"),
        ({"nb_indices_to_keep": 2, "make_direct_map": True}, "make_direct_map"),
        ({"metric_type": "cosine"}, "metric-type ip"),
        ({"index_key": "HNSW32"}, "IVF1"),
        ({"max_index_memory_usage": "1K"}, "max-index-memory-usage"),
        ({"file_format": "parquet"}, "a folder with embeddings"),
        ({"nb_cores": -1}, "threads"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name_before_any_file_is_written(
    here: Path, options: dict[str, Any], next_step: str
) -> None:
    (here / "data").mkdir()
    np.save("data/x.npy", rows(50, 3))
    with pytest.raises(EmbqError) as refused:
        build("data", **options)
    assert next_step in refused.value.next_step
    assert [path.name for path in here.iterdir()] == ["data"]


@pytest.mark.parametrize("array", [np.ones((4, 8), int), np.ones(8, np.float32), np.ones((0, 8), np.float32)])
def test_an_array_that_is_no_matrix_of_floats_is_refused(array: np.ndarray) -> None:
    with pytest.raises(InputError, match="rows of floats") as refused:
        build(array)
    assert refused.value.code == "not_vectors"


@pytest.mark.parametrize("embeddings", [None, [], [[1.0, 2.0]]])
def test_what_is_neither_array_nor_path_is_refused(here: Path, embeddings: Any) -> None:
    with pytest.raises(UsageError, match="neither an array nor paths"):
        build(embeddings)


@pytest.mark.parametrize("refuses", [False, True])
def test_tensors_and_frames_are_taken_as_arrays(here: Path, refuses: bool) -> None:
    class Tensor:
        """As one of torch, whose dtype is none of numpy's."""

        dtype = "torch.float32"

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            if refuses:
                raise RuntimeError("it requires a gradient")
            return np.float32(rows(50, 3))

    if refuses:
        with pytest.raises(InputError, match="it requires a gradient"):
            build(Tensor())
    else:
        assert build(Tensor())[0].ntotal == 50


# --- the command ---


def test_the_command_of_its_documentation_runs_unedited(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "embeddings").mkdir()
    np.save("embeddings/part1.npy", RANDOM.random((100, 20)))
    typed = (
        "--embeddings=embeddings --index_path=my_index_folder/knn.index "
        "--index_infos_path=my_index_folder/index_infos.json --metric_type=ip --json"
    )
    assert run(["autofaiss", "build_index", *typed.split()]) == Exit.DONE
    (infos,) = json.loads(capfd.readouterr().out)["indices"]
    assert json.loads(Path("my_index_folder/index_infos.json").read_text()) == infos
    assert faiss.read_index("my_index_folder/knn.index").metric_type == faiss.METRIC_INNER_PRODUCT
    assert sorted(path.name for path in here.iterdir()) == ["embeddings", "my_index_folder"]


def arguments(*typed: str) -> dict[str, Any]:
    """Arguments of `build_index` that are given by a command line of autofaiss."""
    root = cli.make_context("embq", ["build_index"])
    with build_index_command.make_context("build_index", list(typed), parent=root) as context:
        return {name: value for name, value in context.params.items() if value is not None}


def test_options_are_understood_in_either_spelling_and_as_lists() -> None:
    typed = "--embeddings=['a','b'] --save_on_disk --use-gpu=False --nb_cores 3 --verbose=30 --index_key=None"
    typed += " --nomake_direct_map"
    assert arguments(*typed.split(), "--id_columns", '["id", "n"]', "--max_index_memory_usage=4G") == {
        "embeddings": ["a", "b"],
        "save_on_disk": True,
        "use_gpu": False,
        "nb_cores": 3,
        "verbose": 30,
        "make_direct_map": False,
        "id_columns": ["id", "n"],
        "max_index_memory_usage": "4G",
        "as_json": False,
        "quiet": False,
    }
    assert arguments("--embeddings", "a", "--id_columns=id,n", "--distributed", "redis://box")["id_columns"] == [
        "id",
        "n",
    ]
    with pytest.raises(click.NoSuchOption, match="--recall"):
        arguments("--embeddings=a", "--recall=0.9")
    with pytest.raises(click.NoSuchOption, match="--index-kye"):
        arguments("--embeddings=a", "--index_kye=None")
    with pytest.raises(UsageError, match="password"):
        arguments("--embeddings=a", "--distributed=redis://:secret@box")


def test_an_option_has_the_name_and_the_help_of_its_argument() -> None:
    options = {param.name: param for param in build_index_command.params if isinstance(param, click.Option)}
    assert list(options)[:24] == [*NAMES, "drop_invalid"]
    assert all(option.help for option in options.values())
