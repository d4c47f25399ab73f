"""What bounds texts on this CPU: shares of time by kind of operation, and GFLOP/s beside those of a large GEMM.

    python -m bench.text_profile PRECISION TEXTS.jsonl

Prints one JSON object. A worker computes a pass on each core, so one core is profiled, with one thread. The FLOP of a
text are those of the model's matrix products for its own tokens, without padding: layers * (2n(4d^2 + 2df) + 4n^2 d).
The bound is what `torch` reaches in a product of 2,048 x 2,048 x 2,048 with the same type in the same process, the best
of some: on that core, and (`gemm_gflops_all`) with all threads at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.text_peers import texts_of

LAYERS, DIM, INNER = 6, 384, 1536
"""Of all-MiniLM-L6-v2."""
TEXTS, GEMM, TRIES = 300, 2_048, 5
KINDS = {
    "aten::addmm": "gemm",
    "aten::mm": "gemm",
    "aten::bmm": "gemm",
    "mkldnn::_linear_pointwise": "gemm",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::gelu": "gelu",
    "aten::native_layer_norm": "normalisation",
}
"""Operation of torch -> what it is in the model; all others are "other"."""


def flop(lengths: Sequence[int]) -> float:
    """FLOP of the matrix products for texts of these lengths in tokens."""
    return sum(LAYERS * (2 * n * (4 * DIM**2 + 2 * DIM * INNER) + 4 * n**2 * DIM) for n in lengths)


def gemm_gflops(dtype: Any) -> float:
    """GFLOP/s of a large matrix product, the best of `TRIES`."""
    import torch

    a, b = (torch.randn(GEMM, GEMM).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(TRIES + 1):
        began = time.perf_counter()
        torch.mm(a, b)
        best = max(best, 2 * GEMM**3 / (time.perf_counter() - began) / 1e9)
    return best


def passes_of(embedder: Any, texts: Sequence[str]) -> list[list[Any]]:
    """The texts as the worker's passes: of like length, longest first, each within the embedder's budget."""
    from core.units import Sample

    samples = [Sample(ordinal=n, key=str(n), text=text) for n, text in enumerate(texts)]
    waiting = sorted(embedder.prepare(samples), key=lambda one: -embedder.length(one))
    passes = []
    while waiting:
        count = max(1, embedder.token_budget // embedder.length(waiting[0]))
        passes.append(waiting[:count])
        waiting = waiting[count:]
    return passes


def profile(precision: str, texts: Sequence[str]) -> dict[str, Any]:
    """The figures of one precision."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as traced

    from core.models import ModelConfig
    from worker.embedders.device import DTYPES
    from worker.embedders.registry import load

    dtype = DTYPES[precision]
    cores, of_all = torch.get_num_threads(), gemm_gflops(dtype)
    # Before the model is loaded, which gives each core a thread of its own, and these are not traced.
    torch.set_num_threads(1)
    embedder = load(ModelConfig(spec="minilm", modalities=("text",), precision=precision), "cpu")
    passes = passes_of(embedder, texts)
    lengths = [embedder.length(one) for batch in passes for one in batch]

    def embed(batches: Sequence[list[Any]]) -> float:
        began = time.perf_counter()
        for batch in batches:
            dict(embedder.embed(batch))
        return time.perf_counter() - began

    embed(passes[:1])
    bound = gemm_gflops(dtype)
    seconds = embed(passes)
    bound = max(bound, gemm_gflops(dtype))
    with traced(activities=[ProfilerActivity.CPU]) as trace:
        embed(passes)
    spent: dict[str, float] = {}
    for event in trace.key_averages():
        kind = KINDS.get(event.key, "other")
        spent[kind] = spent.get(kind, 0.0) + event.self_cpu_time_total
    reached = flop(lengths) / seconds / 1e9
    padded = sum(len(batch) * embedder.length(batch[0]) for batch in passes)
    return {
        "precision": precision,
        "shares": {kind: round(spent[kind] / sum(spent.values()), 3) for kind in sorted(spent, key=spent.__getitem__)},
        "gflops": round(reached, 1),
        "gemm_gflops": round(bound, 1),
        "gemm_gflops_all": round(of_all, 1),
        "utilisation": round(reached / bound, 3),
        "padding": round(1 - sum(lengths) / padded, 4),
        "tokens_per_s": round(sum(lengths) / seconds),
        "cores": cores,
    }


def main() -> None:
    """One profile."""
    texts = texts_of(Path(sys.argv[2]))
    print(json.dumps(profile(sys.argv[1], texts[:: max(1, len(texts) // TEXTS)])))


if __name__ == "__main__":
    main()
