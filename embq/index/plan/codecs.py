"""Codecs of list entries: code size, dimensions and encoding speed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

TRANSFORM = re.compile(r"(?:OPQ[1-9]\d*_|PCA[RW]{0,2}|RR|Pad|ITQ)([1-9]\d*)|OPQ[1-9]\d*|RR|ITQ|L2norm")
"""A step before the lists as faiss writes it, "PCAR192" or "OPQ64_448", with the dimensions that it leaves."""

ID_BYTES = 8
"""Every entry of a list carries its row's id, an int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A codec for list entries.

    Attributes:
        key: faiss' name of it in a factory string: "RaBitQ4".
        transform: what is done to vectors first, as faiss writes it: "" or "PCAR192".
        code_bytes: bytes of one code.
        coded_dim: dimensions after the transform.
        list_dim: dimensions of the centroids: by this many leading ones, found by PCA, a row's list is found.
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

    def bytes_per_vector(self) -> int:
        """Bytes of one list entry in RAM or in a lists file: code and id."""
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


# Bits of a number, and rows that one core encodes per second at 512 dimensions (measured, faiss 1.15.1, one core of an
# EPYC).
_SCALAR = {
    "Flat": (32, 2e6),
    "SQfp16": (16, 900e3),
    "SQbf16": (16, 900e3),
    "SQ8": (8, 730e3),
    "SQ6": (6, 500e3),
    "SQ4": (4, 500e3),
}
# The same rows, by bits of a number or of a piece.
_RABITQ_ROWS_S = {1: 190e3, 2: 27e3, 3: 20e3, 4: 16e3, 5: 12e3, 6: 9e3, 7: 6.5e3, 8: 4.7e3, 9: 3e3}
_EDEN_ROWS_S = 60e3
_PQ_ROWS_S = {4: 150e3, 8: 60e3}


def codec(name: str, dim: int, *, list_dim: int | None = None) -> Codec:
    """The codec of this name for vectors of `dim` dimensions.

    Args:
        list_dim: dimensions of the centroids; None for those of the codes.

    Raises:
        ValueError: there is no such codec, or not for this many dimensions.
    """
    *transforms, key = name.split(",")
    coded = dim
    for step in transforms:
        coded = _dim_after(step, coded)
    code_bytes, rows_s, refine, packed = _code(key, coded)
    return Codec(
        key=key,
        transform=",".join(transforms),
        code_bytes=code_bytes,
        coded_dim=coded,
        list_dim=min(list_dim or coded, coded),
        encode_rows_s=rows_s * (512 / coded),
        refine=refine,
        fastscan_at_load=packed,
    )


def _code(key: str, dim: int) -> tuple[int, float, bool, bool]:
    """Bytes of one code, rows that one core encodes a second at 512 dimensions, `Codec.refine` and
    `Codec.fastscan_at_load`; ValueError if there is no such code, or not for this many dimensions."""
    if key in _SCALAR:  # each number by itself
        bits, rows_s = _SCALAR[key]
        return math.ceil(dim * bits / 8), rows_s, bits < 8, False
    if match := re.fullmatch(r"(RaBitQ|EDEN)([1-9])?", key):  # some bits of each number, factors for the whole vector
        bits = int(match[2] or 1)
        if match[1] == "EDEN":
            return math.ceil(dim * bits / 8) + 8, _EDEN_ROWS_S, bits < 6, False
        # One bit of sign and two factors; beyond that, the other bits and three factors more.
        size = math.ceil(dim / 8) + 8 + (math.ceil(dim * (bits - 1) / 8) + 12 if bits > 1 else 0)
        # With more bits the packed lists are slower than plain ones (faiss 1.15.1).
        return size, _RABITQ_ROWS_S[bits], bits < 6, bits == 1
    if match := re.fullmatch(r"PQ(\d+)(?:x(4|8))?", key):  # pieces of the vector, a word of a codebook for each
        pieces, bits = int(match[1]), int(match[2] or 8)
        if pieces < 1 or dim % pieces:
            raise ValueError(f"{key} cuts vectors into {pieces} pieces, and {dim} dimensions cannot be cut so")
        return math.ceil(pieces * bits / 8), _PQ_ROWS_S[bits], True, bits == 4
    raise ValueError(f"there is no codec {key!r}")


def _dim_after(step: str, dim: int) -> int:
    """Dimensions after one step of a transform; ValueError if there is none such."""
    match = TRANSFORM.fullmatch(step)
    if match is None:
        raise ValueError(f"there is no transform {step!r}")
    return int(match[1] or dim)
