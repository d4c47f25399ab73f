"""One measurement of clip-retrieval's own reader, in a process of its own: shards in, batches of pixels out.

    python -m bench.image_readers_theirs PROCESSES BATCH_SIZE SHARD [SHARD ...]

It is `clip_retrieval.clip_inference.reader.WebdatasetReader` as its worker makes it: images only (`enable_text` and
`enable_metadata` off), `PIL.Image.open` and open_clip's transform in the processes of a torch DataLoader, two batches
ahead of each. Of the package only this module is imported; the package itself would import Flask, faiss and wandb.

Prints a line of JSON: "samples", "seconds" since the reader was asked for the first batch, and the same from the batch
on with which each process has given one, "steady_samples" and "steady_seconds": without starting the processes.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import warnings
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import open_clip

MODEL = "ViT-B-32"
MODULE = "clip_retrieval/clip_inference/reader.py"


def reader_module() -> ModuleType:
    """The module of the installed clip-retrieval that reads."""
    path = Path(str(distribution("clip-retrieval").locate_file(MODULE)))
    spec = importlib.util.spec_from_file_location("clip_retrieval_reader", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def transform() -> Any:
    """open_clip's evaluation transform of the model, which clip-retrieval takes from it."""
    return open_clip.create_model_and_transforms(MODEL, pretrained=None)[2]


def main() -> None:
    processes, batch_size, *shards = sys.argv[1:]
    # It asks for page-locked memory, and is told that there is no GPU.
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    reader = reader_module().WebdatasetReader(
        lambda shards: shards,
        transform(),
        None,
        shards,
        int(batch_size),
        int(processes),
        enable_text=False,
        enable_image=True,
        enable_metadata=False,
    )
    samples = first = 0
    began = first_at = time.perf_counter()
    for number, batch in enumerate(reader, 1):
        samples += len(batch["image_tensor"])
        if number == int(processes):
            first, first_at = samples, time.perf_counter()
    ended = time.perf_counter()
    figures = {"samples": samples, "seconds": ended - began}
    print(json.dumps(figures | {"steady_samples": samples - first, "steady_seconds": ended - first_at}))


if __name__ == "__main__":
    main()
