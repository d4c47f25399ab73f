"""faiss, imported in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from types import ModuleType

from embq.core.errors import ConfigError
from embq.core.extras import missing

DISTRIBUTIONS = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs", "faiss-gpu-cu12", "faiss-gpu-cu11")
"""All install into the same folder `faiss`, so that of two the later one half overwrites the earlier one."""

FEW_QUERIES = 8
"""Number of queries below which comparing one by one is as fast as a matrix product."""

MOST_BYTES = 1 << 46
"""faiss 1.15 refuses to read vectors beyond 1 TB by default; index files are written by embq itself."""


@cache
def faiss() -> ModuleType:
    """The module; ConfigError if it is not installed, or twice."""
    installed = [name for name in DISTRIBUTIONS if _installed(name)]
    if len(installed) > 1:
        raise ConfigError(
            f"{' and '.join(installed)} are both installed, and overwrite each other's files",
            next_step=f"pip uninstall {' '.join(installed)}, then pip install 'embq[index]' or 'embq[index-gpu]'",
            code="two_faiss",
        )
    try:
        import faiss as module
    except ImportError as error:
        raise missing(
            "faiss",
            f"an index is built and searched with faiss, which cannot be imported here: {error}",
            next_step="pip install 'embq[index]', or 'embq[index-gpu]' on a machine with a CUDA device",
            code="no_faiss",
        ) from error
    raise_limit = getattr(module, "set_deserialization_vector_byte_limit", None)
    if raise_limit is not None:
        raise_limit(MOST_BYTES)
    loaded: ModuleType = module
    return loaded


def set_threads(count: int) -> None:
    """Set the number of threads of faiss in this process."""
    faiss().omp_set_num_threads(max(1, count))


@contextmanager
def matrix_products(dim: int) -> Iterator[None]:
    """Have exact search compare by matrix products from `FEW_QUERIES` queries on, for the length of the block.

    faiss 1.15 does so from 128,000 / dim queries on, and takes eight times as long for 200 queries of 128 dimensions.
    """
    variables = faiss().cvar
    threshold = getattr(variables, "distance_compute_blas_threshold", None)
    if threshold is None:
        yield
        return
    variables.distance_compute_blas_threshold = min(threshold, FEW_QUERIES * dim)
    try:
        yield
    finally:
        variables.distance_compute_blas_threshold = threshold


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
