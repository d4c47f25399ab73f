"""Stored form of vectors: truncation, normalization and quantization, and the way back. Pure functions of arrays.

Each row is computed alone, with sums in float64, so the stored form depends neither on the batch nor on the width
of the processor's vector registers.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import numpy as np

from embq.core.native import library
from embq.core.rows.spec import RowSpec

STORED_DTYPES = {"float16": np.float16, "float32": np.float32, "int8": np.int8, "binary": np.uint8}
"""Type of stored vectors -> type of their array."""

INT8_MOST = 127
"""Values are stored as -127 to 127, so that zero is in the middle; -128 is unused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Reason why a vector is not stored: a failure code and its message."""

    code: str
    message: str


FLOAT16_BEYOND = np.float32(65_520)
"""The least number that float16 rounds to infinity."""

NON_FINITE = Fault(code="non_finite", message="the model gave a vector that is not finite, in fp32 as well")
BEYOND_FLOAT16 = Fault(code="beyond_float16", message="the vector has a number beyond 65,504, the largest of float16")
ZERO_VECTOR = Fault(code="zero_vector", message="the model gave a vector of zeros, which has no direction")


def stored(block: np.ndarray, rows: RowSpec) -> tuple[np.ndarray, dict[int, Fault]]:
    """The stored form of vectors, and those without one: truncated, normalized and cast as `rows` says.

    Args:
        block: float32 of shape (n, dim); `rows.check` has found `dim` to be fit.

    Returns an array of shape (n, rows.width(dim)) of the type in `STORED_DTYPES`, and position -> fault. The array's
    values at the position of a fault are undefined.
    """
    finite = np.isfinite(block).all(axis=1)
    vectors = block[:, : rows.kept_dim(block.shape[1])]
    if not finite.all():
        vectors = np.where(finite[:, None], vectors, np.float32(0.0))
    faults = dict.fromkeys(np.flatnonzero(~finite).tolist(), NON_FINITE)
    if rows.unit_length:
        lengths = _lengths(vectors)
        zero = lengths == 0.0
        faults = dict.fromkeys(np.flatnonzero(zero).tolist(), ZERO_VECTOR) | faults
        vectors = (vectors / np.where(zero, 1.0, lengths)[:, None]).astype(np.float32)
    values = _cast(vectors, rows)
    if rows.dtype == "float16":
        beyond = (np.abs(vectors) >= FLOAT16_BEYOND).any(axis=1)  # float16 itself is ten times as slow to look at
        faults |= dict.fromkeys(np.flatnonzero(beyond).tolist(), BEYOND_FLOAT16)
    return values, faults


def restored(values: np.ndarray, rows: RowSpec) -> np.ndarray:
    """The vectors of a stored form: float32 of shape (n, kept numbers); of binary ones, their signs as 1, -1.

    Args:
        values: as `stored` gave them, in any of its types.
    """
    if rows.dtype == "binary":
        return np.unpackbits(values, axis=1).astype(np.float32) * np.float32(2.0) - np.float32(1.0)
    as_float = values.astype(np.float32)
    return as_float * np.float32(rows.int8_range / INT8_MOST) if rows.dtype == "int8" else as_float


def similarities(images: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, dict[int, Fault]]:
    """The cosine of each image and its text: float32 of shape (n,), and position -> fault if there is none.

    Args:
        images, texts: float32 of one shape (n, dim), as the model returns them.
    """
    finite = np.isfinite(images).all(axis=1) & np.isfinite(texts).all(axis=1)
    images, texts = (np.where(finite[:, None], block, np.float32(0.0)) for block in (images, texts))
    product = _lengths(images) * _lengths(texts)
    dots = np.einsum("ij,ij->i", images, texts, dtype=np.float64)
    cosines = np.clip(dots / np.where(product == 0.0, 1.0, product), -1.0, 1.0).astype(np.float32)
    faults = dict.fromkeys(np.flatnonzero(product == 0.0).tolist(), ZERO_VECTOR)
    return cosines, faults | dict.fromkeys(np.flatnonzero(~finite).tolist(), NON_FINITE)


def _lengths(block: np.ndarray) -> np.ndarray:
    """Euclidean lengths, float64: squares of float32 neither overflow nor vanish there."""
    lengths: np.ndarray = np.sqrt(np.einsum("ij,ij->i", block, block, dtype=np.float64))
    return lengths


def _cast(vectors: np.ndarray, rows: RowSpec) -> np.ndarray:
    if rows.dtype == "binary":
        return np.packbits(vectors > 0, axis=1)
    with np.errstate(over="ignore"):  # what does not fit float16 becomes infinite there, what does not int8 the most
        if rows.dtype == "int8":
            steps = vectors * np.float32(INT8_MOST / rows.int8_range)
            np.clip(np.rint(steps, out=steps), -INT8_MOST, INT8_MOST, out=steps)
            return steps.astype(np.int8)
        if rows.dtype == "float16" and (native := library()) is not None:
            values = np.empty(vectors.shape, np.float16)
            source = np.ascontiguousarray(vectors, np.float32)
            done = native.embq_float16(c_void_p(source.ctypes.data), c_int64(source.size), c_void_p(values.ctypes.data))
            if done == source.size:
                return values
        return vectors.astype(STORED_DTYPES[rows.dtype])
