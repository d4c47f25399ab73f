"""Code words and lists: learned quickly, and as good as those that faiss learns by itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from embq.index.plan.codecs import codec
from embq.index.stages.training import kmeans, list_space, product_words, settle, train_codes
from tests.support.lazy import lazy

faiss = lazy("faiss")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take most of the time of these small trainings."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(threads)


def rows(count: int, dim: int, *, seed: int = 0) -> np.ndarray:
    """Unit vectors in clusters, with less variance in each further dimension, as embeddings have."""
    rng = np.random.default_rng(seed)
    spread = 1 / np.sqrt(1 + np.arange(dim))
    centres = np.random.default_rng(99).normal(size=(40, dim)) * spread
    found = centres[rng.integers(0, 40, count)] + 0.5 * rng.normal(size=(count, dim)) * spread
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def lost(rows: np.ndarray, words: np.ndarray) -> float:
    """Mean squared distance of rows to what their codes stand for."""
    pieces, _, width = words.shape
    parts = rows.reshape(len(rows), pieces, width).transpose(1, 0, 2)
    far = ((parts[:, :, None] - words[:, None]) ** 2).sum(axis=3)
    return float(far.min(axis=2).sum(axis=0).mean())


def test_words_lose_no_more_than_those_of_faiss() -> None:
    learned, others = rows(4000, 32), rows(1000, 32, seed=1)
    quantizer = faiss.ProductQuantizer(32, 8, 4)
    quantizer.train(learned)
    theirs = faiss.vector_to_array(quantizer.centroids).reshape(8, 16, 4)
    assert lost(others, product_words(learned, 8, 16, seed=1)) < 1.05 * lost(others, theirs)


def test_the_same_seed_learns_the_same_words() -> None:
    learned = rows(500, 16)
    assert product_words(learned, 4, 16, seed=1).tobytes() == product_words(learned, 4, 16, seed=1).tobytes()


def test_fewer_rows_than_words_are_told_apart_exactly() -> None:
    learned = rows(5, 16)
    assert lost(learned, product_words(learned, 4, 16, seed=1)) < 1e-6


def trained(key: str, learned: np.ndarray, metric: int = faiss.METRIC_L2) -> faiss.Index:
    index = faiss.index_factory(learned.shape[1], key, metric)
    ivf = faiss.downcast_index(index)
    points, holder = list_space(ivf, learned)
    centroids = kmeans(
        points, ivf.nlist, iterations=5, seed=1, spherical=False, start=None, checkpoint=lambda done, found: None
    )
    settle(ivf, holder, centroids)
    train_codes(ivf, learned, seed=1)
    return index


def found(index: faiss.Index, base: np.ndarray, queries: np.ndarray, *, probes: int, among: int) -> float:
    """The part of the true 10 nearest that are among the first candidates."""
    index.add(base)
    faiss.extract_index_ivf(index).nprobe = probes
    _, truth = faiss.knn(queries, base, 10)
    _, answers = index.search(queries, among)
    return float(np.mean([np.isin(t, a).mean() for t, a in zip(truth, answers, strict=True)]))


def test_an_index_with_these_words_has_the_neighbours_among_its_first_candidates() -> None:
    base, queries = rows(3000, 32), rows(100, 32, seed=1)
    index = trained("IVF16,PQ16x4", base)
    assert not faiss.downcast_index(index).by_residual
    assert found(index, base, queries, probes=16, among=40) > 0.85


def test_inner_products_are_kept_as_differences_to_the_centroids() -> None:
    base = rows(3000, 32)
    index = trained("IVF16,PQ16x4", base, faiss.METRIC_INNER_PRODUCT)
    inner = faiss.downcast_index(index)
    assert inner.by_residual
    inner.nprobe = 16
    index.add(base)
    queries = rows(50, 32, seed=1)
    _, truth = faiss.knn(queries, base, 10, faiss.METRIC_INNER_PRODUCT)
    _, answers = index.search(queries, 40)
    assert np.mean([np.isin(t, a).mean() for t, a in zip(truth, answers, strict=True)]) > 0.85


def test_lists_told_apart_in_a_quarter_of_the_dimensions_hold_the_neighbours() -> None:
    base, queries = rows(3000, 128), rows(100, 128, seed=1)
    whole = found(trained("IVF64,Flat", base), base, queries, probes=8, among=10)
    leading = found(trained("IVF64(PCA32,Flat),Flat", base), base, queries, probes=8, among=10)
    assert leading > whole - 0.05


def test_an_index_takes_no_more_than_its_plan_says() -> None:
    base = rows(3000, 128)
    known = codec("PQ64x4", 128, list_dim=32)
    index = trained(known.factory(32), base)
    index.add(base)
    assert faiss.serialize_index(index).nbytes < known.index_bytes(3000, 32, 128)


def test_an_index_with_leading_dimensions_is_the_same_after_it_was_written() -> None:
    base, queries = rows(3000, 128), rows(20, 128, seed=1)
    index = trained("IVF32(PCA32,Flat),PQ64x4", base)
    index.add(base)
    again = faiss.deserialize_index(faiss.serialize_index(index))
    for one in (index, again):
        faiss.extract_index_ivf(one).nprobe = 4
    assert again.search(queries, 10)[1].tolist() == index.search(queries, 10)[1].tolist()
    packed = faiss.IndexIVFPQFastScan(faiss.downcast_index(again))
    packed.nprobe = 4
    pairs = zip(index.search(queries, 10)[1], packed.search(queries, 40)[1], strict=True)
    assert np.mean([np.isin(plain, candidates).mean() for plain, candidates in pairs]) > 0.95
