"""Vectors that a user gives as a query."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import InputError

MOST_FILE_BYTES = 1 << 30
"""Of a file of one vector, or of some; a larger one is not what was meant."""


def read_vector(path: Path) -> np.ndarray:
    """The vector in a file: .npy of one vector, or of several, of which it is the first; or a JSON list of numbers.

    float64 of shape (d,), not checked. InputError `bad_query` where the file is neither.
    """
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise ValueError("it is larger than 1 GB")
        if path.suffix == ".npy":
            loaded: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            loaded = np.array(json.loads(path.read_bytes()))
        return first_vector(loaded)
    except (OSError, ValueError, TypeError, EOFError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{path} holds no vector: {reason}",
            next_step="give a .npy file of one vector, or a JSON list of numbers",
            code="bad_query",
        ) from error


def first_vector(array: np.ndarray) -> np.ndarray:
    """float64 (d,) of an array of shape (d,), or of (n, d), of which it is the first row; ValueError for others."""
    if array.dtype.kind not in "fiu":
        raise ValueError(f"it holds {array.dtype}, not numbers")
    if array.ndim not in (1, 2) or not array.size:
        raise ValueError(f"its shape is {array.shape}")
    return np.array(array if array.ndim == 1 else array[0], dtype=np.float64)


def checked_vector(vector: np.ndarray, dim: int, metric: str) -> np.ndarray:
    """The vector as an index is asked by it, float32 (dim,); for cosines of length 1.

    Raises InputError `wrong_dimension`, and `bad_query` where a number is not finite or all are zero.
    """
    if vector.shape != (dim,):
        raise InputError(
            f"the index holds vectors of {dim} numbers, the query has {vector.shape[-1] if vector.ndim else 0}",
            next_step="embed the query with the model of the index",
            code="wrong_dimension",
        )
    whole = vector.astype(np.float64)
    with np.errstate(over="ignore"):
        in_range = np.isfinite(whole.astype(np.float32)).all()
    if not in_range:
        raise InputError("the query has numbers that are not finite", code="bad_query")
    length = float(np.linalg.norm(whole))
    if length == 0.0 and metric != "l2":
        raise InputError("all numbers of the query are zero: it has no direction", code="bad_query")
    return np.asarray(whole / length if metric == "cosine" else whole, dtype=np.float32)
