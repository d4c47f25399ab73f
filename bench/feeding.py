"""What a worker's own Python costs each sample: the bound of how many one process can feed to a device.

    python -m bench.feeding [NAME ...]

A card waits where the threads of a process wait for the interpreter's lock. So no card is needed to see it: decoding is
replaced by sleep or by nothing, and what remains is counted. Each figure comes from processes of its own, `ROUNDS` of
them in turns, and is a ratio of two of them where a time alone would tell the machine:

- threads: a decoder that sleeps 1 ms an image and holds no lock; rate of 16 and 32 threads, of so many times one;
- lock: times that an image has extensions let go of the lock, counted behind `PyEval_SaveThread`;
- prepare: thread time of `prepare` beside the native call, in microseconds an image;
- pipeline: CPU time of a whole pipeline without decoding, of one native decode, for images and for images with captions
  and metadata;
- device: rows/s into a device that takes 30 us an image, with 40 threads whose decoder sleeps;
- one core: 16 threads on one core, really decoding, of one thread there;
- text: CPU time of a pipeline of texts whose tokens cost nothing, in microseconds a text.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from bench import pictures
from bench.bare import embed_all, plan
from bench.report import table, write
from embq.core.models import DECODES, ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.base import Embedder, PendingVectors
from embq.worker.embedders.device.hardware import keep_uncollected
from embq.worker.embedders.device.placement import ACCELERATOR_SIZES
from embq.worker.embedders.image.native import Native, native
from embq.worker.embedders.registry import load
from embq.worker.stages.read import CHUNK_SAMPLES

ROUNDS = 5
MODEL = "open_clip:ViT-B-32?init=random"
SIDE, IMAGES, PER_SHARD = 256, 1_000, 1_000
SLEEP_S = 0.001
BARS = {
    "threads 16": 0.95,
    "threads 32": 0.95,
    "lock": 0.1,
    "prepare us": 2.0,
    "pipeline images": 0.04,
    "pipeline captions": 0.10,
    "device rows/s": 30_000,
    "one core": 0.97,
    "text us": 10.0,
}
LEAST = {"threads 16", "threads 32", "device rows/s", "one core"}
"""Figures that are to be at least their bar; the others at most."""

COUNTER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
static atomic_long count;
long bench_count(void) { return count; }
void *PyEval_SaveThread(void) {
  static void *(*real)(void);
  if (!real) real = dlsym(RTLD_NEXT, "PyEval_SaveThread");
  count++;
  return real();
}
"""


def chunks(folder: Path, count: int = IMAGES) -> list[list[Sample]]:
    """Encoded photographs, as a worker's threads get them."""
    images = [path.read_bytes() for path in sorted((folder / "images").iterdir())][:count]
    samples = [Sample(ordinal=n, key=str(n), image=data) for n, data in enumerate(images)]
    return [samples[start : start + CHUNK_SAMPLES] for start in range(0, len(samples), CHUNK_SAMPLES)]


def embedder_of(*modalities: str) -> Embedder:
    """A CLIP model whose device answers at once."""
    config = ModelConfig(spec=MODEL, modalities=modalities or ("image",), precision="fp32", decode=DECODES[0])
    return without_device(load(config, "cpu"))


def without_device(embedder: Any, seconds: float = 0.0) -> Embedder:
    """The model of which everything works but the device: a stand-in for a card, whose passes are as large as a card's,
    are begun while the one before runs, and take so long for a sample.
    """
    free_at = 0.0

    def embed(batch: Sequence[Any]) -> Mapping[str, np.ndarray]:
        nonlocal free_at
        free_at = over_at = max(free_at, time.monotonic()) + seconds * len(batch)

        def arrive() -> Mapping[str, np.ndarray]:
            time.sleep(max(0.0, over_at - time.monotonic()))
            return {name: np.full((len(batch), dim), 0.5, np.float32) for name, dim in embedder.dims.items()}

        return PendingVectors(embedder.dims, arrive, is_over=lambda: time.monotonic() >= over_at)

    embedder.embed = embed
    if embedder.token_budget:
        embedder.batch_size, embedder.window = ACCELERATOR_SIZES.texts, ACCELERATOR_SIZES.window
        embedder.token_budget = ACCELERATOR_SIZES.tokens
    else:
        embedder.batch_size = embedder.window = ACCELERATOR_SIZES.images
    return embedder  # type: ignore[no-any-return]


def decode_by(function: Callable[[int], object]) -> None:
    """Have `function(number of images)` stand for the native call."""

    def prepare(_self: Native, images: Sequence[object], *_rest: object, fast: bool) -> list[int]:
        del fast
        function(len(images))
        return [0] * len(images)

    Native.prepare = prepare  # type: ignore[assignment,method-assign]


def asleep(count: int) -> None:
    """Sleep for so many images without the interpreter's lock, in one call."""
    usleep(int(count * SLEEP_S * 1e6))


usleep = ctypes.CDLL(None).usleep


def rate(embedder: Embedder, work: Sequence[Sequence[Sample]], threads: int) -> float:
    """Images/s of so many threads that prepare chunks."""
    each = max(1, len(work) * 2 // threads)

    def prepare(number: int) -> None:
        for at in range(each):
            embedder.prepare(work[(number * each + at) % len(work)])

    started = [threading.Thread(target=prepare, args=(number,)) for number in range(threads)]
    began = time.perf_counter()
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return threads * each * CHUNK_SAMPLES / (time.perf_counter() - began)


def measure_threads(folder: Path) -> dict[str, float]:
    embedder, work = embedder_of(), chunks(folder, 31 * CHUNK_SAMPLES)
    decode_by(asleep)
    one = rate(embedder, work[:8], 1)
    return {f"threads {count}": rate(embedder, work * (count // 4), count) / (count * one) for count in (16, 32)}


def measure_lock(folder: Path) -> dict[str, float]:
    counter = ctypes.CDLL(os.environ["LD_PRELOAD"])
    counter.bench_count.restype = ctypes.c_long
    embedder, work = embedder_of(), chunks(folder, 320)
    embedder.prepare(work[0])
    before = counter.bench_count()
    for chunk in work:
        embedder.prepare(chunk)
    return {"lock": (counter.bench_count() - before - 1) / sum(map(len, work))}


def measure_prepare(folder: Path) -> dict[str, float]:
    embedder, work = embedder_of(), chunks(folder, 31 * CHUNK_SAMPLES)
    decode_by(int)
    for chunk in work:
        embedder.prepare(chunk)
    began = time.thread_time()
    for chunk in work * 5:
        embedder.prepare(chunk)
    return {"prepare us": (time.thread_time() - began) * 1e6 / sum(map(len, work * 5))}


def measure_pipeline(folder: Path) -> dict[str, float]:
    decode_us = native_us(folder)
    decode_by(int)
    images = pipeline_us(folder / "tars", folder / "out-images", MODEL, ("image",))
    captions = pipeline_us(folder / "captions", folder / "out-captions", MODEL, ("image", "text"))
    return {
        "decode us": decode_us,
        "images us": images,
        "captions us": captions,
        "pipeline images": images / decode_us,
        "pipeline captions": captions / decode_us,
    }


def measure_device(folder: Path) -> dict[str, float]:
    decode_by(asleep)
    cpu, seconds, rows = piped(folder / "tars", folder / "out", MODEL, ("image",), seconds=30e-6, threads=40)
    return {"device rows/s": rows / seconds, "device cpu us": cpu * 1e6 / rows}


def measure_core(folder: Path) -> dict[str, float]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    embedder, work = embedder_of(), chunks(folder, 31 * CHUNK_SAMPLES)
    one = rate(embedder, work, 1)
    return {"one core": rate(embedder, work * 4, 16) / one}


def measure_text(folder: Path) -> dict[str, float]:
    from embq.worker.embedders.text import tokens

    def rows(_self: object, texts: Sequence[str]) -> list[Any]:
        return [{"input_ids": ROW}] * len(texts)

    tokens.Tokens.rows = rows  # type: ignore[method-assign]
    return {"text us": pipeline_us(folder / "texts.jsonl", folder / "out-texts", "minilm", ("text",))}


ROW = np.ones(64, np.int32)


def native_us(folder: Path) -> float:
    """Thread time of one native decode."""
    made = native()
    if made is None:
        sys.exit("embq-native is not installed: pip install ./native")
    embedder: Any = embedder_of()
    work = chunks(folder, 10 * CHUNK_SAMPLES)
    fit = embedder.images.pixels.fit
    rows = np.empty((CHUNK_SAMPLES, fit.height, fit.width, 3), np.uint8)
    began = time.thread_time()
    for chunk in work:
        made.prepare([sample.image for sample in chunk], [fit], [rows], fast=False)
    return (time.thread_time() - began) * 1e6 / sum(map(len, work))


def pipeline_us(source: Path, root: Path, model: str, modalities: tuple[str, ...]) -> float:
    """CPU microseconds of a sample, of a process that reads, prepares, embeds and publishes."""
    cpu, _, rows = piped(source, root, model, modalities)
    return cpu * 1e6 / rows


def piped(
    source: Path, root: Path, model: str, modalities: tuple[str, ...], *, seconds: float = 0.0, threads: int = 0
) -> tuple[float, float, int]:
    """(CPU seconds, seconds, rows) from the first unit to the last result."""
    plan(source, root, model, 1_000, modalities=modalities)
    taken = Taken()

    def loaded(config: ModelConfig, device: str) -> Embedder:
        embedder = without_device(load(config, device), seconds)
        keep_uncollected()
        taken.cpu_began = time.process_time()
        return embedder

    began = embed_all(root, taken, loaded, threads=threads)
    return taken.cpu_ended - taken.cpu_began, taken.ended - began, taken.rows


class Taken:
    """Takes results, and counts their rows."""

    def __init__(self) -> None:
        self.rows = 0
        self.cpu_began = self.cpu_ended = self.ended = 0.0

    def send(self, result: Any, /) -> None:
        self.rows += result["rows"]
        self.ended, self.cpu_ended = time.monotonic(), time.process_time()


PARTS: dict[str, Callable[[Path], dict[str, float]]] = {
    "threads": measure_threads,
    "lock": measure_lock,
    "prepare": measure_prepare,
    "pipeline": measure_pipeline,
    "device": measure_device,
    "core": measure_core,
    "text": measure_text,
}


def prepare_inputs(folder: Path) -> None:
    """Photographs as files and in shards, alone and with captions and metadata; and texts."""
    jpegs = pictures.jpegs((SIDE, SIDE), IMAGES, seed=0)
    (folder / "images").mkdir()
    for number, data in enumerate(jpegs):
        (folder / "images" / f"{number:05d}.jpg").write_bytes(data)
    shards = pictures.shards(folder / "few", jpegs, PER_SHARD)
    pictures.linked(folder / "tars", shards, 12)
    (folder / "few-captions").mkdir()
    few = folder / "few-captions" / "00000.tar"
    with tarfile.open(few, "w") as shard:
        for number, data in enumerate(jpegs):
            caption = f"a photograph of thing number {number} on a table"
            about = json.dumps(
                {"url": f"https://example.org/{number}.jpg", "width": SIDE, "height": SIDE, "nsfw": 0.01}
            )
            for name, content in (("jpg", data), ("txt", caption.encode()), ("json", about.encode())):
                member = tarfile.TarInfo(f"{number:09d}.{name}")
                member.size = len(content)
                shard.addfile(member, BytesIO(content))
    pictures.linked(folder / "captions", [few], 12)
    with open(folder / "texts.jsonl", "w") as lines:
        for number in range(20_000):
            lines.write(json.dumps({"id": str(number), "text": f"number {number} of some words " * 12}) + "\n")


def measured(name: str, folder: Path, counter: Path) -> dict[str, float]:
    """One part in a process of its own."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if name == "lock":
        environment["LD_PRELOAD"] = str(counter)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        for made in ("images", "tars", "captions", "texts.jsonl"):
            (Path(own) / made).symlink_to(folder / made)
        command = [sys.executable, "-m", "bench.feeding", "--part", name, own]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=1200)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Measure, print and write."""
    if sys.argv[1:2] == ["--part"]:
        print(json.dumps(PARTS[sys.argv[2]](Path(sys.argv[3]))))
        return
    wanted = sys.argv[1:] or list(PARTS)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as temporary:
        folder, counter = Path(temporary), Path(temporary) / "counter.so"
        prepare_inputs(folder)
        if "lock" in wanted and shutil.which("cc") is None:
            sys.exit("counting how often the lock is let go of needs a C compiler, cc")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", counter, "-x", "c", "-"], input=COUNTER.encode(), check=True)
        for _ in range(ROUNDS):
            for name in wanted:
                for figure, value in measured(name, folder, counter).items():
                    found.setdefault(figure, []).append(value)
    figures = {name: round(statistics.median(values), 4) for name, values in found.items()}
    rows = [
        [name, value, *(("", "") if name not in BARS else (BARS[name], "held" if holds(name, value) else "MISSED"))]
        for name, value in figures.items()
    ]
    table(["figure", "median", "bar", ""], rows)
    if not sys.argv[1:]:
        spread = {name: [round(min(values), 4), round(max(values), 4)] for name, values in found.items()}
        print("wrote", write("feeding", {"figures": figures, "spread": spread, "bars": BARS, "rounds": ROUNDS}))


def holds(name: str, value: float) -> bool:
    """Whether a figure keeps its bar."""
    return value >= BARS[name] if name in LEAST else value <= BARS[name]


if __name__ == "__main__":
    main()
