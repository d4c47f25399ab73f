"""Prompts from the command line to the model spec."""

from __future__ import annotations

import pytest

from core.errors import EmbqError, ModelError
from core.models import ModelSpec
from embq.cli.run_options import request_from
from embq.verbs.run import run


def asked(*options: str) -> tuple[str, ...]:
    """What the options of `embq run` make of the model specs."""
    context = run.make_context("run", ["in.txt", "-o", "out", *options])
    return request_from(("in.txt",), context.params).models


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        (["-m", "st:m"], "st:m"),
        (["-m", "st:m", "--prompt", "query"], "st:m?prompt=query"),
        (["-m", "minilm?max_length=64", "--prompt", "document"], "minilm?max_length=64&prompt=document"),
        (["-m", "st:m", "--prompt-text", "a&b: "], "st:m?prompt_text=a%26b:%20"),
        (["-m", "hf:m?pooling=mean+max", "--prompt-text", "é"], "hf:m?pooling=mean+max&prompt_text=%C3%A9"),
        (["-m", "st:m", "--prompt-text", ""], "st:m?prompt_text="),
    ],
)
def test_a_prompt_becomes_part_of_the_spec(options: list[str], spec: str) -> None:
    [found] = asked(*options)
    assert found == spec
    assert str(ModelSpec.parse(found)) == spec


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("-m st:m --prompt query --prompt-text x", "leave out one"),
        ("-m st:m?prompt=document --prompt query", "leave out one"),
        ("-m st:m?prompt_text=a --prompt query", "leave out one"),
        ("-m hf:m --prompt query", "--prompt-text"),
        ("-m stub:8 --prompt query", "stub models have no prompts"),
        ("-m open_clip:A/b --prompt-text x", "open_clip models have no prompts"),
        ("-m st:m -m minilm --prompt query", "into the spec of each"),
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
