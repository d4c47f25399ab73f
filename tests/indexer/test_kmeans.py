"""k-means goes on where it was stopped, and gives what it would have given without a stop."""

from __future__ import annotations

import numpy as np
import pytest

from embq.index.stages.training import kmeans

POINTS = np.random.default_rng(3).normal(size=(2_000, 16)).astype(np.float32)


def test_iterations_after_a_stop_give_the_centroids_of_an_uninterrupted_training() -> None:
    """Given the checkpoint of any iteration, when training goes on from it, then the centroids are the same bytes."""
    left: list[tuple[int, np.ndarray]] = []
    whole = kmeans(
        POINTS,
        32,
        iterations=5,
        seed=7,
        spherical=False,
        start=None,
        checkpoint=lambda done, found: left.append((done, found)),
    )
    assert [done for done, _ in left] == [1, 2, 3, 4]
    for start in left:
        resumed = kmeans(
            POINTS, 32, iterations=5, seed=7, spherical=False, start=start, checkpoint=lambda done, found: None
        )
        assert resumed.tobytes() == whole.tobytes()


@pytest.mark.parametrize("spherical", [False, True])
def test_every_iteration_brings_points_nearer_to_their_centroids(spherical: bool) -> None:
    """Given more iterations, then the mean squared distance to the nearest centroid is smaller."""
    points = POINTS / np.linalg.norm(POINTS, axis=1, keepdims=True)

    def cost(iterations: int) -> float:
        found = kmeans(
            points,
            32,
            iterations=iterations,
            seed=7,
            spherical=spherical,
            start=None,
            checkpoint=lambda done, left: None,
        )
        return float(((points[:, None] - found[None]) ** 2).sum(axis=2).min(axis=1).mean())

    costs = [cost(iterations) for iterations in (1, 3, 9)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]
