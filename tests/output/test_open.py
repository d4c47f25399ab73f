"""`embq.open`: the same rows as tables, arrays, tensors and searches, whatever the format of the run."""

from __future__ import annotations

import ctypes
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import embq
from embq.app.cli import entry_point
from embq.app.output.output import Output
from embq.core.errors import InputError, OutputError, UsageError
from embq.core.rows.spec import RowSpec
from embq.core.run.reader import row_tables
from tests.support.outputs.build import build, write_jsonl
from tests.ui.outputs import write_photographs, write_texts

FORMATS = ("parquet", "hdf5", "npy", "arrow")


def written(folder: Path, **options: Any) -> Output:
    """A run of 300 texts with a number each, one of them blank, in parts of 100."""
    lines = [{"id": f"k{n}", "text": f"text {n}" if n != 7 else " ", "n": n} for n in range(300)]
    options = {"model": "stub:16", "unit_samples": 50, **options}
    return embq.open(build(folder / "out", [write_jsonl(folder / "t.jsonl", lines)], **options))


def stored(out: Output) -> np.ndarray:
    """What the engine's own reader gives."""
    blocks = [np.stack(table["embedding"].to_pylist()) for table in row_tables(out.root)]
    return np.concatenate(blocks)


@pytest.mark.parametrize("format_", FORMATS)
def test_rows_are_those_of_the_run_in_every_form(tmp_path: Path, format_: str) -> None:
    out = written(tmp_path, format=format_)
    expected = stored(out)
    assert len(out) == 299
    assert out.complete
    np.testing.assert_array_equal(out.vectors(), expected)
    mapped = out.vectors(mmap=True)
    assert isinstance(mapped, np.memmap)
    np.testing.assert_array_equal(mapped, expected)
    assert out.vectors(dtype=np.float32).dtype == np.float32

    rows = list(out.rows())
    assert [row["id"] for row in rows] == list(range(299))
    np.testing.assert_array_equal(np.stack([row["embedding"] for row in rows]), expected)
    assert next(out.rows(["key"])) == {"key": "k0"}
    assert out.table(["key", "id"]).column_names == ["key", "id"]

    batches = list(out.torch(batch_size=64, columns=["key"]))
    assert [len(batch["id"]) for batch in batches] == [64, 64, 64, 64, 43]
    np.testing.assert_array_equal(np.concatenate([batch["embedding"].numpy() for batch in batches]), expected)
    assert [key for batch in batches for key in batch["key"]] == [row["key"] for row in rows]


@pytest.mark.parametrize("format_", ["parquet", "npy"])
def test_an_output_on_an_object_store_reads_the_same(s3: str, tmp_path: Path, format_: str) -> None:
    local = written(tmp_path, format=format_)
    far = f"s3://bucket/{tmp_path.name}/out"
    fsspec.filesystem("s3", endpoint_url=s3).put(f"{local.root}/", far, recursive=True)
    for out in (embq.open(far), embq.open(Path(local.root))):
        np.testing.assert_array_equal(out.vectors(), stored(local))
        np.testing.assert_array_equal(out.vectors(mmap=True), stored(local))
        assert out.table().equals(local.table())
        assert out.failures().equals(local.failures())
        batches = list(out.torch(batch_size=100))
        np.testing.assert_array_equal(np.concatenate([one["embedding"].numpy() for one in batches]), stored(local))


def test_conditions_and_failures(tmp_path: Path) -> None:
    out = written(tmp_path)
    assert [row["key"] for row in out.rows(["key"], where=['key = "k9"'])] == ["k9"]
    assert out.table(["id"], where=[("id", "<", 5), ("key", "in", ["k3", "k200"])]).num_rows == 1
    with pytest.raises(InputError, match="no column 'x'"):
        out.table(where=["x = 1"])
    with pytest.raises(InputError, match="no column y"):
        out.table(["y"])
    (failure,) = out.failures().to_pylist()
    assert (failure["key"], failure["code"]) == ("k7", "empty_text")
    assert failure["source"].endswith("t.jsonl")


def test_vectors_of_integers_are_restored(tmp_path: Path) -> None:
    out = written(tmp_path, rows=RowSpec(dtype="int8", normalize=True))
    vectors = out.vectors()
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=0.05)
    np.testing.assert_array_equal(out.vectors(mmap=True), vectors)


def test_loader_workers_share_the_rows_out(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    out = written(tmp_path, format="npy")
    heard = signal.getsignal(signal.SIGCHLD)
    loader = DataLoader(out.torch(batch_size=32), batch_size=None, num_workers=2)
    try:
        assert sorted(id_ for batch in loader for id_ in batch["id"].tolist()) == list(range(299))
    finally:  # torch's handler raises wherever a later test is when its loader worker is killed
        signal.signal(signal.SIGCHLD, heard)


def test_other_packages_get_all_rows(tmp_path: Path) -> None:
    out = written(tmp_path)
    frame = out.to_pandas(["id", "key", "embedding"])
    np.testing.assert_array_equal(np.stack(frame["embedding"]), stored(out))
    assert "text 3" in out.to_pandas()["caption"].tolist()
    assert "299" in out._repr_html_()
    pytest.importorskip("polars")
    assert out.to_polars(["id"]).height == 299


def test_an_index_answers_many_queries(tmp_path: Path) -> None:
    root = write_texts(tmp_path)
    texts = [f"an ordinary text, number {i}" for i in (3, 50, 99)]
    with embq.open(root).index() as index:
        found = index.search(texts, k=2)
        assert [one[0].caption for one in found] == texts
        assert index.search(texts[0], k=1)[0].key == found[0][0].key
        assert index.search(texts[0], k=np.int64(1), nprobe=np.int64(2))[0].key == found[0][0].key
        vectors = embq.open(root).vectors()[[one[0].id for one in found]]
        assert [one[0].id for one in index.search(vectors, k=1)] == [one[0].id for one in found]
        html = index.search("x", k=len(index))._repr_html_()
        assert "&lt;i&gt;" in html
        assert not re.search("<(script|svg|img|i)", html)
        with pytest.raises(InputError):
            index.search(np.ones((1, 3)))


def test_an_open_index_and_search_answer_alike(tmp_path: Path) -> None:
    root = write_texts(tmp_path)
    text, vector = "an ordinary text, number 50", embq.open(root).vectors()[7]
    with embq.open(root).index() as index:
        for query, options in [
            (text, {}),
            (text, {"offset": 5, "refine": False, "nprobe": 2}),
            (text, {"where": [("key", "!=", index.search(text, k=1)[0].key)]}),
            (text, {"like": [3], "unlike": [4, 5]}),
            (None, {"vector": vector}),
            (None, {"vector": vector.tolist(), "like": [3]}),
            (None, {"id": 7}),
            (None, {"like": (7,)}),
        ]:
            answer = index.search(query, 4, **options)
            assert answer == embq.search(root, query, k=4, **options)
            assert len(answer) == 4
        nearest = index.search(text, k=4)
        for name, values in (("like", [3]), ("where", [("key", "!=", nearest[0].key)])):
            expected = index.search(text, 4, **{name: values})
            assert expected != nearest
            assert embq.search(root, text, k=4, **{name: iter(values)}) == expected
            assert index.search([text, text], 4, **{name: iter(values)}) == [expected] * 2
        assert "text" in nearest._repr_html_()
        assert type(embq.search(root, text)) is list  # whose index is closed, so a notebook cannot draw it
        assert [result.rank for result in index.search([text], k=2, offset=3)[0]] == [4, 5]
        assert 7 not in [result.id for result in index.search(id=7, k=9)]
        for options in ({"id": 3}, {"vector": vector}, {"image": b"x"}):
            with pytest.raises(UsageError, match="`queries` and `"):
                index.search([text], **options)
        with pytest.raises(UsageError, match="no query is given"):
            index.search()
        with pytest.raises(UsageError, match="a prompt is given without a text"):
            index.search(vector[None], prompt="query: ")


def test_queries_come_in_any_form(tmp_path: Path) -> None:
    root = write_texts(tmp_path)
    texts, vectors = ["an ordinary text, number 7", "an ordinary text, number 50"], embq.open(root).vectors()[:2]
    each = [embq.search(root, text, k=3) for text in texts]
    by_vector = embq.search(root, vector=vectors[0], k=3)
    with embq.open(root).index() as index:
        for search in (partial(embq.search, root), index.search):
            assert search(texts, k=3) == search(iter(texts), k=3) == search(np.array(texts), k=3) == each
            for vector in (vectors[0], vectors[0].tolist(), tuple(vectors[0]), list(vectors[0])):
                assert search(vector, k=3) == by_vector
            assert search(vectors, k=3)[0] == search(list(vectors), k=3)[0] == by_vector
            assert search([], k=3) == []
            for whole in (float, np.float32, np.int64, Fraction):
                options = {name: whole(1) for name in ("id", "k", "offset", "nprobe")}
                assert search(**options) == search(id=1, k=1, offset=1, nprobe=1)
                assert search(like=[whole(1)], unlike=[whole(2)]) == search(like=[1], unlike=[2])
            for name in ("id", "k", "offset", "nprobe", "like", "unlike"):
                for value in (
                    2.5,
                    float("nan"),
                    float("inf"),
                    "2",
                    b"",
                    [1],
                    {} if name in ("id", "nprobe") else None,
                ):
                    with pytest.raises(UsageError, match=f"{name} is "):
                        search(texts[0], **{name: [value] if name.endswith("like") else value})
            for query in (3, 2.5, {"text": "a"}, object()):
                with pytest.raises(UsageError, match=f"is .*of type {type(query).__name__}"):
                    search(query)


def test_a_built_index_is_open(tmp_path: Path) -> None:
    root = write_texts(tmp_path)
    text = "an ordinary text, number 50"
    with embq.build_index(root, tmp_path / "apart", recall=0.9) as index:
        assert index.search(text, k=1)[0].caption == text
    with embq.Index(tmp_path / "apart") as again:
        assert len(again) == embq.open(root).rows_count
    with embq.add_to_index(root, tmp_path / "apart") as index:
        assert len(index) == embq.open(root).rows_count
    with pytest.raises(UsageError, match="no option recall"):
        embq.add_to_index(root, recall=0.9)
    with pytest.raises(UsageError, match="no option metrics"):
        embq.build_index(root, metrics="l2")
    with pytest.raises(UsageError, match="metric_type="):
        embq.build_index(root, metric_type="cos")
    for call in (lambda: again.search(vector=[1.0] * 8), lambda: again.pictures([0])):
        with pytest.raises(UsageError, match="the index is closed"):
            call()


def test_results_over_images_have_thumbnails(tmp_path: Path) -> None:
    root = write_photographs(tmp_path, 12)
    with embq.open(root).index("image") as index:
        html = index.search(embq.open(root).vectors("image")[:1], k=3)[0]._repr_html_()
    assert html.count("src='data:image/jpeg;base64,") == 3


@contextmanager
def without_privileges() -> Iterator[None]:
    """A block in which the permissions of files hold for this thread, also if it is root's."""
    header, capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, capabilities) == 0
    effective = capabilities[0]
    try:
        capabilities[0] = effective & ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
        assert libc.capset(header, capabilities) == 0
        yield
    finally:
        capabilities[0] = effective
        assert libc.capset(header, capabilities) == 0


@pytest.fixture(scope="module")
def readable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a failure, and its index."""
    root = Path(str(written(tmp_path_factory.mktemp("readable")).root))
    assert entry_point.run(["index", str(root), "-q"]) in (0, 3)
    return root


READERS = {
    "search": ("index", "index/text", "index/text/CURRENT", "index/text/v0001/version.json", "index/text/files"),
    "verify": ("run.json", "manifest", "commits", "parts", "failures"),
    "export": ("run.json", "manifest", "commits", "commits/00000001.json", "parts", "parts/*.parquet"),
    "status": ("run.json", "manifest", "commits", "control.json"),
    "failures": ("run.json", "commits", "failures", "failures/*.parquet"),
    "index": ("run.json", "parts", "parts/*.parquet"),
    "atlas": ("index",),
    "serve": ("index",),
    "python": ("run.json", "commits", "parts", "parts/*.parquet"),
}
"""What reads an output -> names in it that it reads."""


@pytest.mark.parametrize(("verb", "name"), [(verb, name) for verb, names in READERS.items() for name in names])
def test_what_may_not_be_read_is_called_neither_damaged_nor_not_writable(
    readable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, name: str
) -> None:
    path = next(readable.glob(name))
    words = {
        "search": ("search", readable, "text 1"),
        "export": ("export", readable, tmp_path / "new", "--output-format", "npy"),
        "index": ("index", readable, "-o", tmp_path / "new", "-q"),
    }.get(verb, (verb, readable))
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        with without_privileges():
            if verb == "python":
                with pytest.raises(OutputError) as raised:
                    embq.open(readable).table()
                assert (raised.value.code, raised.value.next_step) == ("not_readable", "give read permission")
                return
            status = entry_point.run(list(map(str, words)))
    finally:
        path.chmod(mode)
    told = capsys.readouterr().err
    assert status == 74, told
    assert "error[not_readable]" in told
    assert str(path) in told
    assert "Permission denied" in told
    assert "give read permission" in told


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        embq.open(tmp_path)


FLAGS = {"progress", "show_progress_bar", "convert_to_numpy", "convert_to_tensor", "normalize_embeddings", "mmap"}
"""Parameters of which the truth counts, whatever the type."""

NO_ARGUMENTS = {"self", "options", "rest", "total"} | FLAGS
SLOW = ("build_index", "add_to_index")
"""Functions that work for long where an argument is taken after all: they get one of another type only."""

ODD = [object(), None, -1, 2.5, b"x", "nosuch", ["a", 5], {"a"}]


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Output:
    lines = [{"id": f"k{n}", "text": f"text {n}"} for n in range(8)]
    folder = tmp_path_factory.mktemp("indexed")
    out = embq.open(build(folder / "out", [write_jsonl(folder / "t.jsonl", lines)], model="stub:8"))
    embq.build_index(out)
    return out


def calls(out: Output) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Functions of `import embq` that start no process, and arguments with which they succeed."""
    model, index = embq.Model("stub:8", device="cpu"), embq.Index(out)
    pair = {"first": [1.0, 2.0], "second": [1, 2]}
    return {
        "embed": (embq.embed, {"data": {"t": ["a"]}, "model": "stub:8", "text_column": "t", "device": "cpu"}),
        "search": (embq.search, {"index": out, "text": "a"}),
        "open": (embq.open, {"path": out}),
        "build_index": (embq.build_index, {"source": out}),
        "add_to_index": (embq.add_to_index, {"source": out}),
        "Model": (lambda **given: embq.Model(**given).encode("a"), {"spec": "stub:8", "device": "cpu"}),
        "Model.encode": (model.encode, {"inputs": ["a"]}),
        "Model.vectors": (model.vectors, {"items": ["a"]}),
        "Model.similarity": (model.similarity, pair),
        "Model.similarity_pairwise": (model.similarity_pairwise, pair),
        "Index": (embq.Index, {"path": out}),
        "Index.search": (index.search, {"queries": "a"}),
        "Index.pictures": (index.pictures, {"ids": [0]}),
        "Output.tables": (lambda **given: list(out.tables(**given)), {}),
        "Output.rows": (lambda **given: list(out.rows(**given)), {}),
        "Output.table": (out.table, {}),
        "Output.to_pandas": (out.to_pandas, {}),
        "Output.vectors": (out.vectors, {}),
        "Output.torch": (lambda **given: list(out.torch(**given)), {}),
        "Output.index": (out.index, {}),
    }


OF = {
    "Model": embq.Model,
    "Output.tables": Output.tables,
    "Output.rows": Output.rows,
    "Output.torch": Output.torch,
    "Index.search": embq.search,
}
"""Function -> that which has its parameters."""


def test_an_argument_of_another_type_is_refused_by_its_name(indexed: Output) -> None:
    faults = []
    for function, (call, given) in calls(indexed).items():
        call(**given)
        names = {*signature(OF.get(function, call)).parameters, *given}
        if function == "Index.search":
            names -= {"index", "text", "name", "vector_name"}
        for name, odd in (
            (name, odd) for name in sorted(names - NO_ARGUMENTS) for odd in ODD[: 1 if function in SLOW else None]
        ):
            try:
                call(**{**given, name: odd})
            except embq.EmbqError as error:
                if type(odd) is object and name not in f"{error.message} {error.next_step}":
                    faults.append(f"{function}({name}={odd!r}): {error}")
            except Exception as error:  # noqa: BLE001 - any other is the fault
                faults.append(f"{function}({name}={odd!r}): {type(error).__name__}: {error}")
            else:
                if type(odd) is object and (function, name) != ("Model.encode", "device"):
                    faults.append(f"{function}({name}={odd!r}) is taken")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"where": 5}, "where is 5, of type int"),
        ({"like": 5}, "like is 5, of type int"),
        ({"text": None, "image": 5}, "image is 5, of type int"),
        ({"text": ["a", 5]}, "item 1 of the queries is 5, of type int"),
        ({"text": {"a", "b"}}, "queries is a set, which has no order"),
        ({"nprobe": -1}, "nprobe is -1"),
        ({"prompt_name": "x"}, "leave out prompt_name= and prompt="),
    ],
)
def test_a_search_says_what_is_wrong_with_it(indexed: Output, options: dict[str, Any], said: str) -> None:
    with pytest.raises(embq.EmbqError) as raised:
        embq.search(indexed, **{"text": "a", **options})
    assert said in f"{raised.value.message} {raised.value.next_step}"
    assert raised.value.__notes__ == [f"next: {raised.value.next_step}"]


@pytest.mark.parametrize("size", [0, -1])
def test_batches_have_a_row_or_more(indexed: Output, size: int) -> None:
    with pytest.raises(UsageError, match=f"batch_size is {size}"):
        indexed.torch(batch_size=size)
    if size < 0:
        with pytest.raises(UsageError, match=f"batch_size is {size}"):
            embq.Model("stub:8", batch_size=size)


def test_an_opened_output_is_taken_for_its_folder(indexed: Output) -> None:
    assert embq.search(indexed, id=0) == embq.search(indexed.root, id=0)
    assert embq.open(indexed).root == indexed.root
