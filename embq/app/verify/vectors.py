"""Expected stored vectors, computed in float64 by other formulas than those of the product."""

from __future__ import annotations

import numpy as np

from embq.core.rows.spec import RowSpec

NORM_OFF = 1e-3
"""Largest error of the length of a unit vector: 0.0005 in float16, half a unit in the eleventh bit of each number."""

STEP_OFF = 0.501
"""Largest error of int8 in steps: half a step by rounding, and the error of float32."""

COSINE_OFF = {"float16": 2e-3, "float32": 1e-5}
"""Largest difference between a stored cosine and that of the two stored vectors."""

SHORT = 1e-3
"""Length below which float16 has too few bits for the numbers of a vector."""

BIT_VALUES = np.array([128, 64, 32, 16, 8, 4, 2, 1])
FLOAT_DTYPES = {"float16": np.float16, "float32": np.float32}
LAST_PLACE = {"float16": (2.0**-10, 2.0**-24), "float32": (2.0**-23, 2.0**-149)}
"""The unit in the last place of 1, and the smallest positive number."""


def wrong_norms(values: np.ndarray, rows: RowSpec) -> np.ndarray:
    """Mask of stored vectors that cannot come from one of length 1: bool of shape (n,).

    Of int8, each number may be off by half a step, and where one stands for all that are larger, the vector may be
    shorter. Binary vectors have no length.
    """
    if rows.dtype == "binary":
        return np.zeros(len(values), dtype=bool)
    wrong: np.ndarray
    if rows.dtype in FLOAT_DTYPES:
        wrong = np.abs(np.linalg.norm(values.astype(np.float64), axis=1) - 1.0) > NORM_OFF
        return wrong
    step = rows.int8_range / 127
    lengths = np.linalg.norm(values.astype(np.float64) * step, axis=1)
    slack = np.sqrt(values.shape[1]) * step * STEP_OFF
    whole = (np.abs(values.astype(np.int16)) < 127).all(axis=1)
    wrong = (lengths > 1.0 + slack) | (whole & (lengths < 1.0 - slack))
    return wrong


def differing(values: np.ndarray, given: np.ndarray, rows: RowSpec) -> np.ndarray:
    """Mask of stored vectors that differ from the stored form of `given`: bool of shape (n,).

    Floats that are only cut are compared bit for bit, and so are the signs of binary. What was divided by its length
    may be off by one unit in the last place, int8 by half a step.

    Args:
        values: as stored, shape (n, width).
        given: float32 of shape (n, dim), as the model gives them.
    """
    kept = given[:, : rows.truncate_dim].astype(np.float64) if rows.truncate_dim else given.astype(np.float64)
    if rows.unit_length:
        kept = kept / np.linalg.norm(kept, axis=1, keepdims=True)
    wrong: np.ndarray
    off: np.ndarray
    if rows.dtype == "binary":
        signs = (kept > 0).reshape(len(kept), kept.shape[1] // 8, 8)
        wrong = (signs * BIT_VALUES).sum(axis=2) != values
    elif rows.dtype == "int8":
        step = rows.int8_range / 127
        off = np.abs(values.astype(np.float64) * step - np.clip(kept, -rows.int8_range, rows.int8_range))
        wrong = (off > STEP_OFF * step) | (values == -128)
    elif rows.unit_length:
        relative, least = LAST_PLACE[rows.dtype]
        off = np.abs(values.astype(np.float64) - kept)
        wrong = off > relative * np.abs(kept) + least
    else:
        # As bytes: a comparison of numbers would take -0.0 for 0.0.
        wrong = _as_bytes(values) != _as_bytes(kept.astype(FLOAT_DTYPES[rows.dtype]))
    return np.asarray(wrong.any(axis=1))


def wrong_cosines(cosines: np.ndarray, images: np.ndarray, texts: np.ndarray, off: float) -> np.ndarray:
    """Mask of values that are not cosines, or differ from those of their vectors by more than `off`: bool (n,).

    Vectors shorter than `SHORT` have lost too much of their direction to tell.
    """
    first, second = images.astype(np.float64), texts.astype(np.float64)
    lengths = np.minimum(np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1))
    product = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    near = np.abs((first * second).sum(axis=1) - cosines * product) <= off * product
    right: np.ndarray = (np.abs(cosines) <= 1.0) & (near | (lengths < SHORT))
    return ~right  # so that NaN is wrong as well


def _as_bytes(matrix: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(matrix).view(np.uint8)
