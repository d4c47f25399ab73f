"""Ray Data's `map_batches` with two actors, each with the model and half of the cores: seconds and vectors.

    .venv-bench/bin/python -m bench.text_ray BATCH TEXTS.jsonl VECTORS.npy

The time begins with the first batch that an actor takes when both have loaded their model and warmed up, and ends when
every row is back. Each actor encodes BATCH texts in a forward pass. Nothing leaves this
machine: the cluster listens on the loopback, without dashboard and without statistics.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.text_peers import model_of, texts_of

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_DEDUP_LOGS": "0"}

ACTORS = 2
ROWS_PER_BATCH = 250
"""Texts that an actor takes at once: `encode` sorts them by length, and 20 of these share 5,000 texts evenly."""
READY_S = 120.0


class Actor:
    """Encodes batches.

    Args:
        ready: folder in which each actor says that it is ready, so that both begin at once.
        some: texts for the warm-up.
        batch: texts in a forward pass.
    """

    def __init__(self, ready: str, some: list[str], batch: int, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._model = model_of("float32")
        self._batch = batch
        self.encode(some)
        (Path(ready) / str(os.getpid())).touch()
        deadline = time.monotonic() + READY_S
        while len(os.listdir(ready)) < ACTORS and time.monotonic() < deadline:
            time.sleep(0.01)

    def encode(self, texts: list[str]) -> np.ndarray:
        """The vectors."""
        vectors: np.ndarray = self._model.encode(texts, batch_size=self._batch)
        return vectors

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One batch; with each row the time at which the batch began, in monotonic seconds."""
        count, began = len(rows["text"]), time.monotonic()
        vectors = self.encode([str(text) for text in rows["text"]])
        return {
            "n": rows["n"],
            "vector": vectors,
            "began": np.full(count, began),
            "actor": np.full(count, os.getpid()),
        }


def main() -> None:
    """One measurement."""
    import ray

    batch, source, target = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    texts = texts_of(source)
    cores = os.cpu_count() or 1
    rows_per_batch = min(ROWS_PER_BATCH, max(1, len(texts) // (2 * ACTORS)))
    state = tempfile.TemporaryDirectory(prefix="ray-")
    ray.init(
        num_cpus=max(ACTORS, cores),
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=256 * 2**20,
        _temp_dir=state.name,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    items = [{"n": n, "text": text} for n, text in enumerate(texts)]
    data = ray.data.from_items(items, override_num_blocks=-(-len(texts) // rows_per_batch)).materialize()
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as ready:
        encoded = data.map_batches(
            Actor,
            fn_constructor_args=(ready, texts[:: max(1, len(texts) // 128)], batch, max(1, cores // ACTORS)),
            batch_size=rows_per_batch,
            compute=ray.data.ActorPoolStrategy(size=ACTORS),
            num_cpus=1,
        )
        parts = list(encoded.iter_batches(batch_size=None, batch_format="numpy"))
        ended = time.monotonic()
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    assert sorted(columns["n"]) == list(range(len(texts)))
    np.save(target, columns["vector"][np.argsort(columns["n"])].astype(np.float32))
    told = {"seconds": ended - columns["began"].min(), "actors": len(set(columns["actor"].tolist()))}
    print(json.dumps(told))
    ray.shutdown()
    state.cleanup()


if __name__ == "__main__":
    main()
