"""One question to an index: `embq search` and `embq.search`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import embq
from embq.app.cli.entry_point import run
from embq.core.errors import EmbqError, Exit, InputError, ModelError
from embq.core.rows.spec import RowSpec
from embq.index.index_files.version import read_current
from embq.retrieval.searching.embedding import QueryEmbedder
from embq.worker.embedders.stub import stub_vector
from tests.indexer.collections_made import DIM, run_of, wanted_vectors, write_inputs
from tests.indexer.indices_made import index_of
from tests.support.outputs.build import build, write_folder, write_jsonl
from tests.support.outputs.index import search_refusal
from tests.support.picture_files import encoded

MODEL_DIM = 64


def unit_vector(text: str | bytes, dim: int = MODEL_DIM) -> np.ndarray:
    """The stub's vector of a text or image, at length 1."""
    vector = stub_vector(text.encode() if isinstance(text, str) else text, dim).astype(np.float64)
    return vector / np.linalg.norm(vector)


def cosines(text: str, texts: list[str]) -> np.ndarray:
    return np.array([unit_vector(one) @ unit_vector(text) for one in texts])


def png(shade: int) -> bytes:
    from PIL import Image

    return encoded(Image.new("RGB", (8, 8), (shade, 10, 200)), "PNG")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 texts with metadata, `text N of a`, indexed: every answer can be computed by hand."""
    root = tmp_path_factory.mktemp("texts")
    rows = RowSpec(dtype="float32", normalize=True)
    built = build(root / "out", write_inputs(root / "in"), model=f"stub:{MODEL_DIM}", rows=rows)
    index_of(built, index_key="IVF2,SQ8")
    return built


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of images with captions, of which both are indexed."""
    root = tmp_path_factory.mktemp("pictures")
    files = {f"p{shade}.png": png(shade) for shade in range(0, 250, 25)}
    texts = {name.replace("png", "txt"): f"shade {name}".encode() for name in files}
    folder = write_folder(root / "in", {**files, **texts})
    built = build(root / "out", [folder], model=f"stub:{MODEL_DIM}", modalities=("image", "text"))
    for output in ("image", "text"):
        index_of(built, output=output)
    return built


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert run(["search", *arguments, "--json"]) == Exit.DONE
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"schema", "results", "timing"}
    assert set(told["timing"]) == {"load_s", "filter_ms", "embed_ms", "search_ms", "rows_ms"}
    results: list[dict[str, object]] = told["results"]
    return results


def in_file(path: Path, array: object) -> str:
    np.save(path, array)
    return str(path)


# --- what is found ---


def test_a_text_finds_the_rows_that_are_nearest_to_it_with_their_cosines(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"text {row} of a" for row in range(40)]
    expected = cosines("a question", texts)
    results = answer(capsys, str(out), "a question", "-k", "7", "--nprobe", "2")
    order = np.argsort(-expected)[:7]
    assert [one["id"] for one in results] == order.tolist()
    assert [one["rank"] for one in results] == [1, 2, 3, 4, 5, 6, 7]
    np.testing.assert_allclose([one["score"] for one in results], expected[order], atol=0.01)
    for one in results:
        assert one["key"] == f"a{one['id']}"
        assert one["caption"] == texts[int(str(one["id"]))]
        assert str(one["source"]).endswith(".jsonl")
        assert one["metadata"]["rank"] == one["id"]  # type: ignore[index]


def test_the_folder_of_the_run_of_the_index_and_of_the_version_all_name_it(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = out / "index" / "text"
    found = [answer(capsys, str(path), "words", "-k", "3") for path in (out, index, read_current(index).path)]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 3


def test_a_table_says_rank_score_key_caption_and_source_in_a_line_each(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["search", str(out), "text 11 of a", "-k", "2"]) == Exit.DONE
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["1", "1.0000"]
    assert "a11  text 11 of a" in first
    assert first.endswith("a0.jsonl")
    assert second.split()[0] == "2"


def test_long_captions_and_control_characters_do_not_break_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"id": "k" * 300, "text": "line\n\x1b[31mred\t" * 200}
    lines: list[object] = [long, *({"id": f"b{row}", "text": f"b{row}"} for row in range(20))]
    built = build(tmp_path / "out", [write_jsonl(tmp_path / "in.jsonl", lines)], model="stub:16")
    index_of(built)
    assert run(["search", str(built), str(long["text"]), "-k", "2"]) == Exit.DONE
    lines_out = capsys.readouterr().out.splitlines()
    assert len(lines_out) == 2
    assert "k" * 40 in lines_out[0]
    assert all(line.isprintable() and len(line) <= 200 for line in lines_out)


@pytest.mark.parametrize("kind", ["npy", "two rows", "json", "half"])
def test_a_vector_in_a_file_finds_what_its_text_finds(
    kind: str, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vector = unit_vector("a question") * 3.0
    path = tmp_path / ("v.json" if kind == "json" else "v.npy")
    if kind == "json":
        path.write_text(json.dumps(vector.tolist()))
    else:
        stored = vector if kind == "npy" else vector.astype(np.float16)
        np.save(path, np.stack([stored, -stored]) if kind == "two rows" else stored)
    asked = answer(capsys, str(out), "a question", "-k", "5")
    found = answer(capsys, str(out), "--vector", str(path), "-k", "5")
    assert [one["id"] for one in found] == [one["id"] for one in asked]
    np.testing.assert_allclose([one["score"] for one in found], [one["score"] for one in asked], atol=1e-3)


def test_a_row_finds_others_that_are_like_it_and_not_itself(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"text {row} of a" for row in range(40)]
    expected = cosines(texts[9], texts)
    expected[9] = -2
    found = answer(capsys, str(out), "--id", "9", "-k", "3", "--nprobe", "2")
    assert [one["id"] for one in found] == np.argsort(-expected)[:3].tolist()


def test_images_ask_for_images_and_texts_ask_for_images_of_the_output_that_is_named(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "asked.png").write_bytes(png(75))
    by_image = answer(
        capsys, str(pictures), "--vector-name", "image", "--image", str(tmp_path / "asked.png"), "-k", "1"
    )
    assert "p75" in str(by_image[0]["key"])
    by_text = answer(capsys, str(pictures), "--vector-name", "text", "shade p75.png", "-k", "1")
    assert by_text[0]["id"] == by_image[0]["id"]
    assert len(answer(capsys, str(pictures / "index" / "image"), "any text", "-k", "3")) == 3


@pytest.mark.parametrize(
    ("dtype", "more"), [("int8", {"normalize": True}), ("binary", {}), ("float16", {"truncate_dim": 16})]
)
def test_a_query_is_cut_and_brought_to_length_1_as_the_rows_were(
    dtype: str, more: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = RowSpec(dtype=dtype, **more)  # type: ignore[arg-type]
    built = build(tmp_path / "out", write_inputs(tmp_path / "in"), model=f"stub:{MODEL_DIM}", rows=rows)
    index_of(built, index_key="IVF1,Flat")
    found = answer(capsys, str(built), "text 17 of a", "-k", "2")
    assert found[0]["key"] == "a17"
    if dtype != "binary":
        assert float(str(found[0]["score"])) == pytest.approx(1.0, abs=0.01)


def test_fewer_rows_than_were_asked_for_are_all_of_them(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, str(out), "words", "-k", "500", "--nprobe", "2")
    assert sorted(int(str(one["id"])) for one in found) == list(range(40))


# --- filters and examples ---


def test_conditions_are_read_from_the_command_line(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, str(out), "words", "--where", "rank >= 10", "--where", "tag in t12, t15, t3", "-k", "40")
    assert sorted(str(one["key"]) for one in found) == ["a12", "a15"]
    untagged = answer(capsys, str(out), "words", "--where", "tag != t3", "-k", "40")
    assert sorted(int(str(one["id"])) for one in untagged) == [row for row in range(0, 40, 3) if row != 3]


@pytest.mark.parametrize(
    ("arguments", "status", "code", "said"),
    [
        (["--where", "year >= 2020"], Exit.BAD_INPUT, "no_column", "it has key, caption, source, rank, tag"),
        (["--where", "rank >= new"], Exit.BAD_INPUT, "bad_filter", "holds numbers"),
        (["--where", "rank"], Exit.USAGE, "usage", "COLUMN OPERATOR VALUE"),
        (["--where", "rank > 0"] * 17, Exit.USAGE, "usage", "17 times"),
        (["--like", "40"], Exit.BAD_INPUT, "no_such_id", "0 to 39"),
        (["--unlike", "1"] * 33, Exit.USAGE, "usage", "33 times"),
    ],
)
def test_a_filter_that_cannot_be_applied_is_refused_before_a_model_is_loaded(
    arguments: list[str], status: int, code: str, said: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = search_refusal(capsys, str(out), "words", *arguments)
    assert told[:2] == (status, code)
    assert said in told[2]


ANIMALS = [
    "spotted fur and sharp teeth",
    "prey by the river in the jungle",
    "cubs follow their mother",
    "a zoo of cats",
]
CARS = ["an engine of six cylinders", "leather seats and a dashboard", "a dealer of used sedans", "new brakes and oil"]


def test_examples_move_the_results_of_a_real_model_and_are_none_themselves(tmp_path: Path) -> None:
    lines: list[object] = [{"id": f"t{row}", "text": f"jaguar: {text}"} for row, text in enumerate(ANIMALS + CARS)]
    built = build(tmp_path / "out", [write_jsonl(tmp_path / "in.jsonl", lines)], model="minilm")
    index_of(built, index_key="IVF1,Flat")
    collection = read_current(built / "index" / "text").collection
    embedder = QueryEmbedder.open(collection.model, collection.rows_spec, collection.fingerprint)
    jaguar = embedder.text("jaguar")

    def place_of_animals(like: tuple[int, ...] = (), unlike: tuple[int, ...] = ()) -> float:
        """Mean rank of the animals among the results, 0 to 1, of which 0 is the best."""
        ids = [one.id for one in embq.search(built, vector=jaguar, k=8, like=like, unlike=unlike)]
        assert sorted(ids) == [row for row in range(8) if row not in like + unlike]
        return float(np.mean([rank for rank, id_ in enumerate(ids) if id_ < 4])) / (len(ids) - 1)

    neither = place_of_animals()
    assert place_of_animals(like=(0,), unlike=(4,)) < neither < place_of_animals(like=(4,), unlike=(0,))
    assert place_of_animals(unlike=(4,)) < place_of_animals(unlike=(0,))
    assert place_of_animals(like=(0,)) < place_of_animals(like=(4,))
    assert embq.search(built, like=[1], k=1)[0].id in (0, 2, 3)
    numbers = {"k": np.int64(3), "offset": np.int64(1), "nprobe": np.int64(2)}
    expected = [one.id for one in embq.search(built, vector=jaguar, k=3, offset=1, nprobe=2)]
    for vector in (jaguar, list(np.float32(jaguar)), np.float64(jaguar)):
        assert [one.id for one in embq.search(built, vector=vector, **numbers)] == expected


# --- Python ---


def test_python_gets_the_same_results_as_objects(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(capsys, str(out), "a question", "-k", "4")
    found = embq.search(out, "a question", k=4)
    assert [one.describe() for one in found] == told
    vector = unit_vector("a question")
    for given in (vector, vector.tolist(), vector[None]):
        assert [one.id for one in embq.search(str(out), vector=given, k=4)] == [one["id"] for one in told]
    assert found[0].metadata["rank"] == found[0].id


def test_the_snippet_of_the_readme_prints_what_is_found(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    [snippet] = re.findall(r"^```python\n(import embq\n.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(out.parent)
    exec(compile(snippet, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4", "5"]
    assert all("text" in line for line in lines)


def test_python_takes_an_image_as_bytes_or_as_a_path(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "asked.png").write_bytes(png(100))
    for given in (png(100), tmp_path / "asked.png", str(tmp_path / "asked.png")):
        [found] = embq.search(pictures, image=given, vector_name="image", k=1)
        assert "p100" in found.key


def test_importing_embq_imports_no_more_than_before() -> None:
    script = "import sys, embq; embq.search; print({'numpy', 'pyarrow', 'faiss', 'click', 'torch'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"


def test_a_question_imports_none_of_the_libraries_that_it_does_not_need(out: Path) -> None:
    script = (
        "import sys; import embq.app.cli.entry_point, embq.retrieval.verbs.search; assert 'numpy' not in sys.modules;"
        "status = embq.app.cli.entry_point.run(sys.argv[1:]); print(*sys.modules, file=sys.stderr); sys.exit(status)"
    )
    arguments = [sys.executable, "-c", script, "search", str(out), "words", "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    unneeded = {"torch", "transformers", "PIL", "h5py", "redis", "rq", "rich", "matplotlib", "starlette"}
    assert unneeded.isdisjoint(done.stderr.split())
    assert len(json.loads(done.stdout)["results"]) == 10


@pytest.mark.parametrize("vector", [[1.0, "a"], [[1.0], [2.0, 3.0]], "x" * 4, object(), []])
def test_python_refuses_what_is_no_vector_with_its_own_errors(vector: object, out: Path) -> None:
    with pytest.raises(EmbqError) as refused:
        embq.search(out, vector=vector)
    assert refused.value.code == "bad_query"


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no query is given"),
        (("words", "--id", "3"), "text, id"),
        (("--id", "3", "--prompt-name", "query"), "without a text"),
        (("words", "--prompt-name", "query", "--prompt", "q"), "both --prompt-name and --prompt"),
    ],
)
def test_not_exactly_one_thing_asked_is_a_mistake_of_the_command_line(
    arguments: tuple[str, ...], said: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, code, message = search_refusal(capsys, str(out), *arguments)
    assert (status, code) == (Exit.USAGE, "usage")
    assert said in message


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (np.ones(3), "wrong_dimension", "64 numbers, the query has 3"),
        (np.full(MODEL_DIM, np.nan), "bad_query", "not finite"),
        (np.full(MODEL_DIM, 1e300), "bad_query", "not finite"),
        (np.zeros(MODEL_DIM), "bad_query", "zero"),
        (np.array(["a"] * MODEL_DIM), "bad_query", "something else than numbers"),
        (np.ones((1, 1, MODEL_DIM)), "bad_query", "something else than numbers"),
        (np.empty((0, MODEL_DIM)), "bad_query", "not a list of numbers"),
    ],
)
def test_a_vector_that_is_no_query_is_refused_with_its_fault(
    content: np.ndarray, code: str, said: str, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told, message = search_refusal(capsys, str(out), "--vector", in_file(tmp_path / "v.npy", content))
    assert (status, told) == (Exit.BAD_INPUT, code)
    assert said in message


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("v.npy", b"not numpy"),
        ("v.npy", b""),
        ("v.json", b'{"vector": [1]}'),
        ("v.json", b"[1, null]"),
        ("v.json", b"[[1], [1, 2]]"),
        ("v.json", b"[" * 100_000),
        ("v.json", b"\xff"),
    ],
)
def test_a_file_that_holds_no_vector_is_refused(
    name: str, data: bytes, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(data)
    status, code, message = search_refusal(capsys, str(out), "--vector", str(tmp_path / name))
    assert (status, code) == (Exit.BAD_INPUT, "bad_query")
    assert name in message


def test_no_pickle_is_read_from_a_file_of_a_vector(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "v.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    _, code, message = search_refusal(capsys, str(out), "--vector", str(tmp_path / "v.npy"))
    assert code == "bad_query"
    assert "objects" in message


@pytest.mark.parametrize("arguments", [("   ",), ("--image", "missing.png"), ("--vector", "missing.npy")])
def test_a_query_that_cannot_be_read_or_embedded_is_refused(
    arguments: tuple[str, ...], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search_refusal(capsys, str(out), *arguments)[:2] == (Exit.BAD_INPUT, "bad_query")


@pytest.mark.parametrize("id_", ["-1", "40"])
def test_an_id_that_no_row_has_is_refused(id_: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, code, message = search_refusal(capsys, str(out), "--id", id_)
    assert (status, code) == (Exit.BAD_INPUT, "no_such_id")
    assert "0 to 39" in message


def test_a_folder_without_an_index_and_one_with_several_say_what_to_do(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search_refusal(capsys, str(tmp_path), "words")[:2] == (Exit.BAD_INPUT, "no_index")
    status, code, message = search_refusal(capsys, str(pictures), "words")
    assert (status, code) == (Exit.BAD_INPUT, "which_index")
    assert "--vector-name image" in message


def test_vectors_of_another_model_than_the_one_that_is_here_are_not_searched(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, code, message = search_refusal(capsys, str(out), "words", "--model", f"stub:{MODEL_DIM // 2}")
    assert (status, code) == (Exit.BAD_INPUT, "other_model")
    fingerprint = read_current(out / "index" / "text").collection.fingerprint
    assert fingerprint is not None
    assert fingerprint[:12] in message
    assert f"stub:{MODEL_DIM}" in message
    assert f"stub:{MODEL_DIM // 2}" in message


def test_a_folder_of_embeddings_names_no_model_and_is_asked_by_vectors_and_ids(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    vectors = wanted_vectors()
    np.save(folder / "a.npy", vectors)
    index = index_of(folder, to=tmp_path / "index", index_key="IVF1,Flat")
    with pytest.raises(InputError) as refused:
        embq.search(index, "words")
    assert refused.value.code == "no_model"
    assert vectors.shape[1] == DIM
    assert embq.search(index, vector=vectors[3], k=1)[0].id in range(len(vectors))
    assert 3 not in [one.id for one in embq.search(index, id=3, k=5)]


def test_a_model_that_is_not_where_the_run_had_it_is_asked_for_with_an_option(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from embq.retrieval.searching.embedding import QueryEmbedder

    spec = f"hf:{tmp_path / 'gone'}"
    model = {"spec": spec, "modalities": ["text"], "precision": "fp32"}
    output = {"name": "text", "spec": spec, "modality": "text"}
    embedder = QueryEmbedder.open({**model, "output": output}, RowSpec().describe(), None)
    with pytest.raises(ModelError, match="no model folder") as refused:
        embedder.text("words")
    assert "location on this machine with --model" in refused.value.next_step


def test_an_image_for_rows_of_a_model_of_texts_is_refused(tmp_path: Path) -> None:
    from embq.retrieval.searching.embedding import QueryEmbedder

    embedder = QueryEmbedder.open(
        {
            "spec": "minilm",
            "modalities": ["text"],
            "precision": "fp32",
            "output": {"name": "text", "spec": "minilm", "modality": "text"},
        },
        RowSpec().describe(),
        None,
    )
    assert embedder.modalities == ("text",)
    with pytest.raises(ModelError) as refused:
        embedder.image(png(1))
    assert refused.value.code == "other_modality"


def test_rows_that_keep_their_vectors_nowhere_any_more_are_no_query(tmp_path: Path) -> None:
    import shutil

    built = run_of("parquet")(tmp_path)
    coded = index_of(built, to=tmp_path / "coded", index_key="IVF1,SQ8")
    index = index_of(built, to=tmp_path / "index", index_key="PCAR8,IVF1,SQ8")
    assert embq.search(index, id=2, k=1)[0].id != 2
    nearest = embq.search(coded, id=2, k=3)
    shutil.rmtree(built / "parts")
    assert [one.id for one in embq.search(coded, id=2, k=3)] == [one.id for one in nearest]
    with pytest.raises(InputError) as refused:
        embq.search(index, id=2)
    assert refused.value.code == "no_vectors"
