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

    @property
    def name(self) -> str:
        """The codec as in a factory string, without the lists: "PCAR192,RaBitQ"."""
        return f"{self.transform},{self.key}" if self.transform else self.key

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code:
    """Code of a family of codecs.

    Attributes:
        size_bytes: of one code.
        rows_s: that one core encodes a second at 512 dimensions.
        refine, packed: see `Codec.refine` and `Codec.fastscan_at_load`.
    """

    size_bytes: int
    rows_s: float
    refine: bool
    packed: bool


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
    coded = dim
    for step in transforms:
        coded = _dim_after(step, coded)
    code = _scalar(key, coded) or _binary(key, coded) or _product(key, coded)
    if code is None:
        raise ValueError(f"there is no codec {key!r}")
    return Codec(
        key=key,
        transform=",".join(transforms),
        code_bytes=code.size_bytes,
        coded_dim=coded,
        list_dim=min(list_dim or coded, coded),
        encode_rows_s=code.rows_s * (512 / coded),
        refine=code.refine,
        fastscan_at_load=code.packed,
    )


def _scalar(key: str, dim: int) -> _Code | None:
    """Each number by itself."""
    bits = {"Flat": 32, "SQfp16": 16, "SQbf16": 16, "SQ8": 8, "SQ6": 6, "SQ4": 4}.get(key)
    if bits is None:
        return None
    return _Code(size_bytes=math.ceil(dim * bits / 8), rows_s=_ENCODE_ROWS_S[key], refine=bits < 8, packed=False)


def _binary(key: str, dim: int) -> _Code | None:
    """Code with some bits of each number, and a few factors for the whole vector."""
    match = re.fullmatch(r"(RaBitQ|EDEN)([1-9])?", key)
    if match is None:
        return None
    kind, bits = match[1], int(match[2] or 1)
    if kind == "RaBitQ":
        # One bit of sign and two factors; beyond that, the other bits and three factors more.
        size = math.ceil(dim / 8) + 8 + (math.ceil(dim * (bits - 1) / 8) + 12 if bits > 1 else 0)
        rows_s = _RABITQ_ROWS_S.get(bits, _ENCODE_ROWS_S["RaBitQ"])
    else:
        size, rows_s = math.ceil(dim * bits / 8) + 8, _ENCODE_ROWS_S["EDEN"]
    # With more bits the packed lists are slower than plain ones (faiss 1.15.1).
    return _Code(size_bytes=size, rows_s=rows_s, refine=bits < 6, packed=kind == "RaBitQ" and bits == 1)


def _product(key: str, dim: int) -> _Code | None:
    """Pieces of the vector, a word of a codebook for each; ValueError if it cannot be cut into that number."""
    match = re.fullmatch(r"PQ(\d+)(?:x(4|8))?", key)
    if match is None:
        return None
    pieces, bits = int(match[1]), int(match[2] or 8)
    if pieces < 1 or dim % pieces:
        raise ValueError(f"{key} cuts vectors into {pieces} pieces, and {dim} dimensions cannot be cut so")
    return _Code(
        size_bytes=math.ceil(pieces * bits / 8), rows_s=_ENCODE_ROWS_S[f"PQx{bits}"], refine=True, packed=bits == 4
    )


def _dim_after(step: str, dim: int) -> int:
    """Dimensions after one step of a transform; ValueError if there is none such."""
    match = TRANSFORM.fullmatch(step)
    if match is None:
        raise ValueError(f"there is no transform {step!r}")
    return int(match[1] or dim)
