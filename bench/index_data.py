"""Real embeddings for the benchmark of the index, embedded by `embq run` out of what is installed. No download.

    python -m bench.index_data [--rows 300000] [--images 20000] [--data bench/cache]

Makes, under the folder of the data:

    minilm/vectors.npy, queries.npy         of sentences and short paragraphs (`bench.index_texts`), 384 dimensions
    openclip/vectors.npy, queries.npy       of crops of photographs, 384 dimensions
    openclip/text_queries.npy               of sentences, by the text tower of the same model
    minilm/run-300000                       the run that the vectors come from, with keys and texts

All float16, of length 1. What is there already stays; a run that was interrupted goes on. The order of the texts is
that of a hash, so the first n rows are a random sample. The open_clip model has random weights by a seed, because
none are installed: its vectors lie close together, far more so than those of a trained model.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from bench.index_cases import DATA
from bench.index_texts import code, texts
from bench.pictures import shards
from embq.core.run.reader import row_tables
from embq.core.storage.paths import place
from examples.demo.collect import PHOTOGRAPHS

HELD_OUT = 2_000
MODEL = "open_clip:ViT-S-32?init=random"
SEED = 1234
TEXT_QUERIES = 500
PER_SHARD = 1_000
SIDE = 224


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    make_texts(options.data, options.rows)
    make_images(options.data, options.images)


def make_texts(data: Path, rows: int) -> int:
    """`minilm` with at least `rows` rows, or as many as there are texts; gives their number."""
    folder = data / "minilm"
    if (there := _rows(folder / "vectors.npy")) >= rows and (folder / "queries.npy").exists():
        return there
    folder.mkdir(parents=True, exist_ok=True)
    source, asked = folder / f"corpus-{rows}.jsonl", folder / "queries.jsonl"
    if not source.exists():
        prose = texts()
        asked.write_text(_lines("q", prose[-HELD_OUT:]))
        corpus = prose[:-HELD_OUT]
        if len(corpus) < rows:
            corpus += code(set(prose))[: rows - len(corpus)]
        source.write_text(_lines("t", corpus[:rows]))
    precision = "int8" if _computes_int8() else "fp32"
    _embed(asked, folder / "run-queries", "minilm", precision)
    _embed(source, folder / f"run-{rows}", "minilm", precision)
    _save(folder / "queries.npy", vectors_of(folder / "run-queries"))
    _save(folder / "vectors.npy", vectors_of(folder / f"run-{rows}"))
    return _rows(folder / "vectors.npy")


def make_images(data: Path, images: int) -> None:
    """`openclip` with `images` rows, and its two sets of queries."""
    folder = data / "openclip"
    if _rows(folder / "vectors.npy") >= images and (folder / "text_queries.npy").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "shards").exists():
        partial = folder / "shards.partial"
        shards(partial, crops(images + HELD_OUT // 2), PER_SHARD)
        partial.rename(folder / "shards")
    sentences = folder / "queries.jsonl"
    corpus = next((data / "minilm").glob("queries.jsonl"))
    sentences.write_text("".join(corpus.read_text().splitlines(keepends=True)[:TEXT_QUERIES]))
    _embed(sentences, folder / "run-text", MODEL, "fp32")
    _embed(folder / "shards", folder / "run", MODEL, "fp32")
    made = vectors_of(folder / "run")
    # In the order of the crops the photographs take turns; a random one has no such pattern.
    made = made[np.random.default_rng(SEED).permutation(len(made))]
    _save(folder / "text_queries.npy", vectors_of(folder / "run-text"))
    _save(folder / "queries.npy", made[images:])
    _save(folder / "vectors.npy", made[:images])


def crops(count: int) -> list[bytes]:
    """JPEGs of 224 pixels: square pieces of the photographs of scikit-image, of any place and scale."""
    data = Path(str(find_spec("skimage").submodule_search_locations[0])) / "data"  # type: ignore[union-attr, index]
    sources = [Image.open(data / name).convert("RGB") for name in PHOTOGRAPHS]
    random = np.random.default_rng(SEED)
    made = []
    for number in range(count):
        source = sources[number % len(sources)]
        side = float(random.uniform(0.15, 0.9)) * min(source.size)
        left, top = (float(random.uniform(0, whole - side)) for whole in source.size)
        piece = source.resize((SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + side, top + side), 2.0)
        encoded = io.BytesIO()
        piece.save(encoded, "JPEG", quality=90)
        made.append(encoded.getvalue())
    return made


def vectors_of(run: Path) -> np.ndarray:
    """The vectors of a run in the order of their keys, float16 (rows, d)."""
    keys: list[str] = []
    found: list[np.ndarray] = []
    for table in row_tables(place(str(run))):
        column = next(name for name in table.column_names if name.endswith("embedding"))
        keys += table["key"].to_pylist()
        flat = table[column].combine_chunks().flatten().to_numpy()
        found.append(flat.reshape(len(table), -1))
    vectors: np.ndarray = np.concatenate(found)[np.argsort(np.array(keys), kind="stable")].astype(np.float16)
    return vectors


def _embed(source: Path, run: Path, model: str, precision: str) -> None:
    """`embq run`, as a user starts it."""
    inputs = sorted(source.glob("*.tar")) if source.is_dir() else [source]
    command = ["-m", "embq", "run", *inputs, "--output", run, "--model", model, "--precision", precision, "--quiet"]
    # A process of one thread on each core: texts of different lengths keep two threads of one pass from keeping step.
    command += ["--devices", "cpu", "--workers", "2", "--write-batch-size", "50000"]
    subprocess.run([sys.executable, *map(str, command)], check=True, stdout=sys.stderr)


def _computes_int8() -> bool:
    return "avx512_vnni" in (flags := Path("/proc/cpuinfo").read_text()) or "avx_vnni" in flags


def _lines(letter: str, found: Iterable[str]) -> str:
    return "".join(
        json.dumps({"id": f"{letter}{number:07d}", "text": text}) + "\n" for number, text in enumerate(found)
    )


def _rows(path: Path) -> int:
    return len(np.load(path, mmap_mode="r", allow_pickle=False)) if path.exists() else 0


def _save(path: Path, vectors: np.ndarray) -> None:
    """Write a file of which no part is ever seen."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.save(file, vectors)
    partial.replace(path)


if __name__ == "__main__":
    main()
