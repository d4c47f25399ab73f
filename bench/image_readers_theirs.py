"""One measurement of clip-retrieval's own reader, in a process of its own: shards in, batches of pixels out.

    python -m bench.image_readers_theirs PROCESSES BATCH_SIZE SHARD [SHARD ...]

It is `clip_retrieval.clip_inference.reader.WebdatasetReader` as its worker makes it: images only (`enable_text` and
`enable_metadata` off), `PIL.Image.open` and open_clip's transform in the processes of a torch DataLoader, two batches
ahead of each. Of the package only this module is imported; the package itself would import Flask, faiss and wandb.

Prints a line of JSON: "samples", "seconds" since the reader was asked for its first batch, "cpu_s" of all processes;
and "steady_samples" and "steady_seconds" from the batch on with which each process has given one, so without starting
them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import warnings
from importlib.metadata import distribution
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
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


def _cpu_s() -> float:
    """CPU seconds of this process, and of those that it started and that have ended."""
    return sum(used.ru_utime + used.ru_stime for used in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))


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
    cpu_began = _cpu_s()
    began = first_at = time.perf_counter()
    for number, batch in enumerate(reader, 1):
        samples += len(batch["image_tensor"])
        if number == int(processes):
            first, first_at = samples, time.perf_counter()
    ended = time.perf_counter()
    figures = {"samples": samples, "seconds": ended - began, "cpu_s": _cpu_s() - cpu_began}
    print(json.dumps(figures | {"steady_samples": samples - first, "steady_seconds": ended - first_at}))


if __name__ == "__main__":
    main()
