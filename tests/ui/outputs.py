"""Runs for tests of pages: photographs in a tar, and texts some of which are hostile, each with an index."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from embq.app.cli.entry_point import run
from embq.core.errors import Exit
from embq.core.rows.spec import RowSpec
from examples.demo.collect import photographs
from tests.support.outputs.build import build, write_jsonl, write_tar
from tests.support.outputs.index import build_index

MODEL = "stub:16"
UNIT = RowSpec(normalize=True)

HOSTILE = {
    "script": "<script>window.pwned = 1</script>",
    "handler": "<img src=x onerror='window.pwned = 2'>",
    "attribute": '"><svg/onload=window.pwned=3>',
    "template": "{{ 7 * 7 }} ${7 * 7} <%= 7 * 7 %>",
    "bidi": "invoice\u202egpj.exe and more",
    "control": "a\x1b[31mred\x07\x00b",
    "emoji": "a family 👨\u200d👩\u200d👧 in می\u200cخواهم",
    "surrogate": "half \\ud83d of a pair",
    "javascript": "javascript:window.pwned=4",
    "long": "very " * 2_000_000,
}
"""Key of a text -> its text."""


def write_photographs(folder: Path, count: int = 60) -> Path:
    """A run of photographs from a tar, with captions and metadata, and an index of its images."""
    members = []
    for number, (key, data) in enumerate(photographs(count, seed=3)):
        place = key.split("-")[0]
        about = {"year": 2000 + number % 10, "place": place, "note": None if number % 3 else "<b>bold</b>"}
        members += [
            (f"{key}.jpg", data),
            (f"{key}.txt", f"a photograph of {place}".encode()),
            (f"{key}.json", json.dumps(about).encode()),
        ]
    shard = write_tar(folder / "photographs.tar", members)
    root = build(folder / "photographs", [shard], model=MODEL, modalities=("image", "text"), rows=UNIT)
    build_index(root, output="image")
    return root


def write_texts(folder: Path) -> Path:
    """A run of texts, ordinary and hostile ones, each with a page of its own, and its index."""
    lines: list[object] = [
        {"id": f"plain-{i}", "text": f"an ordinary text, number {i}", "n": i, "page": f"https://example.org/?n={i}&a=b"}
        for i in range(120)
    ]
    lines += [{"id": f"<i>{key}</i>", "text": text, "n": -1, "page": text[:100]} for key, text in HOSTILE.items()]
    root = build(folder / "texts", [write_jsonl(folder / "<u>texts<u>.jsonl", lines)], model=MODEL, rows=UNIT)
    build_index(root, output="text")
    return root


def write_vectors(folder: Path) -> Path:
    """An index of a plain folder of embeddings: it says neither which model made them nor what they are of."""
    (folder / "vectors").mkdir()
    np.save(folder / "vectors" / "img_emb.npy", np.eye(16, dtype=np.float32))
    build_index(folder / "vectors", output="img_emb")
    return folder / "vectors"


def write_articles(folder: Path) -> Path:
    """A run of 8 long texts in chunks, and its index."""
    words = ("river", "garden", "engine", "star")
    lines = [{"id": f"article-{i}", "text": f"{words[i % 4]} {i} of some words. " * 40} for i in range(8)]
    source = write_jsonl(folder / "articles.jsonl", lines)
    command = ["run", str(source), "-o", str(folder / "articles"), "-m", MODEL, "--chunk-tokens", "32"]
    assert run([*command, "--normalize", "--devices", "cpu", "--quiet"]) == Exit.DONE
    build_index(folder / "articles", output="text")
    return folder / "articles"
