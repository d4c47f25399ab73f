"""Model specs, configs, and prompts from the command line to the spec."""

from __future__ import annotations

import pytest

from embq.app.cli.run_options import request_from
from embq.app.verbs.run import run
from embq.core.errors import EmbqError, Exit, ModelError
from embq.core.models import FAMILIES, PROMPT_PARAMS, ModelConfig, ModelFamily, ModelSpec


@pytest.mark.parametrize(
    ("text", "family", "name", "params"),
    [
        ("minilm", "minilm", "", ()),
        ("st:/models/a b", "st", "/models/a b", ()),
        ("hf:org/model?pooling=mean", "hf", "org/model", (("pooling", "mean"),)),
        ("open_clip:ViT-B-32/laion2b", "open_clip", "ViT-B-32/laion2b", ()),
        ("open_clip:local-dir:/m", "open_clip", "local-dir:/m", ()),
        (" open_clip:A?seed=0&init=random ", "open_clip", "A", (("init", "random"), ("seed", "0"))),
        ("stub:384?ms_per_sample=", "stub", "384", (("ms_per_sample", ""),)),
        ("hf:m?pooling=mean+max", "hf", "m", (("pooling", "mean+max"),)),
        ("st:m?prompt=a%26b%3D%20%2B%25%0Ac: ", "st", "m", (("prompt", "a&b= +%\nc: "),)),
    ],
)
def test_a_spec_is_split_into_family_name_and_params(
    text: str, family: str, name: str, params: tuple[tuple[str, str], ...]
) -> None:
    spec = ModelSpec.parse(text)
    assert (spec.family, spec.name, spec.params) == (family, name, params)
    assert ModelSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    "text", ["", "resnet", "bert:base", "minilm:x", "st:", "st", "stub:", "stub:0", "stub:-3", "stub:x", "hf:a?pooling"]
)
def test_a_spec_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.parse(text)
    assert caught.value.exit_code == Exit.BAD_INPUT
    assert caught.value.next_step


def test_an_unknown_family_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.parse("bert:base")
    assert all(family in caught.value.next_step for family in FAMILIES)


def test_a_parameter_that_the_family_does_not_know_is_refused() -> None:
    spec = ModelSpec.parse("hf:a?pooling=cls&pool=max")
    spec.check_params("pooling", "pool")
    with pytest.raises(ModelError, match="unknown parameter 'pool'"):
        spec.check_params("pooling")
    assert (spec.param("pooling", "mean"), spec.param("x", "default")) == ("cls", "default")


def test_runs_share_a_queue_exactly_where_they_can_share_a_loaded_model() -> None:
    config = ModelConfig(spec="stub:4", modalities=("text",), precision="fp32")
    assert config.queue_key == ModelConfig(spec="stub:4", modalities=("text",), precision="fp32").queue_key
    others = [
        ModelConfig(spec="stub:5", modalities=("text",), precision="fp32"),
        ModelConfig(spec="stub:4", modalities=("image", "text"), precision="fp32"),
        ModelConfig(spec="stub:4", modalities=("text",), precision="bf16"),
    ]
    assert len({config.queue_key, *(other.queue_key for other in others)}) == 4


# --- prompts ---


def asked(*options: str) -> tuple[str, ...]:
    """Model specs from options of `embq run`."""
    context = run.make_context("run", ["in.txt", "-o", "out", *options])
    return request_from(("in.txt",), context.params).models


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        (["-m", "st:m"], "st:m"),
        (["-m", "st:m", "--prompt-name", "query"], "st:m?prompt_name=query"),
        (["-m", "minilm?max_length=64", "--prompt-name", "document"], "minilm?max_length=64&prompt_name=document"),
        (["-m", "st:m", "--prompt", "a&b: "], "st:m?prompt=a%26b:%20"),
        (["-m", "hf:m?pooling=mean+max", "--prompt", "é"], "hf:m?pooling=mean+max&prompt=%C3%A9"),
        (["-m", "st:m", "--prompt", ""], "st:m?prompt="),
    ],
)
def test_a_prompt_becomes_part_of_the_spec(options: list[str], spec: str) -> None:
    [found] = asked(*options)
    assert found == spec
    assert str(ModelSpec.parse(found)) == spec


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("-m st:m --prompt-name query --prompt x", "leave out one"),
        ("-m st:m?prompt_name=document --prompt-name query", "leave out one"),
        ("-m st:m?prompt=a --prompt-name query", "leave out one"),
        ("-m hf:m --prompt-name query", "--prompt"),
        ("-m stub:8 --prompt-name query", "stub models have no prompts"),
        ("-m open_clip:A/b --prompt x", "open_clip models have no prompts"),
        ("-m st:m -m minilm --prompt-name query", "into the spec of each"),
    ],
)
def test_a_prompt_that_no_model_can_take_is_refused(options: str, says: str) -> None:
    with pytest.raises(EmbqError) as caught:
        asked(*options.split())
    assert says in f"{caught.value.message} {caught.value.next_step}"
    assert caught.value.next_step


def test_a_spec_without_a_prompt_stays_as_it_is() -> None:
    spec = ModelSpec.parse("stub:8?ms_per_sample=2")
    assert spec.with_prompt(None, None) == spec
    with pytest.raises(ModelError):
        spec.with_prompt("", None)


@pytest.mark.parametrize(
    ("prompts", "refused"),
    [
        ((), {"prompt_name": "no prompts", "prompt": "no prompts"}),
        (("prompt",), {"prompt_name": "no prompts with names"}),
        (("prompt_name",), {"prompt": "only prompts with names"}),
        (("prompt_name", "prompt"), {}),
    ],
)
def test_a_family_says_which_prompts_it_has(
    prompts: tuple[str, ...], refused: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = ModelFamily(help="own:<n>  mine", load=FAMILIES["stub"].load, embeds=("text",), prompts=prompts)
    monkeypatch.setitem(FAMILIES, "own", family)
    for param in PROMPT_PARAMS:
        arguments = [param if name == param else None for name in PROMPT_PARAMS]
        if param not in refused:
            assert str(ModelSpec.parse("own:3").with_prompt(*arguments)) == f"own:3?{param}={param}"
            continue
        with pytest.raises(ModelError, match=f"(?m)own models have {refused[param]}$"):
            ModelSpec.parse("own:3").with_prompt(*arguments)


@pytest.mark.parametrize(
    ("normalizes", "unit_length", "without"),
    [(True, True, "own:3?normalize=false"), (None, False, "own:3?normalize=false"), (False, False, "own:3")],
)
def test_a_family_says_whether_it_normalizes(
    normalizes: bool | None, unit_length: bool, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = ModelFamily(help="own:<n>  mine", load=FAMILIES["stub"].load, embeds=("text",), normalizes=normalizes)
    monkeypatch.setitem(FAMILIES, "own", family)
    spec = ModelSpec.parse("own:3")
    assert spec.unit_length is unit_length
    assert str(spec.without_normalizing()) == without


# --- parameters ---

WRONG = {"seed": "x", "ms_per_sample": "-1", "ms_per_token": "nan", "ms_per_batch": "x", "normalize": "maybe"}
ANY_TEXT = {"prompt", "prompt_name", "pooling", "lora"}
"""Only the loaded model can tell whether these are usable."""


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_every_family_are_checked_before_anything_is_planned(family: str) -> None:
    spec = {"minilm": "minilm", "open_clip": "open_clip:ViT-B-32/openai", "stub": "stub:8"}.get(family, f"{family}:a")
    params = FAMILIES[family].params
    assert params
    with pytest.raises(ModelError, match="unknown parameter 'colour'"):
        ModelSpec.given(f"{spec}?colour=red")
    for name in params:
        if name in ANY_TEXT:
            assert ModelSpec.given(f"{spec}?{name}=some").param(name, "") == "some"
            continue
        with pytest.raises(ModelError, match=name) as caught:
            ModelSpec.given(f"{spec}?{name}={WRONG.get(name, '-1')}")
        assert caught.value.next_step
