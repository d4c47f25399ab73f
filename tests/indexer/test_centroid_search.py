"""Parts of an index that go to a GPU, the choice of the GPU, and the search without it where it cannot do it.

A stand-in for the entry points of faiss-gpu: copies are CPU indices that note where they were sent. It refuses what the
real one refuses (faiss/gpu/GpuCloner.cpp of 1.15).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embq.index.faiss_module import faiss
from embq.index.index_files.template import Template
from embq.index.stages.training import kmeans

DIM, LISTS = 16, 32
POINTS = np.random.default_rng(3).normal(size=(2_000, DIM)).astype(np.float32)
OUT_OF_MEMORY = "StandardGpuResources: alloc fail type FlatData dev 0 (cudaMalloc error out of memory [2])"


class GpuCopy:
    """A flat index on a GPU, of which searches after the first `searches` run out of memory."""

    def __init__(self, index: Any, searches: int) -> None:
        self._index = index
        self._left = searches

    def search(self, vectors: np.ndarray, k: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError(f"Error in allocMemory: Error: 'err == cudaSuccess' failed: {OUT_OF_MEMORY}\n")
        return self._index.search(vectors, k)


class Gpus:
    """faiss-gpu on a machine with two GPUs.

    Attributes:
        asked: names of all entry points that were called.
        sent: (device, type of the index) of each copy.
        room: copies for which there is memory.
        searches: of a copy, before it runs out of memory; None for a copy that is an index of faiss' own.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.sent: list[tuple[int, str]] = []
        self.room = 99
        self.searches: int | None = None
        for name in ("StandardGpuResources", "get_num_gpus", "index_cpu_to_gpu", "index_cpu_to_all_gpus"):
            monkeypatch.setattr(faiss(), name, self._noted(name), raising=False)

    def _noted(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.asked.append(name)
            return getattr(self, name)(*arguments)

        return call

    def StandardGpuResources(self) -> object:
        return object()

    def get_num_gpus(self) -> int:
        return 2

    def index_cpu_to_all_gpus(self, index: Any) -> Any:
        copies = [self.index_cpu_to_gpu(None, device, index) for device in range(self.get_num_gpus())]
        return copies[0]

    def index_cpu_to_gpu(self, resources: object, device: int, index: Any) -> Any:
        module = faiss()
        inner = module.downcast_index(index)
        while isinstance(inner, module.IndexPreTransform):
            inner = module.downcast_index(inner.index)
        if not isinstance(inner, module.IndexFlat):
            raise RuntimeError("This index type is not implemented on GPU.")
        self.sent.append((device, type(inner).__name__))
        self.room -= 1
        if self.room < 0:
            raise RuntimeError(f"Error in allocMemory: Error: 'err == cudaSuccess' failed: {OUT_OF_MEMORY}\n")
        copy = module.clone_index(index)
        return copy if self.searches is None else GpuCopy(copy, self.searches)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def trained(key: str) -> Any:
    index = faiss().index_factory(DIM, key, faiss().METRIC_L2)
    index.train(POINTS)
    return index


def centroids(*, on_gpu: bool) -> np.ndarray:
    return kmeans(
        POINTS,
        LISTS,
        iterations=4,
        seed=7,
        spherical=False,
        start=None,
        checkpoint=lambda done, found: None,
        on_gpu=on_gpu,
    )


@pytest.mark.parametrize("key", [f"IVF{LISTS},Flat", f"IVF{LISTS}(PCA8,Flat),SQ8", f"PCA12,IVF{LISTS},Flat"])
def test_flat_centroids_are_searched_on_the_one_gpu_of_the_worker(gpus: Gpus, key: str) -> None:
    index = trained(key)
    expected = Template(index).assign(Template(index).transformed(POINTS))
    template = Template(index, on_gpu=True)
    for _ in range(2):
        assert (template.assign(template.transformed(POINTS)) == expected).all()
    assert [device for device, _ in gpus.sent] == [0]
    assert "index_cpu_to_all_gpus" not in gpus.asked


def test_a_graph_over_centroids_stays_on_the_cpu(gpus: Gpus) -> None:
    index = trained(f"IVF{LISTS}_HNSW8,Flat")
    expected = Template(index).assign(POINTS)
    gpus.asked.clear()
    assert (Template(index, on_gpu=True).assign(POINTS) == expected).all()
    assert gpus.asked == []


def test_a_process_without_a_gpu_of_its_own_calls_nothing_of_cuda(gpus: Gpus) -> None:
    Template(trained(f"IVF{LISTS},Flat")).assign(POINTS)
    centroids(on_gpu=False)
    assert gpus.asked == []


def test_k_means_uses_the_one_gpu_of_the_worker(gpus: Gpus) -> None:
    expected = centroids(on_gpu=False)
    gpus.asked.clear()
    assert (centroids(on_gpu=True) == expected).all()
    assert gpus.sent == [(0, "IndexFlatL2")]


@pytest.mark.parametrize(("room", "searches"), [(0, 0), (1, 0), (1, 2)])
def test_lists_are_found_by_the_cpu_from_where_the_gpu_is_full(
    gpus: Gpus, caplog: pytest.LogCaptureFixture, room: int, searches: int
) -> None:
    """Given a GPU without room for the copy, or for a later search, then no row gets another list; the log says why."""
    index = trained(f"IVF{LISTS},Flat")
    expected = Template(index).assign(POINTS)
    gpus.room, gpus.searches = room, searches
    template = Template(index, on_gpu=True)
    found = [template.assign(part) for part in np.array_split(POINTS, 5)]
    assert (np.concatenate(found) == expected).all()
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"index_on_cpu why='{OUT_OF_MEMORY}'"]


@pytest.mark.parametrize("room", [0, 1])
def test_an_iteration_of_k_means_that_the_gpu_cannot_finish_is_done_again_by_the_cpu(
    gpus: Gpus, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    expected = centroids(on_gpu=False)
    gpus.room = room
    # Only an index of faiss' own can be trained with: this one refuses the points, as a full GPU would.
    monkeypatch.setattr(gpus, "index_cpu_to_gpu", _unfit(gpus.index_cpu_to_gpu))
    assert (centroids(on_gpu=True) == expected).all()
    assert len(gpus.sent) == 1
    assert [record.getMessage().split()[0] for record in caplog.records] == ["index_on_cpu"]


def _unfit(send: Any) -> Any:
    def sent(*arguments: Any) -> Any:
        send(*arguments)
        return faiss().IndexFlatL2(DIM + 1)

    return sent


def test_an_error_that_is_not_the_gpus_is_raised(gpus: Gpus) -> None:
    template = Template(trained(f"IVF{LISTS},Flat"), on_gpu=True)
    with pytest.raises(AssertionError):
        template.assign(POINTS[:, :5].copy())


@pytest.mark.gpu
def test_a_gpu_finds_the_lists_that_a_cpu_finds(caplog: pytest.LogCaptureFixture) -> None:
    """Given faiss-gpu and a GPU, then lists and centroids are the CPU's but for rows between two centroids."""
    pytest.importorskip("faiss")
    if not hasattr(faiss(), "StandardGpuResources") or not faiss().get_num_gpus():
        pytest.skip("needs faiss-gpu and a CUDA device")
    index = trained(f"IVF{LISTS}(PCA8,Flat),SQ8")
    found, expected = (Template(index, on_gpu=on_gpu).assign(POINTS) for on_gpu in (True, False))
    assert (found == expected).mean() > 0.999
    on_gpu, on_cpu = (_cost(centroids(on_gpu=on_gpu)) for on_gpu in (True, False))
    assert on_gpu == pytest.approx(on_cpu, rel=0.01)
    assert caplog.records == []


def _cost(found: np.ndarray) -> float:
    """Mean squared distance of a point to its centroid."""
    return float(np.square(POINTS[:, None] - found[None]).sum(axis=2).min(axis=1).mean())
