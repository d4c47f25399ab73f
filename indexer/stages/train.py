"""From the sample to the template: transforms, centroids, and what the code of a row needs to know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from core.errors import InputError
from core.storage.durable import drop
from indexer.building import BuildSpec
from indexer.coarse import learn, list_space, settle
from indexer.codebooks import train_codes
from indexer.faiss_module import faiss, set_threads
from indexer.kmeans import kmeans
from indexer.task import Made, Task
from indexer.template import Template


def train(task: Task) -> Made:
    """The template of the plan's key, without rows."""
    spec = BuildSpec.from_description(task.spec)
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
    seen = _train_transforms(template, points)
    ivf = template.ivf
    nlist = min(ivf.nlist, len(seen))
    if nlist < ivf.nlist:
        raise InputError(
            f"{len(seen)} vectors cannot be the centres of {ivf.nlist} lists",
            next_step="leave out --index-key, or give one with fewer lists",
            code="too_few_vectors",
        )
    checkpoint = task.unit.workshop.folder / f"kmeans-{task.unit.digest[:12]}.npz"
    if ivf.quantizer.ntotal == 0:
        listed, holder = list_space(ivf, seen)
        centroids = kmeans(
            listed,
            nlist,
            iterations=spec.plan.kmeans_iterations,
            seed=spec.plan.seed,
            spherical=spec.plan.metric == "ip",
            start=_read(checkpoint),
            checkpoint=lambda done, found: _write(task, checkpoint, done, found),
            on_gpu=task.on_gpu,
        )
        settle(ivf, holder, centroids)
    train_codes(ivf, seen, seed=spec.plan.seed)
    path = task.temporary("trained.index")
    template.write(path)
    drop(checkpoint)
    sizes = np.bincount(template.assign(seen), minlength=ivf.nlist)
    return Made(
        kept={"trained": path},
        stats={
            "points": len(points),
            "code_size": template.code_size,
            "imbalance_factor": float(ivf.nlist * np.square(sizes, dtype=np.float64).sum() / max(1, sizes.sum()) ** 2),
            "residual": _residual(template, seen),
        },
    )


def _train_transforms(template: Template, points: np.ndarray) -> np.ndarray:
    """Train what stands before the lists, one after the other; gives what the index sees of the points."""
    module = faiss()
    index = template.index
    if not hasattr(index, "chain"):
        return np.ascontiguousarray(points, np.float32)
    seen = points
    for at in range(index.chain.size()):
        transform: Any = module.downcast_VectorTransform(index.chain.at(at))
        if not transform.is_trained:
            learn(transform, seen)
        seen = transform.apply(seen)
    index.is_trained = False
    return np.ascontiguousarray(seen, np.float32)


def _residual(template: Template, seen: np.ndarray) -> float:
    """Mean squared distance of a training row to its centroid: what later rows are compared with."""
    distances, _ = template.ivf.quantizer.search(seen[: 1 << 16], 1)
    if template.ivf.metric_type == faiss().METRIC_INNER_PRODUCT:
        norms = np.einsum("ij,ij->i", seen[: 1 << 16], seen[: 1 << 16], dtype=np.float64)
        return float(np.mean(norms) + 1.0 - 2.0 * np.mean(distances, dtype=np.float64))
    return float(np.mean(distances, dtype=np.float64))


def _read(path: Path) -> tuple[int, np.ndarray] | None:
    try:
        with np.load(path, allow_pickle=False) as saved:
            return int(saved["done"]), saved["centroids"]
    except (OSError, ValueError, KeyError):
        return None


def _write(task: Task, path: Path, done: int, centroids: np.ndarray) -> None:
    temporary = task.temporary("kmeans.npz")
    np.savez(temporary, done=np.int64(done), centroids=centroids)
    temporary.replace(path)
