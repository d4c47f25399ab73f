"""One measurement of embq's reading, in a process of its own: shards in, batches of pixels out.

    python -m bench.image_readers_ours BATCH_SIZE FOLDER

These are the stages of a worker process from the shard to the batch that travels to its device, and on to the result,
with the pixels of open_clip's ViT-B-32 by the path that a run takes by itself, and as many decode threads as there are
cores (see `bench.bare`). The device takes no time: the images of each batch are copied to one place, as a GPU would
copy them, and the answer is equal vectors. The batch is of bytes, which the device brings to numbers; clip-retrieval's
is of numbers.

Prints a line of JSON: "samples", "seconds" from the moment at which the first shard is begun, and "cpu_s".
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.bare import embed_all, plan
from bench.image_readers_theirs import MODEL
from embq.core.models import ModelConfig
from embq.worker.embedders.base import Embedder
from embq.worker.embedders.image.buffer_pool import gathered
from embq.worker.embedders.registry import load


class Measured:
    """Gives a model without a device, takes the results, and counts what is in them."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.samples = 0
        self.ended = self.cpu_ended = self.cpu_began = 0.0

    def send(self, result: Mapping[str, Any], /) -> None:
        self.samples += result["rows"]
        self.ended, self.cpu_ended = time.monotonic(), time.process_time()

    def load(self, config: ModelConfig, device: str) -> Embedder:
        """The model, of which everything works but the device."""
        embedder: Any = load(config, device)
        answer = np.full((self.batch_size, *embedder.dims.values()), 0.5, np.float32)

        def embed(batch: Sequence[Any]) -> Mapping[str, np.ndarray]:
            pixels = gathered([ready["image"] for ready in batch])
            assert pixels.dtype == torch.uint8
            assert len(pixels) == len(batch)
            return {"image": answer[: len(batch)]}

        embedder.embed = embed
        embedder.batch_size = embedder.window = self.batch_size
        self.cpu_began = time.process_time()
        return embedder  # type: ignore[no-any-return]


def main() -> None:
    batch_size, source = int(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as folder:
        root = Path(folder) / "out"
        plan(source, root, f"open_clip:{MODEL}?init=random", 1, modalities=("image",))
        measured = Measured(batch_size)
        began = embed_all(root, measured, measured.load)
    figures = {"samples": measured.samples, "seconds": measured.ended - began}
    print(json.dumps(figures | {"cpu_s": measured.cpu_ended - measured.cpu_began}))


if __name__ == "__main__":
    main()
