"""Trained index without rows: assigns vectors to lists, encodes them, and searches once it has lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from embq.core.service.log import Events
from embq.index.faiss_module import faiss
from embq.index.index_files.files import damaged, write_by_faiss
from embq.index.index_files.lists import Lists, empty_lists

DEVICE = 0
"""A worker process shows itself, and the process of its units, one GPU only."""

T = TypeVar("T")

MOST_LOCATED = 4_000_000
"""Rows of an index whose codes are found by id; the table of more would take long to make, and much memory."""


class Template:
    """An IVF index and the transforms before it.

    Args:
        index: a `faiss.IndexIVF`, or an `IndexPreTransform` around one, trained.
        on_gpu: whether the list of a row may be found on the GPU.

    Attributes:
        ivf: the index behind the transforms.
        nlist: number of lists.
        code_size: bytes of a row's code.
    """

    def __init__(self, index: Any, *, on_gpu: bool = False) -> None:
        module = faiss()
        self._owner = index  # what is downcast only points into it
        self.index = module.downcast_index(index)
        self.ivf = module.downcast_index(module.extract_index_ivf(self.index))
        self.nlist: int = self.ivf.nlist
        self.code_size: int = self.ivf.code_size
        self._transforms = []
        if hasattr(self.index, "chain"):
            chain = self.index.chain
            self._transforms = [module.downcast_VectorTransform(chain.at(at)) for at in range(chain.size())]
        self._lists: object = None
        self._on_gpu = on_gpu
        self._search: CentroidSearch | None = None
        self._located = False

    @classmethod
    def read(cls, path: Path, *, on_gpu: bool = False) -> Template:
        """The template of a file; OutputError if it cannot be read."""
        try:
            return cls(faiss().read_index(str(path)), on_gpu=on_gpu)
        except (RuntimeError, MemoryError) as error:
            raise damaged(f"{path} cannot be read: {(str(error) or 'no memory for it').splitlines()[0]}") from error

    def write(self, path: Path, *, head: bytes = b"") -> None:
        """Write it without rows, behind other bytes; OSError if the disk refuses."""
        write_by_faiss(path, lambda writer: faiss().write_index(self.index, writer), head=head)

    def transformed(self, vectors: np.ndarray) -> np.ndarray:
        """Vectors after the transforms: float32 (n, dimension of the index)."""
        for transform in self._transforms:
            vectors = transform.apply(vectors)
        return np.ascontiguousarray(vectors, dtype=np.float32)

    def assign(self, transformed: np.ndarray) -> np.ndarray:
        """The list of each vector: int64 (n,).

        Args:
            transformed: as `transformed` gave them.
        """
        if self._search is None:
            self._search = CentroidSearch(self.ivf.quantizer, on_gpu=self._on_gpu)
        _, lists = self._search.run(lambda index: index.search(transformed, 1))
        numbers: np.ndarray = lists.ravel()
        return numbers

    def add(self, vectors: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Encode float32 vectors (n, dim) into the lists under the given ids; returns the list of each."""
        from faiss.contrib import ivf_tools

        add_preassigned: Any = ivf_tools.add_preassigned

        transformed = self.transformed(vectors)
        numbers = self.assign(transformed)
        if len(transformed):
            add_preassigned(self.ivf, transformed, numbers, np.ascontiguousarray(ids, dtype=np.int64))
        return numbers

    def decoded(self, ids: np.ndarray) -> np.ndarray:
        """Decoded vectors of rows: float32 (n, dim). RuntimeError if they cannot be had.

        The first call notes where each row is, which takes some 50 bytes per row.
        """
        if self._transforms or self.ivf.ntotal > MOST_LOCATED:
            raise RuntimeError("what a transform has left out cannot be had back, nor what would take long to find")
        if not self._located:
            self.ivf.set_direct_map_type(faiss().DirectMap.Hashtable)
            self._located = True
        vectors = [self.ivf.reconstruct(int(id_)) for id_ in ids]
        return np.stack(vectors) if vectors else np.zeros((0, self.ivf.d), np.float32)

    def hold(self, lists: Lists, rows: int, *, owner: object = None) -> None:
        """Let the index answer from these lists; `owner` is what must live as long as they do."""
        self.ivf.replace_invlists(lists, False)
        self.ivf.ntotal = rows
        self.index.ntotal = rows
        self._lists = (lists, owner)


def packed(template: Template) -> bool:
    """Let the index answer from a copy of its lists that is laid out for SIMD; True if that was of use.

    Of 4-bit product codes a scan is some ten times as fast so, of 1-bit RaBitQ a fifth; of RaBitQ with more bits it is
    slower (measured with faiss 1.15). The copy is padded to 32 rows per list, and lives in memory only.
    """
    module, ivf = faiss(), template.ivf
    kind = type(ivf).__name__
    if kind == "IndexIVFPQ" and ivf.pq.nbits == 4:
        make = module.IndexIVFPQFastScan
    elif kind == "IndexIVFRaBitQ" and ivf.rabitq.nb_bits == 1:
        make = module.IndexIVFRaBitQFastScan
    else:
        return False
    # faiss 1.15 gives the copy lists only if the original says that it owns its own, and ends the process elsewhere.
    ivf.own_invlists = True
    copy = make(ivf)
    ivf.own_invlists = False
    template.hold(empty_lists(template.nlist, template.code_size), 0)
    template.ivf = copy
    return True


class CentroidSearch:
    """Searches an index over centroids, on the GPU if that is possible and on the CPU otherwise.

    The first failure of the GPU, as a rule too little memory, moves all further work to the CPU.
    faiss raises RuntimeError if a GPU has no memory left, and ends the process with SIGABRT on any other CUDA error,
    so a GPU is for processes that their parent starts again without one: see `embq.index.workers.service`.

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
        """Result of `work` for the index. It is called again with the CPU's if it fails on the GPU."""
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


log = Events("index")


def _is_flat(index: Any) -> bool:
    module = faiss()
    index = module.downcast_index(index)
    if isinstance(index, module.IndexPreTransform):
        return _is_flat(index.index)
    return isinstance(index, module.IndexFlat)
