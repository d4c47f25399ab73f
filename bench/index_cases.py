"""Cases of the benchmark of the index: sets of vectors, limits, and folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "cache"
"""Not in git. Vectors, and the indexes of both sides."""

K = 10
QUERIES = 1_000
"""Held-out queries of each set; a set may have fewer."""

RECALL = "0.95@10"
"""Recall that ours is asked for. The peer cannot be asked for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One index on each side.

    Attributes:
        vectors: the set, a folder of the data.
        rows: the first so many of it.
        index_memory: what the index may take, as both write it: powers of 1024.
        memory: what building it may take.
        queries: name of a query set -> its file in the folder of the vectors.
        key: faiss factory string that ours is told to build; empty where it chooses.
    """

    vectors: str
    rows: int
    index_memory: str
    memory: str
    queries: tuple[tuple[str, str], ...] = (("text", "queries.npy"),)
    key: str = ""

    @property
    def name(self) -> str:
        """minilm-60000-12M."""
        return f"{self.vectors}-{self.rows}-{self.index_memory}" + ("-their-key" if self.key else "")


CASES = (
    Case(vectors="minilm", rows=60_000, index_memory="12M", memory="500M"),
    Case(vectors="minilm", rows=60_000, index_memory="6M", memory="500M"),
    Case(
        vectors="openclip",
        rows=20_000,
        index_memory="4M",
        memory="500M",
        queries=(("image", "queries.npy"), ("text", "text_queries.npy")),
    ),
    Case(vectors="minilm", rows=300_000, index_memory="60M", memory="1G"),
    Case(vectors="minilm", rows=300_000, index_memory="30M", memory="1G"),
    Case(vectors="minilm", rows=720_000, index_memory="150M", memory="2G"),
    Case(vectors="minilm", rows=720_000, index_memory="75M", memory="2G"),
)


def cached(path: Path) -> Path:
    """The path; ends with a sentence where bench.index has not made it yet."""
    if not path.exists():
        raise SystemExit(f"{path} does not exist: python -m bench.index makes it, in an hour")
    return path


def chosen(text: str) -> list[Case]:
    """The cases of a comma-separated list: names, "all", or others as VECTORS:ROWS:INDEX_MEMORY:MEMORY.

    Raises ValueError where there is no such case.
    """
    known = {case.name: case for case in (*CASES, THEIR_KEY)}
    found: list[Case] = []
    for name in text.split(","):
        if name == "all":
            found += known.values()
        elif name in known:
            found.append(known[name])
        else:
            vectors, rows, index_memory, memory = name.split(":")
            found.append(Case(vectors=vectors, rows=int(rows), index_memory=index_memory, memory=memory))
    return found


THEIR_KEY = Case(
    vectors="minilm", rows=60_000, index_memory="12M", memory="500M", key="OPQ128_512,IVF1024_HNSW32,PQ128x8"
)
"""Their key through our pipeline: what of the difference is the key, and what the pipeline."""
