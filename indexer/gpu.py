"""Exact search among centroids on the GPU of the worker that a unit belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from core.service.log import Events
from indexer.faiss_module import faiss

DEVICE = 0
"""A worker process shows itself, and the process of its units, one GPU only."""

T = TypeVar("T")
log = Events("index")


class CentroidSearch:
    """Searches an index over centroids, on the GPU where that is possible and on the CPU otherwise.

    The first failure of the GPU, as a rule too little memory, moves all further work to the CPU.
    faiss raises RuntimeError where a GPU has no memory left, and ends the process with SIGABRT on any other CUDA error,
    so a GPU is for processes that their parent starts again without one: see `worker.index_child`.

    Args:
        index: a flat index, alone or behind transforms; of any other kind faiss has no copy for GPUs, and the CPU
            searches it.
        on_gpu: whether this process may use the GPU that it sees. Without it, nothing of CUDA is called.
    """

    def __init__(self, index: Any, *, on_gpu: bool) -> None:
        self._index = index
        self._copy: Any = None
        # Builds of faiss without CUDA have no such class.
        self._on_gpu = on_gpu and hasattr(faiss(), "StandardGpuResources") and _is_flat(index)

    def run(self, work: Callable[[Any], T]) -> T:
        """What `work` gives for the index. It is called again, with the CPU's, where it fails on the GPU."""
        if self._on_gpu:
            try:
                if self._copy is None:
                    module = faiss()
                    self._copy = module.index_cpu_to_gpu(module.StandardGpuResources(), DEVICE, self._index)
                return work(self._copy)
            except RuntimeError as error:
                log.warning("index_on_cpu", why=str(error).rpartition("failed: ")[2].strip())
                self._copy, self._on_gpu = None, False
        return work(self._index)


def _is_flat(index: Any) -> bool:
    module = faiss()
    index = module.downcast_index(index)
    if isinstance(index, module.IndexPreTransform):
        return _is_flat(index.index)
    return isinstance(index, module.IndexFlat)
