"""Stage `train`: transforms, centroids by k-means, and codebooks, learned from the sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embq.core.errors import InputError
from embq.core.storage.durable import drop
from embq.index.faiss_module import faiss, set_threads
from embq.index.index_files.files import read_arrays
from embq.index.index_files.template import CentroidSearch, Template
from embq.index.stages.spec import BuildSpec
from embq.index.stages.task import StageResult, Task

PCA_ROWS = 65_536
"""Rows that the leading directions are found from; more do not move them."""

SAMPLE_ROWS = 4_096
"""256 rows for each of the 16 words of a 4-bit code: what faiss itself would look at."""

ITERATIONS = 12

PIECES_AT_ONCE = 64
"""Number of pieces that are learned together, which bounds the memory: 16 MB for each."""


def train(task: Task) -> StageResult:
    """The template of the plan's key, without rows."""
    spec = task.spec_as(BuildSpec)
    set_threads(task.threads)
    points = np.concatenate([np.load(task.file("sample", number, "points")) for number in range(len(spec.blocks))])
    if not len(points):
        raise InputError(
            "there is no row to train on: none of the vectors that were drawn has a direction",
            next_step="look at the vectors; `embq verify` checks those of a run",
            code="bad_vectors",
        )
    index = faiss().index_factory(spec.plan.dim, spec.plan.key, spec.faiss_metric)
    template = Template(index, on_gpu=task.on_gpu)
    transformed = _train_transforms(template, points)
    ivf = template.ivf
    nlist = min(ivf.nlist, len(transformed))
    if nlist < ivf.nlist:
        raise InputError(
            f"{len(transformed)} vectors cannot be the centres of {ivf.nlist} lists",
            next_step="leave out --index-key, or give one with fewer lists",
            code="too_few_vectors",
        )
    checkpoint = task.unit.build_dir.scratch / f"kmeans-{task.unit.digest[:12]}.npz"
    if ivf.quantizer.ntotal == 0:
        listed, holder = list_space(ivf, transformed)
        centroids = kmeans(
            listed,
            nlist,
            iterations=spec.plan.kmeans_iterations,
            seed=spec.plan.seed,
            spherical=spec.plan.metric == "ip",
            start=_read(checkpoint),
            checkpoint=lambda done, current: _write(task, checkpoint, done, current),
            on_gpu=task.on_gpu,
        )
        settle(ivf, holder, centroids)
    train_codes(ivf, transformed, seed=spec.plan.seed)
    path = task.temporary("trained.index")
    template.write(path)
    drop(checkpoint)
    sizes = np.bincount(template.assign(transformed), minlength=ivf.nlist)
    return StageResult(
        index_files={"trained": path},
        stats={
            "points": len(points),
            "code_size": template.code_size,
            "imbalance_factor": float(ivf.nlist * np.square(sizes, dtype=np.float64).sum() / max(1, sizes.sum()) ** 2),
            "residual": _residual(template, transformed),
        },
    )


def _train_transforms(template: Template, points: np.ndarray) -> np.ndarray:
    """Train what stands before the lists, one after the other; returns what the index sees of the points."""
    if not hasattr(template.index, "chain"):
        return np.ascontiguousarray(points, np.float32)
    transformed = _through_chain(template.index.chain, points, most_rows=len(points))
    template.index.is_trained = False
    return transformed


def _through_chain(chain: Any, points: np.ndarray, *, most_rows: int) -> np.ndarray:
    """The points after all transforms of a chain, each of which is trained if it is not yet.

    Args:
        most_rows: at most about this many of the points are trained on.
    """
    module = faiss()
    for at in range(chain.size()):
        transform: Any = module.downcast_VectorTransform(chain.at(at))
        if not transform.is_trained:
            learn(transform, points[:: max(1, len(points) // most_rows)])
        points = transform.apply(points)
    return np.ascontiguousarray(points, np.float32)


def _residual(template: Template, transformed: np.ndarray) -> float:
    """Mean squared distance of a training row to its centroid: what later rows are compared with."""
    distances, _ = template.ivf.quantizer.search(transformed[: 1 << 16], 1)
    if template.ivf.metric_type == faiss().METRIC_INNER_PRODUCT:
        norms = np.einsum("ij,ij->i", transformed[: 1 << 16], transformed[: 1 << 16], dtype=np.float64)
        return float(np.mean(norms) + 1.0 - 2.0 * np.mean(distances, dtype=np.float64))
    return float(np.mean(distances, dtype=np.float64))


def _read(path: Path) -> tuple[int, np.ndarray] | None:
    try:
        saved = read_arrays(path)
        return int(saved["done"]), saved["centroids"]
    except (OSError, ValueError, KeyError):
        return None


def _write(task: Task, path: Path, done: int, centroids: np.ndarray) -> None:
    temporary = task.temporary("kmeans.npz")
    np.savez(temporary, done=np.int64(done), centroids=centroids)
    temporary.replace(path)


def list_space(ivf: Any, transformed: np.ndarray) -> tuple[np.ndarray, Any]:
    """The rows as the centroids see them, float32 (n, their dimensions), and the index that is to hold the centroids.

    Trains what stands between, as in "IVF4096(PCA96,Flat)".

    Args:
        ivf: a `faiss.IndexIVF` without centroids.
        transformed: float32 (n, d), rows of the sample as the index sees them.
    """
    module = faiss()
    quantizer = module.downcast_index(ivf.quantizer)
    if not hasattr(quantizer, "chain"):
        return transformed, quantizer
    return _through_chain(quantizer.chain, transformed, most_rows=PCA_ROWS), module.downcast_index(quantizer.index)


def learn(transform: Any, points: np.ndarray) -> None:
    """Train a transform, and drop what only training needs: of a PCA the directions that are not kept, 4 d^2 bytes.

    Args:
        points: float32 (n, d).
    """
    transform.train(points)
    if hasattr(transform, "PCAMat"):
        transform.PCAMat.resize(0)


def settle(ivf: Any, holder: Any, centroids: np.ndarray) -> None:
    """Give the index its centroids.

    Args:
        holder: what `list_space` gave.
        centroids: float32 (lists, dimensions of the centroids).
    """
    if not holder.is_trained:
        holder.train(centroids)
    holder.add(centroids)
    ivf.quantizer.is_trained = True
    ivf.quantizer.ntotal = holder.ntotal


def kmeans(
    points: np.ndarray,
    count: int,
    *,
    iterations: int,
    seed: int,
    spherical: bool,
    start: tuple[int, np.ndarray] | None,
    checkpoint: Callable[[int, np.ndarray], None],
    on_gpu: bool = False,
) -> np.ndarray:
    """Centroids of shape (count, d), float32.

    One call of faiss per iteration, each with the centroids of the one before: the same numbers as without a stop.
    An iteration that fails on the GPU is done again on the CPU, and so are those behind it.

    Args:
        points: float32 (n, d), n >= count.
        spherical: bring centroids to length 1 after each iteration.
        start: iterations done, and the centroids after them, where an earlier attempt has left any.
        checkpoint: gets both after each iteration but the last.
        on_gpu: whether the GPU may be used.
    """
    done, centroids = start or (0, _first(points, count, seed))
    search = CentroidSearch(faiss().IndexFlatL2(points.shape[1]), on_gpu=on_gpu)
    while done < iterations:
        centroids = search.run(partial(_iteration, points, centroids, seed=seed + done, spherical=spherical))
        done += 1
        if done < iterations:
            checkpoint(done, centroids)
    return centroids


def _iteration(points: np.ndarray, centroids: np.ndarray, index: Any, *, seed: int, spherical: bool) -> np.ndarray:
    """The centroids after one iteration; `index` is a flat one, whose content is replaced."""
    module = faiss()
    count, dim = centroids.shape
    parameters = module.ClusteringParameters()
    parameters.niter = 1
    parameters.nredo = 1
    parameters.seed = seed
    parameters.spherical = spherical
    parameters.min_points_per_centroid = 1
    parameters.max_points_per_centroid = len(points) // count + 1
    clustering = module.Clustering(dim, count, parameters)
    module.copy_array_to_vector(np.ascontiguousarray(centroids).ravel(), clustering.centroids)
    index.reset()
    clustering.train(points, index)
    updated: np.ndarray = module.vector_float_to_array(clustering.centroids).reshape(count, -1).copy()
    return updated


def _first(points: np.ndarray, count: int, seed: int) -> np.ndarray:
    chosen = np.random.default_rng(seed).permutation(len(points))[:count]
    return points[np.sort(chosen)].copy()


def train_codes(ivf: Any, transformed: np.ndarray, *, seed: int) -> None:
    """Train how an index keeps a row; its lists are known already.

    4-bit product codes are learned for all pieces at once (faiss takes them one by one: 18 s for 192 pieces, this 2 s).
    By squared distances they stand for the row itself, not for its difference to the centroid: one table of distances
    then serves all lists of a query, and a scan is three times as fast at the same recall after re-ranking.

    Args:
        ivf: a `faiss.IndexIVF` with its centroids.
        transformed: float32 (n, d), rows of the sample as the lists see them.
    """
    module = faiss()
    if type(ivf).__name__ != "IndexIVFPQ" or ivf.pq.nbits != 4:
        ivf.train(transformed)
        return
    ivf.by_residual = ivf.metric_type != module.METRIC_L2
    chosen = transformed[np.sort(np.random.default_rng(seed).permutation(len(transformed))[:SAMPLE_ROWS])]
    if ivf.by_residual:
        _, lists = ivf.quantizer.search(chosen, 1)
        chosen = chosen - ivf.quantizer.reconstruct_batch(np.ascontiguousarray(lists.ravel()))
    words = product_words(chosen, ivf.pq.M, 1 << ivf.pq.nbits, seed=seed)
    module.copy_array_to_vector(words.ravel(), ivf.pq.centroids)
    ivf.use_precomputed_table = -1
    ivf.is_trained = True


def product_words(rows: np.ndarray, pieces: int, words: int, *, seed: int) -> np.ndarray:
    """The words of a product quantizer: float32 (pieces, words, d / pieces), by k-means on each piece.

    Args:
        rows: float32 (n, d), at least one; d is a multiple of `pieces`.
    """
    parts = rows.reshape(len(rows), pieces, -1).transpose(1, 0, 2)
    first = np.random.default_rng(seed).permutation(max(len(rows), words))[:words] % len(rows)
    return np.concatenate(
        [_learned(parts[at : at + PIECES_AT_ONCE], first) for at in range(0, pieces, PIECES_AT_ONCE)]
    ).astype(np.float32)


def _learned(parts: np.ndarray, first: np.ndarray) -> np.ndarray:
    parts = np.ascontiguousarray(parts)
    codebook = parts[:, first]
    numbers = np.arange(len(first))
    for _ in range(ITERATIONS):
        far = np.square(codebook).sum(axis=2)[:, None, :] - 2 * parts @ codebook.transpose(0, 2, 1)
        belongs = (far.argmin(axis=2)[:, :, None] == numbers).astype(np.float32)
        count = belongs.sum(axis=1)[:, :, None]
        means = belongs.transpose(0, 2, 1) @ parts / np.maximum(count, 1)
        codebook = np.where(count > 0, means, codebook)
    return codebook
