"""The flags of a training: every field has one, and the processes that are started get what was asked for."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embq.core.errors import UsageError
from embq.training.classify import __main__ as launched
from embq.training.classify.config import Config, Resume, differences

PLAIN = Config(shards="shards", out="out")

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
PARTS = st.floats(0, 0.9)
COUNTS = st.integers(1, 10**9)
CONFIGS = st.builds(
    Config,
    shards=TEXTS,
    out=TEXTS.filter(lambda text: text.strip()),
    validation=st.just("") | TEXTS,
    arch=TEXTS,
    epochs=COUNTS,
    loader_workers=st.integers(0, 64),
    epoch_samples=st.none() | COUNTS,
    splitshards=st.booleans(),
    lr=st.floats(1e-9, 1e9),
    momentum=PARTS,
    label_smoothing=PARTS,
    precision=st.sampled_from(["", "fp32", "bf16", "fp16"]),
    seed=st.integers(-(10**12), 10**12),
    max_failures=PARTS,
    log_keys=st.booleans(),
    device=st.sampled_from(["cuda", "cpu"]),
)


def parsed(arguments: list[str]) -> Config:
    said: dict[str, Any] = launched._flags.main(arguments, standalone_mode=False)
    said.pop("as_json")
    return Config(**said)


@given(CONFIGS)
def test_the_flags_of_a_config_say_all_of_it(config: Config) -> None:
    assert parsed(config.arguments()) == config


def test_what_is_not_said_is_as_the_config_has_it() -> None:
    assert parsed(["shards", "--output", "out"]) == PLAIN


def test_a_flag_that_is_not_there_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--no-such"):
        launched.main(["shards", "--output", "out", "--no-such"])


def test_what_decides_what_is_learnt_is_told_with_both_values() -> None:
    now = replace(PLAIN, lr=0.2, splitshards=True, log_every=3, loader_workers=0, shards="elsewhere")
    assert differences(asdict(PLAIN), now) == ["--splitshards not given, now given", "--lr 0.1, now 0.2"]
    assert differences(asdict(PLAIN), now, Resume.EPOCH) == ["--workers 4, now 0"]
