"""Ids of open_clip's tokeniser by a cache of words: those of the library, whatever a caption holds."""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import threading
from typing import Any

import numpy as np
import pytest

from tests.support.lazy import lazy

open_clip = lazy("open_clip")
clip_tokens = lazy("embq.worker.embedders.text.clip_tokens")
lazy("torch")


ODD = (
    *("don’t", "I'LL", "they've", "ﬁne", "Ｆｕｌｌ", "İstanbul", "ǅ", "日本語", "🎉", "Ünïcödé", "schÃ¶n"),
    *("&amp;", "&lt;b&gt;", "a&nbsp;b", "<start_of_text>", "<END_OF_TEXT>", "under_score", "3.14", "...", "\x1b[1m"),
    *("\u200b", "x\u00a0y", "a\x1cb", "\x85", "\ufeff", "e\u0301", "\r\n"),
)


def captions(count: int) -> list[str]:
    chance = random.Random(5)
    modules = (argparse, asyncio, random, re, threading)
    words = " ".join(getattr(module, name).__doc__ or "" for module in modules for name in dir(module)).split()
    made = []
    for _ in range(count):
        some = chance.choices(words, k=chance.choice((0, 1, 8, 20, 90)))
        if chance.random() < 0.4:
            some.insert(chance.randrange(len(some) + 1), chance.choice(ODD))
        made.append(chance.choice((" ", "  ", "\n", "\t")).join(some))
    return made


@pytest.mark.parametrize("clean", ["lower", "whitespace", "canonicalize"])
def test_every_caption_has_the_ids_of_the_library(clean: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = open_clip.tokenizer.SimpleTokenizer(clean=clean)
    ours = clip_tokens.ClipTokens(open_clip.tokenizer.SimpleTokenizer(clean=clean), None)
    monkeypatch.setattr("embq.worker.embedders.text.clip_tokens.WORD_CACHE_MAX", 500)
    for caption in captions(600):
        row, is_cut = ours.row(caption)
        assert np.array_equal(row, theirs([caption])[0]), repr(caption)
        whole = len(theirs.encode(caption)) + 2
        assert ours.count(caption) == whole
        assert is_cut == (whole > len(row))
    assert ours._words is not None
    assert np.array_equal(ours.row("x" * 3_000)[0], theirs(["x" * 3_000])[0])
    assert "x" * 3_000 not in ours._words._words
    assert len(ours._words.tokenizer.cache) == 2, "no piece of it is kept"
    assert 0 < len(ours._words._words) <= 500


def test_a_tokeniser_of_another_kind_is_asked_itself() -> None:
    theirs: Any = open_clip.tokenizer.SimpleTokenizer(reduction_mask="simple")
    assert np.array_equal(clip_tokens.ClipTokens(theirs, None).row("a dog")[0], theirs(["a dog"])[0])
