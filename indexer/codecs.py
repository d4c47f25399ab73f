"""How a vector is kept in an inverted list: the ladder of codecs, what each costs, and the lists that go with it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

ID_BYTES = 8
"""Every entry of a list carries its row's id, an int64."""

SMALL_ROWS = 10_000
"""Below this many rows a search that compares everything takes under a millisecond or two: one list, full vectors."""

POINTS_PER_CENTROID = 39
"""Fewer rows than this per list and k-means finds centroids that stand for nothing (faiss warns below 39)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """One rung of the ladder.

    Attributes:
        key: faiss' name of it in a factory string: "RaBitQ4".
        transform: what is done to vectors first, as faiss writes it: "" or "PCAR192".
        code_bytes: bytes of one code.
        coded_dim: dimensions after the transform.
        list_dim: dimensions of the centroids: by so many leading ones, found by PCA, a row's list is found.
        encode_rows_s: rows that one core encodes a second, their list being known (measured at 512 dimensions, scaled).
        refine: whether re-ranking by full rows from disk is needed for a recall of 0.95.
        fastscan_at_load: whether the lists are packed for SIMD scanning when they are loaded into RAM.
    """

    key: str
    transform: str = ""
    code_bytes: int
    coded_dim: int
    list_dim: int
    encode_rows_s: float
    refine: bool
    fastscan_at_load: bool

    @property
    def name(self) -> str:
        """As in a factory string, without the lists: "PCAR192,RaBitQ"."""
        return f"{self.transform},{self.key}" if self.transform else self.key

    def bytes_per_vector(self) -> int:
        """Of one list entry in RAM or in a lists file: code and id."""
        return self.code_bytes + ID_BYTES

    def factory(self, nlist: int, *, coarse: str = "") -> str:
        """The factory string with `nlist` lists; `coarse` is "" or an index over the centroids, "HNSW32"."""
        lists = f"IVF{nlist}_{coarse}" if coarse else f"IVF{nlist}"
        if self.list_dim < self.coded_dim and nlist > 1:
            lists += f"(PCA{self.list_dim},Flat)"
        return ",".join(part for part in (self.transform, lists, self.key) if part)

    def index_bytes(self, rows: int, nlist: int, dim: int) -> int:
        """RAM of an index of `rows`: entries, centroids, the transform's matrix, and the lists' own book-keeping."""
        padding = 16 * nlist * self.bytes_per_vector() if self.fastscan_at_load and nlist > 1 else 0
        matrices = 4 * dim * (self.coded_dim + 1) if self.transform else 0
        if self.list_dim < self.coded_dim:
            matrices += 4 * self.coded_dim * (self.list_dim + 1)
        return rows * self.bytes_per_vector() + padding + nlist * (4 * self.list_dim + 64) + matrices


# Rows that one core encodes per second at 512 dimensions (measured, faiss 1.15.1, one core of an EPYC).
_ENCODE_ROWS_S = {
    "Flat": 2e6,
    "SQfp16": 900e3,
    "SQbf16": 900e3,
    "SQ8": 730e3,
    "SQ6": 500e3,
    "SQ4": 500e3,
    "RaBitQ": 190e3,
    "EDEN": 60e3,
    "PQx4": 150e3,
    "PQx8": 60e3,
}
_RABITQ_ROWS_S = {2: 27e3, 3: 20e3, 4: 16e3, 5: 12e3, 6: 9e3, 7: 6.5e3, 8: 4.7e3, 9: 3e3}


def codec(name: str, dim: int, *, list_dim: int | None = None) -> Codec:
    """The codec of this name for vectors of `dim` dimensions.

    Args:
        list_dim: dimensions of the centroids; None for those of the codes.

    Raises:
        ValueError: there is no such codec, or not for this many dimensions.
    """
    *transforms, key = name.split(",")
    transform, coded = ",".join(transforms), dim
    for step in transforms:
        coded = _dim_after(step, coded)
    scale = 512 / coded
    lists = min(list_dim or coded, coded)
    if found := re.fullmatch(r"(Flat|SQfp16|SQbf16|SQ8|SQ6|SQ4)", key):
        bits = {"Flat": 32, "SQfp16": 16, "SQbf16": 16, "SQ8": 8, "SQ6": 6, "SQ4": 4}[key]
        exact = bits >= 16
        return Codec(
            key=key,
            transform=transform,
            code_bytes=math.ceil(coded * bits / 8),
            coded_dim=coded,
            list_dim=lists,
            encode_rows_s=_ENCODE_ROWS_S[key] * scale,
            refine=not exact and bits < 8,
            fastscan_at_load=False,
        )
    if found := re.fullmatch(r"(RaBitQ|EDEN)([1-9])?", key):
        kind, bits = found[1], int(found[2] or 1)
        if kind == "RaBitQ":
            # One bit of sign and two factors; beyond that, the other bits and three factors more.
            size = math.ceil(coded / 8) + 8 + (math.ceil(coded * (bits - 1) / 8) + 12 if bits > 1 else 0)
            rows_s = _RABITQ_ROWS_S.get(bits, _ENCODE_ROWS_S["RaBitQ"])
        else:
            size, rows_s = math.ceil(coded * bits / 8) + 8, _ENCODE_ROWS_S["EDEN"]
        return Codec(
            key=key,
            transform=transform,
            code_bytes=size,
            coded_dim=coded,
            list_dim=lists,
            encode_rows_s=rows_s * scale,
            refine=bits < 6,
            # With more bits the packed lists are slower than plain ones (faiss 1.15.1).
            fastscan_at_load=kind == "RaBitQ" and bits == 1,
        )
    if found := re.fullmatch(r"PQ(\d+)(?:x(4|8))?", key):
        pieces, bits = int(found[1]), int(found[2] or 8)
        if pieces < 1 or coded % pieces:
            raise ValueError(f"{key} cuts vectors into {pieces} pieces, and {coded} dimensions cannot be cut so")
        return Codec(
            key=key,
            transform=transform,
            code_bytes=math.ceil(pieces * bits / 8),
            coded_dim=coded,
            list_dim=lists,
            encode_rows_s=_ENCODE_ROWS_S[f"PQx{bits}"] * scale,
            refine=True,
            fastscan_at_load=bits == 4,
        )
    raise ValueError(f"there is no codec {key!r}")


def _dim_after(step: str, dim: int) -> int:
    """Dimensions after one step of a transform, as faiss writes it: "PCAR192", "OPQ64_448", "RR", "L2norm"."""
    if found := re.fullmatch(r"OPQ(\d+)(?:_(\d+))?", step):
        return int(found[2] or dim)
    if found := re.fullmatch(r"(?:PCA[RW]{0,2}|RR|Pad|ITQ)(\d+)", step):
        return int(found[1])
    if re.fullmatch(r"RR|L2norm|ITQ", step):
        return dim
    raise ValueError(f"there is no transform {step!r}")


def ladder(dim: int, *, metric: str = "cosine", refine: bool = True) -> Iterator[Codec]:
    """The codecs that a plan may choose by itself, the best first, each smaller than the one before.

    With rows for re-ranking at hand, a code has only to bring the true neighbours among the first few dozen: 4-bit
    product codes, 2 dimensions each, are scanned fastest. Without, codes must be exact themselves.

    Args:
        metric: "cosine", "l2", or "ip", with which dimensions cannot be left out.
        refine: whether answers are re-ranked by full rows.
    """
    smallest = math.inf
    for name in _refined(dim, metric) if refine else _unrefined(dim, metric):
        rung = codec(name, dim, list_dim=list_dim(dim) if metric != "ip" else None)
        if rung.code_bytes < smallest:
            smallest = rung.code_bytes
            yield rung


def list_dim(dim: int) -> int:
    """Leading dimensions that tell lists apart: a quarter finds the same neighbours with a tenth more probes, at a
    quarter of the time for training, for assigning and for choosing the probes."""
    return max(32, dim // 4 // 8 * 8)


def _refined(dim: int, metric: str) -> Iterator[str]:
    if dim < 16:
        yield from _unrefined(dim, metric)
        return
    if dim % 2 == 0:
        yield f"PQ{dim // 2}x4"
    if metric == "ip":
        yield from (f"PQ{dim // width}x4" for width in (3, 4, 6, 8) if dim % width == 0)
        return
    # Of the dimensions that PCA keeps, each 4 bits stand for so many.
    for share, width in ((2 / 3, 2), (1 / 2, 2), (1 / 2, 3), (1 / 4, 2), (1 / 4, 3), (1 / 8, 2)):
        kept = int(dim * share) // (8 * width) * (8 * width) or 8
        if kept % width == 0:
            yield f"PCAR{kept},PQ{kept // width}x4"


def _unrefined(dim: int, metric: str) -> Iterator[str]:
    yield "SQ8"
    for bits in (6, 5, 4, 3, 2):
        yield f"RaBitQ{bits}"
    yield "RaBitQ"
    if metric == "ip" or dim < 16:
        return
    for share in (2, 4, 8):
        yield f"PCAR{max(8, dim // share // 8 * 8)},RaBitQ"


def lists_for(rows: int, *, packed: bool = False) -> int:
    """How many lists `rows` vectors are put into: a power of two, with at least 39 rows for each.

    Args:
        packed: whether they are packed for SIMD. A packed list of 100 rows is scanned in the time that it takes to turn
            to it, so fewer and longer ones are best: 1.5 sqrt(rows), growing to 6 sqrt(rows) at a billion; else
            4 sqrt(rows).
    """
    if rows < SMALL_ROWS:
        return 1
    factor = 1.5 * max(1.0, rows / 1e6) ** 0.2 if packed else 4.0
    return min(1 << round(math.log2(factor * math.sqrt(rows))), most_lists(rows))


def most_lists(rows: int) -> int:
    """The largest power of two that leaves each list enough rows to be trained."""
    return 1 << int(math.log2(max(1, rows / POINTS_PER_CENTROID)))
