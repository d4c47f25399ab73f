"""Speed of a worker's decode threads where they do nothing else: a measurement in a process of its own.

    python -m bench.image_decoding MODEL THREADS SAMPLES SHARD [SHARD ...]

The encoded images of the shards are in memory. The threads take chunks of them as those of a worker do, and prepare
them for the model until so many samples are done; what they make is dropped. Prints a line of JSON: "samples",
"seconds", and "cpu_s" of the process in that time.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from embq.core.models import DECODES, ModelConfig
from embq.core.units import Sample
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import ReadOptions
from embq.worker.embedders.base import Embedder
from embq.worker.embedders.registry import load
from embq.worker.stages.read import CHUNK_SAMPLES


def chunks_of(shards: Sequence[str]) -> list[list[Sample]]:
    """The samples of shards, as a worker's threads get them."""
    tar = SOURCES["tar"]
    units = [unit for shard in shards for unit in tar.split(shard, ReadOptions())]
    samples = [sample for unit in units for sample in tar.read(unit)]
    return [samples[start : start + CHUNK_SAMPLES] for start in range(0, len(samples), CHUNK_SAMPLES)]


class Chunks:
    """Hands out chunks over and over until so many samples were had. Safe to use from any thread."""

    def __init__(self, chunks: Sequence[Sequence[Sample]], samples: int) -> None:
        self.samples = 0
        self._wanted = samples
        self._lock = threading.Lock()
        self._chunks = itertools.cycle(chunks)

    def __iter__(self) -> Iterator[Sequence[Sample]]:
        while True:
            with self._lock:
                if self.samples >= self._wanted:
                    return
                chunk = next(self._chunks)
                self.samples += len(chunk)
            yield chunk


def prepare(embedder: Embedder, chunks: Chunks) -> None:
    """The work of one thread."""
    for chunk in chunks:
        for ready in embedder.prepare(chunk):
            if isinstance(ready, Exception):
                raise ready


def main() -> None:
    model, threads, samples, *shards = sys.argv[1:]
    config = ModelConfig(spec=model, modalities=("image",), precision="fp32", decode=DECODES[0])
    embedder = load(config, "cpu")
    every = chunks_of(shards)
    prepare(embedder, Chunks(every[:1], CHUNK_SAMPLES))
    chunks = Chunks(every, int(samples))
    working = [threading.Thread(target=prepare, args=(embedder, chunks)) for _ in range(int(threads))]
    began, cpu_began = time.perf_counter(), time.process_time()
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    print(json.dumps({"samples": chunks.samples, "seconds": seconds, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main()
