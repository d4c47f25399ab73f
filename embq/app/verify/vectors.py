"""Checks of stored vectors, computed in float64."""

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

FLOAT_DTYPES = ("float16", "float32")


def wrong_norms(values: np.ndarray, rows: RowSpec) -> np.ndarray:
    """Mask of stored vectors that cannot come from one of length 1: bool of shape (n,).

    Of int8, each number may be off by half a step, and if one stands for all that are larger, the vector may be
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
    unclipped = (np.abs(values.astype(np.int16)) < 127).all(axis=1)
    wrong = (lengths > 1.0 + slack) | (unclipped & (lengths < 1.0 - slack))
    return wrong


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
