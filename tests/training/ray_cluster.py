"""A Ray cluster whose workers find `launched`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.servers import ray
from tests.support.servers.ray import QUIET
from tests.training.launching import environment

__all__ = ["QUIET", "ray_cluster"]


@contextmanager
def ray_cluster(cpus: int, *, version: str = "", **changes: str) -> Iterator[str]:
    """The address of a head, for the length of the block.

    Args:
        version: what it says of itself instead of its own.
        changes: to its environment.
    """
    with ray.ray_cluster(cpus, {**environment(**QUIET), **changes}, version=version) as address:
        yield address
