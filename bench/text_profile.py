"""Bounds of texts on this CPU: shares of time by kind of operation, and GFLOP/s beside those of a large GEMM.

    python -m bench.text_profile encode|PRECISION TEXTS.jsonl

Prints one JSON object. A worker computes a pass on each core, so one core is profiled, with one thread; `encode` of
sentence-transformers has all of them. The FLOP of a text are those of the model's matrix products for its own tokens,
without padding: layers * (2n(4d^2 + 2df) + 4n^2 d). The bound is what `torch` reaches in a product of 2,048 x 2,048 x
2,048 with the same type in the same process, the best of some: on that core, and (`gemm_gflops_all`) on all of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.text_peers import DEFAULT, model_of, texts_of

LAYERS, DIM, INNER = 6, 384, 1536
"""Shape of all-MiniLM-L6-v2."""
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
INT8_KINDS = {"FullyConnected": "gemm", "MatMul": "gemm", "Subgraph": "gelu", "MVN": "normalisation"}
"""The same for OpenVINO, which quantises within the gelu."""


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
    from embq.core.units import Sample

    samples = [Sample(ordinal=n, key=str(n), text=text) for n, text in enumerate(texts)]
    waiting = sorted(embedder.prepare(samples), key=lambda one: -embedder.length(one))
    passes = []
    while waiting:
        count = max(1, embedder.token_budget // embedder.length(waiting[0]))
        passes.append(waiting[:count])
        waiting = waiting[count:]
    return passes


def profile(precision: str, texts: Sequence[str]) -> dict[str, Any]:
    """The figures of one precision of embq, on one core."""
    import torch

    from embq.core.models import ModelConfig
    from embq.worker.embedders.registry import load

    config = ModelConfig(spec="minilm", modalities=("text",), precision=precision)
    if precision == "int8":
        return _int8_profile(lambda: load(config, "cpu"), texts)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    of_all = gemm_gflops(dtype)
    # Before the model is loaded, which gives each core a thread of its own, and these are not traced.
    torch.set_num_threads(1)
    embedder = load(config, "cpu")
    passes = passes_of(embedder, texts)
    found = _traced(lambda: _embed(embedder, passes), dtype, _lengths(embedder, passes))
    return {"who": precision, "gemm_gflops_all": round(of_all, 1), "padding": _padding(embedder, passes), **found}


def encode_profile(texts: Sequence[str]) -> dict[str, Any]:
    """The same of `SentenceTransformer.encode`, which computes one pass at a time on all cores."""
    import torch

    model = model_of("float32")
    lengths = [len(one) for one in model.tokenizer(list(texts), truncation=True, max_length=256)["input_ids"]]
    # It sorts by characters; by tokens there would be a little less padding.
    order = sorted(range(len(texts)), key=lambda n: -len(texts[n]))
    groups = [[lengths[n] for n in order[start : start + DEFAULT]] for start in range(0, len(order), DEFAULT)]
    padded = sum(len(group) * max(group) for group in groups)
    found = _traced(lambda: model.encode(list(texts), batch_size=DEFAULT), torch.float32, lengths)
    return {"who": "encode", "padding": round(1 - sum(lengths) / padded, 4), **found}


def _traced(embed: Callable[[], object], dtype: Any, lengths: Sequence[int]) -> dict[str, Any]:
    """Seconds of the second call beside a large GEMM, and where the time of the third goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as traced

    embed()
    bound = gemm_gflops(dtype)
    began = time.perf_counter()
    embed()
    seconds = time.perf_counter() - began
    bound = max(bound, gemm_gflops(dtype))
    with traced(activities=[ProfilerActivity.CPU]) as trace:
        embed()
    spent: dict[str, float] = {}
    for event in trace.key_averages():
        kind = KINDS.get(event.key, "other")
        spent[kind] = spent.get(kind, 0.0) + event.self_cpu_time_total
    reached = flop(lengths) / seconds / 1e9
    return {
        "shares": _shares(spent, sum(spent.values())),
        "gflops": round(reached, 1),
        "gemm_gflops": round(bound, 1),
        "utilisation": round(reached / bound, 3),
        "tokens_per_s": round(sum(lengths) / seconds),
    }


def _int8_profile(load: Callable[[], Any], texts: Sequence[str]) -> dict[str, Any]:
    """By OpenVINO's own counters, which do not have its attention: that is most of the rest."""
    import torch

    from embq.worker.embedders.text import int8

    torch.set_num_threads(1)
    options, forward = int8._runtime_options, int8.Int8Trunk.forward
    spent: dict[str, float] = {}

    def counted(self: Any, *inputs: Any, **others: Any) -> Any:
        states = forward(self, *inputs, **others)
        for node in self._mine.request.get_profiling_info():
            kind = INT8_KINDS.get(node.node_type, "other")
            spent[kind] = spent.get(kind, 0.0) + node.real_time.total_seconds()
        return states

    with patch.object(int8, "_runtime_options", lambda: {**options(), "PERF_COUNT": True}):
        embedder = load()
    passes = passes_of(embedder, texts)
    lengths = _lengths(embedder, passes)
    _embed(embedder, passes)
    began = time.perf_counter()
    _embed(embedder, passes)
    seconds = time.perf_counter() - began
    with patch.object(int8.Int8Trunk, "forward", counted):
        _embed(embedder, passes)
    spent["attention"] = seconds - sum(spent.values())
    return {
        "who": "int8",
        "padding": _padding(embedder, passes),
        "shares": _shares(spent, seconds),
        "gflops": round(flop(lengths) / seconds / 1e9, 1),
        "tokens_per_s": round(sum(lengths) / seconds),
    }


def _embed(embedder: Any, passes: Sequence[list[Any]]) -> None:
    for batch in passes:
        dict(embedder.embed(batch))


def _lengths(embedder: Any, passes: Sequence[list[Any]]) -> list[int]:
    return [embedder.length(one) for batch in passes for one in batch]


def _padding(embedder: Any, passes: Sequence[list[Any]]) -> float:
    padded = sum(len(batch) * embedder.length(batch[0]) for batch in passes)
    return round(1 - sum(_lengths(embedder, passes)) / padded, 4)


def _shares(spent: Mapping[str, float], whole: float) -> dict[str, float]:
    return {kind: round(spent[kind] / whole, 3) for kind in sorted(spent, key=spent.__getitem__, reverse=True)}


def main() -> None:
    """One profile."""
    texts = texts_of(Path(sys.argv[2]))
    some = texts[:: max(1, len(texts) // TEXTS)]
    print(json.dumps(encode_profile(some) if sys.argv[1] == "encode" else profile(sys.argv[1], some)))


if __name__ == "__main__":
    main()
