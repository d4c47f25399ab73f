"""Vectors as they are stored: cut, brought to length 1, cast to floats, int8 or bits, and read back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from embq.app.cli.run_options import request_from
from embq.app.verbs.run import run
from embq.app.verify.vectors import wrong_cosines, wrong_norms
from embq.core.errors import EmbqError, InputError, ModelError, UsageError
from embq.core.models import ModelConfig, ModelSpec, NamedModel
from embq.core.native import library
from embq.core.queue.runs import RunRecord
from embq.core.rows.spec import DTYPES, RowSpec
from embq.core.rows.vectors import FLOAT16_BEYOND, restored, similarities, stored
from embq.producer.enqueue import prepare
from embq.worker.claim.claimer import check_dims
from tests.support.second_reader.checks import differing

NUMBERS = st.floats(-60_000, 60_000, width=32, allow_subnormal=False)
BLOCKS = arrays(np.float32, st.tuples(st.integers(1, 5), st.just(16)), elements=NUMBERS)
SPECS = st.builds(
    RowSpec,
    dtype=st.sampled_from(DTYPES),
    truncate_dim=st.sampled_from([0, 8, 16]),
    normalize=st.sampled_from([None, True, False]),
    int8_range=st.sampled_from([0.1, 0.3, 1.0, 50.0]),
)
SOME = np.random.default_rng(0).standard_normal((200, 64)).astype(np.float32)


@settings(max_examples=300)
@given(BLOCKS, SPECS)
def test_every_row_is_stored_alone_and_an_independent_formula_agrees(block: np.ndarray, rows: RowSpec) -> None:
    values, faults = stored(block, rows)
    assert values.shape == (len(block), rows.width(16))
    good = [i for i in range(len(block)) if i not in faults]
    assert all(fault.code == "zero_vector" and rows.unit_length for fault in faults.values())
    for i in good:
        alone, none = stored(block[i : i + 1], rows)
        assert (alone[0] == values[i]).all()
        assert not none
    assert not differing(values[good], block[good], rows).any()
    assert not (rows.unit_length and wrong_norms(values[good], rows).any())


@settings(max_examples=300)
@given(BLOCKS)
def test_the_beginning_of_a_vector_is_kept_and_has_length_one_again(block: np.ndarray) -> None:
    values, faults = stored(block, RowSpec(dtype="float32", truncate_dim=8))
    for i, row in enumerate(block[:, :8].tolist()):
        length = math.hypot(*row)
        assert (i in faults) == (length == 0)
        if length:
            assert values[i].tolist() == pytest.approx([number / length for number in row], rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_or_has_no_direction_is_named_and_its_neighbours_are_stored(dtype: str) -> None:
    rows = RowSpec(dtype=dtype, normalize=True)
    block = SOME[:5].copy()
    block[1, 3], block[2, 63], block[3] = np.nan, np.inf, 0
    values, faults = stored(block, rows)
    assert {i: fault.code for i, fault in faults.items()} == {1: "non_finite", 2: "non_finite", 3: "zero_vector"}
    assert (values[[0, 4]] == stored(block[[0, 4]], rows)[0]).all()


def test_a_number_that_is_cut_off_must_be_finite_as_well() -> None:
    block = SOME[:1].copy()
    block[0, 60] = np.nan
    assert stored(block, RowSpec(truncate_dim=8))[1][0].code == "non_finite"


def test_what_does_not_fit_float16_is_a_fault_unless_it_is_brought_to_length_one() -> None:
    block = np.array([[1e9, 1.0]], dtype=np.float32)
    assert stored(block, RowSpec())[1][0].code == "beyond_float16"
    assert "65,504" in stored(block, RowSpec())[1][0].message
    assert not stored(block, RowSpec(dtype="float32"))[1]
    assert not stored(block, RowSpec(normalize=True))[1]


def test_lengths_neither_overflow_nor_vanish() -> None:
    block = np.array([[3e30, 4e30], [3e-30, 4e-30]], dtype=np.float32)
    values, faults = stored(block, RowSpec(dtype="float32", normalize=True))
    assert not faults
    assert values.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]] * 2


def test_zeros_may_be_stored_where_no_length_is_asked_for() -> None:
    zeros = np.zeros((1, 8), dtype=np.float32)
    for rows in (RowSpec(), RowSpec(dtype="binary"), RowSpec(dtype="int8", normalize=False)):
        values, faults = stored(zeros, rows)
        assert not faults
        assert not values.any()


def test_int8_has_equal_steps_on_both_sides_of_zero_and_takes_what_is_beyond_for_the_largest() -> None:
    block = np.array([[-2.0, -0.5, -0.25, -0.001, 0, 0.001, 0.25, 0.5, 2.0]], dtype=np.float32)
    values, _ = stored(block, RowSpec(dtype="int8", normalize=False, int8_range=0.5))
    assert values.dtype == np.int8
    assert values.tolist() == [[-127, -127, -64, 0, 0, 0, 64, 127, 127]]


@pytest.mark.parametrize(("int8_range", "cosine"), [(1.0, 0.998), (0.5, 0.9995)])
def test_int8_keeps_the_direction(int8_range: float, cosine: float) -> None:
    rows = RowSpec(dtype="int8", int8_range=int8_range)
    back = restored(stored(SOME, rows)[0], rows)
    assert back.dtype == np.float32
    assert similarities(back, SOME)[0].min() > cosine


def test_binary_is_what_sentence_transformers_packs() -> None:
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    values, _ = stored(SOME, RowSpec(dtype="binary"))
    assert values.dtype == np.uint8
    assert (values == quantization.quantize_embeddings(SOME, "ubinary")).all()
    back = restored(values, RowSpec(dtype="binary"))
    assert (back == np.where(SOME > 0, 1, -1)).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_floats_are_read_back_as_they_are(dtype: str) -> None:
    rows = RowSpec(dtype=dtype)
    assert (restored(stored(SOME, rows)[0], rows) == SOME.astype(dtype)).all()


def test_the_similarity_is_the_cosine_of_the_vectors_as_the_model_gives_them() -> None:
    images, texts = SOME[:100], SOME[100:] * 7
    cosines, faults = similarities(images, texts)
    assert cosines.dtype == np.float32
    assert not faults
    assert not wrong_cosines(cosines, images, texts, 1e-6).any()
    assert wrong_cosines(cosines + np.float32(1e-4), images, texts, 1e-6).all()
    assert similarities(SOME, SOME * 3)[0].tolist() == [1.0] * len(SOME)
    spoiled = texts.copy()
    spoiled[0], spoiled[1, 1] = 0, np.nan
    assert {i: fault.code for i, fault in similarities(images, spoiled)[1].items()} == {
        0: "zero_vector",
        1: "non_finite",
    }


@pytest.mark.parametrize("similarity", [True, False])
@pytest.mark.parametrize("names", [(), ("a",), ("a", "b")], ids=str)
@pytest.mark.parametrize(("image", "text"), [(8, 8), (8, 9), (9, 8)])
def test_images_and_texts_of_unequal_lengths_have_no_similarity(
    names: tuple[str, ...], image: int, text: int, similarity: bool
) -> None:
    modalities, spec = ("image", "text"), "open_clip:ViT-B-32/x"
    members = [NamedModel(name=name, spec=spec, modalities=modalities) for name in names]
    config = ModelConfig(spec=spec, modalities=modalities, precision="fp32", members=tuple(members))
    # The last model has unequal lengths, those before have equal ones.
    dims = {output.name: 4 for output in config.outputs}
    dims |= dict(zip(config.output_names[-2:], (image, text), strict=True))
    record = RunRecord(run="r", output="/out", model=config, rows=RowSpec(similarity=similarity), units=1)
    if image == text or not similarity:
        check_dims(record, dims)
        return
    with pytest.raises(InputError) as caught:
        check_dims(record, dims)
    assert (caught.value.code, caught.value.next_step) == ("wrong_dimension", "leave out --similarity")
    assert f"gives images {image} numbers and texts {text}" in caught.value.message


def test_vectors_that_are_too_small_for_float16_tell_nothing_of_their_cosine() -> None:
    tiny, _ = stored(SOME * np.float32(1e-8), RowSpec())
    cosines = np.full(len(tiny), 0.5, np.float32)
    assert not wrong_cosines(cosines, tiny, tiny, 2e-3).any()
    assert wrong_cosines(cosines * 3, tiny, tiny, 2e-3).all()
    assert wrong_cosines(cosines * np.float32(np.nan), tiny, tiny, 2e-3).all()


# --- the independent formulas notice ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [True, False])
def test_one_wrong_number_is_noticed(dtype: str, normalize: bool) -> None:
    rows = RowSpec(dtype=dtype, normalize=normalize, int8_range=1.0 if normalize else 4.0)
    values, _ = stored(SOME, rows)
    spoiled = values.copy()
    as_bits = spoiled.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[spoiled.itemsize])
    as_bits[7, 5] ^= 2
    assert np.flatnonzero(differing(spoiled, SOME, rows)).tolist() == [7]


@pytest.mark.parametrize(
    ("wanted", "done"),
    [
        (RowSpec(dtype="float32"), RowSpec(dtype="float32", normalize=True)),
        (RowSpec(dtype="float32", normalize=True), RowSpec(dtype="float32")),
        (RowSpec(truncate_dim=32, normalize=False), RowSpec(truncate_dim=32)),
        (RowSpec(dtype="int8"), RowSpec(dtype="int8", int8_range=0.9)),
        (RowSpec(dtype="int8", truncate_dim=32), RowSpec(dtype="int8", truncate_dim=32, normalize=False)),
    ],
    ids=lambda rows: str(rows.identity()),
)
def test_vectors_that_were_stored_otherwise_are_noticed(wanted: RowSpec, done: RowSpec) -> None:
    assert differing(stored(SOME, done)[0], SOME, wanted).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_a_vector_of_another_length_is_noticed(dtype: str, factor: float) -> None:
    rows = RowSpec(dtype=dtype, normalize=True, int8_range=0.99)
    unit = SOME[:, :4] / np.linalg.norm(SOME[:, :4], axis=1, keepdims=True)
    unit = unit[np.abs(unit).max(axis=1) < 0.9]
    assert not wrong_norms(stored(unit, rows)[0], rows).any()
    assert wrong_norms(stored(unit * np.float32(factor), replace(rows, normalize=False))[0], rows).all()


# --- the spec ---


def test_a_spec_survives_its_description_and_old_ones_have_the_defaults() -> None:
    spec = RowSpec(dtype="int8", truncate_dim=64, normalize=False, int8_range=0.3, similarity=True)
    assert RowSpec.from_description(spec.describe()) == spec
    assert RowSpec.from_description({"dtype": "float32", "columns": []}) == RowSpec(dtype="float32")


def test_only_what_was_chosen_is_part_of_what_a_run_is() -> None:
    assert RowSpec().identity() == {"dtype": "float16"}
    assert RowSpec(dtype="int8").identity() == {"dtype": "int8", "normalize": "yes", "int8 range": 1.0}
    assert RowSpec(dtype="int8", normalize=True).identity() == RowSpec(dtype="int8").identity()
    assert RowSpec(truncate_dim=8, similarity=True).identity() == {
        "dtype": "float16",
        "truncate dim": 8,
        "normalize": "yes",
        "similarity": "yes",
    }
    assert RowSpec(normalize=False).identity()["normalize"] == "no"


@pytest.mark.parametrize(
    ("rows", "dim", "says"),
    [
        (RowSpec(truncate_dim=512), 384, "have 384 numbers"),
        (RowSpec(dtype="binary"), 381, "use --truncate-dim 376"),
        (RowSpec(dtype="binary"), 7, "use another --dtype"),
        (RowSpec(dtype="binary", truncate_dim=12), 384, "use --truncate-dim 8"),
    ],
)
def test_vectors_that_cannot_be_stored_so_are_refused(rows: RowSpec, dim: int, says: str) -> None:
    with pytest.raises(InputError) as caught:
        rows.check("m", dim)
    assert says in f"{caught.value.message} {caught.value.next_step}"
    assert caught.value.code == "wrong_dimension"


def test_vectors_that_fill_what_is_stored_of_them_are_not_refused() -> None:
    RowSpec(dtype="binary", truncate_dim=16).check("m", 20)
    RowSpec(dtype="binary").check("m", 384)
    RowSpec(truncate_dim=384).check("m", 384)


# --- the options ---


def asked(*options: str) -> RowSpec:
    """Row spec from options of `embq run`."""
    context = run.make_context("run", ["in.txt", "-o", "out", "-m", "stub:16", *options])
    return request_from(("in.txt",), context.params).rows


def test_the_options_are_the_spec() -> None:
    assert asked() == RowSpec()
    assert asked("--dtype", "int8", "--int8-range", "0.3", "--truncate-dim", "8", "--no-normalize") == RowSpec(
        dtype="int8", int8_range=0.3, truncate_dim=8, normalize=False
    )
    assert asked("--normalize", "--similarity", "--modality", "image,text") == RowSpec(normalize=True, similarity=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--int8-range 0.3", "needs --dtype int8"),
        ("--dtype int8 --no-normalize", "needs --int8-range"),
        ("--dtype int8 --int8-range nan", "not between"),
        ("--dtype int8 --int8-range -1", "not between"),
        ("--dtype binary --truncate-dim 12", "use --truncate-dim 8"),
        ("--similarity --modality text", "--modality image,text"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        asked(*options.split())
    assert says in f"{caught.value.message} {caught.value.next_step}"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--dtype binary", "do not fill"),
        ("--truncate-dim 13", "have 12 numbers"),
        ("--similarity", "embeds text"),
        ("--dtype int8 --output-format npy", "npy cannot hold"),
    ],
)
def test_what_a_model_cannot_give_is_refused_before_anything_is_made(tmp_path: Path, options: str, says: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    inputs = [str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"), "-m", "stub:12"]
    context = run.make_context("run", [*inputs, *options.split()])
    with pytest.raises(EmbqError, match=says):
        prepare(request_from((inputs[0],), context.params))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("spec", "raw"),
    [
        ("minilm", "minilm?normalize=false"),
        ("open_clip:A/b?batch_size=2", "open_clip:A/b?batch_size=2&normalize=false"),
        ("st:m?normalize=false", "st:m?normalize=false"),
        ("hf:m", "hf:m"),
        ("stub:4", "stub:4"),
    ],
)
def test_without_normalizing_a_model_leaves_out_its_own(spec: str, raw: str) -> None:
    assert str(ModelSpec.parse(spec).without_normalizing()) == raw


def test_a_model_that_is_asked_for_both_is_refused() -> None:
    with pytest.raises(ModelError, match="length 1"):
        ModelSpec.parse("hf:m?normalize=true").without_normalizing()


@pytest.mark.skipif(library() is None, reason="embq-native is not installed")
def test_float16_is_rounded_as_numpy_rounds_it() -> None:
    for low in (0, 1, 0x3FF, 0x400, 0x401, 0x7FF):  # what float16 has no place for; 0x400 is half way
        numbers = ((np.arange(1 << 21, dtype=np.uint32) << 11) | np.uint32(low)).view(np.float32)
        numbers = numbers[np.abs(numbers) < FLOAT16_BEYOND]
        values, faults = stored(numbers[None], RowSpec())
        assert not faults
        assert np.array_equal(values[0].view(np.uint16), numbers.astype(np.float16).view(np.uint16))
